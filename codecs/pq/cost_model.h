// How many k-means iterations hide behind prefill (PQCache, section 3.3, equations 1 to 3), fitted from measurements of
// this machine.
//
//   clustering of one layer    T_clus = alpha1 + beta1 s T            s tokens, T iterations
//   prefill of one layer       T_comp = alpha2 + beta2 s + gamma2 s^2
//   T_max = (gamma2 s^2 + beta2 s + alpha2 - alpha1) / (beta1 s)      clipped to 3..300
//
// Owned by a codec and shared with its indexes, which outlive it; any thread. The newest kSamplesMax measurements of
// either kind count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvmanager/base/mutex.h"

namespace kvmanager::pq {

class CostModel {
 public:
  static constexpr size_t kSamplesMax = 64;
  /// As long as one of the two has not been measured.
  static constexpr uint32_t kIterationsUnmeasured = 10;

  void AddClustering(uint64_t tokens, double iterations, double seconds);
  void AddPrefill(uint64_t tokens, double seconds);
  uint32_t Iterations(uint64_t tokens) const;

 private:
  struct Sample {
    double x;  // tokens * iterations, or tokens
    double seconds;
  };
  mutable Mutex mutex_;
  std::vector<Sample> clustering_ ABSL_GUARDED_BY(mutex_);
  std::vector<Sample> prefill_ ABSL_GUARDED_BY(mutex_);
  size_t next_clustering_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t next_prefill_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvmanager::pq
