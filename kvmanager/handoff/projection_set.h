// The projections of one cache: weights, the executor that has them, what it does per second, and what is recomputed
// with it.
//
// Shared by the capabilities that opened it, by registrations and by hand-offs; may be destroyed by any thread once
// nothing runs on it, before the recomputer. `place` is the loop's until the first layer is registered.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "kvmanager/base/byte_budget.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/handoff/recompute_device.h"
#include "kvmanager/store/page_store.h"
#include "monitoring/metrics.h"
#include "transport/recompute/executor.h"
#include "transport/recompute/link.h"
#include "transport/recompute/profile.h"
#include "xxhash.h"

namespace kvmanager {

/// One layer, as a client registers it; bytes in the client's arena or in `copies`, alive and unchanged until it is
/// answered.
struct LayerRegistration {
  int layer = 0;
  recompute::LayerWeights weights;
  // The proof: rows of the cache's dtype that the engine projected.
  int64_t position = 0;
  int tokens = 0;
  absl::Span<const uint8_t> x, k, v;
  std::vector<std::shared_ptr<const void>> keep;  // what the spans point into
  uint64_t copied_bytes = 0;                      // of `keep`, that are this daemon's
};

/// For ByteBudget: `used` shows what is taken, and outlives the budget.
inline ByteBudget::OnChange ShowIn(prometheus::Gauge* used) {
  return [used](double bytes) { bytes < 0 ? used->Decrement(-bytes) : used->Increment(bytes); };
}

/// A GPU's projections, and what of its memory they may take. Owned by the Recomputer.
struct RecomputeGpu {
  RecomputeGpu(RecomputeDevice* device, uint64_t bytes_max, prometheus::Gauge* used)
      : device(device), budget("--recompute-device-bytes", bytes_max, ShowIn(used)) {}

  RecomputeDevice* const device;
  ByteBudget budget;
  std::vector<ByteBudget::Charge> scratch;  // of the host's budget, whose proofs made it grow. The recomputer's thread
};

class ProjectionSet {
 public:
  static constexpr int kProofPositionMin = 256;       // where K is rotated
  static constexpr double kProofErrorMax = 1.0 / 64;  // of K and of V, in norm

  /// Where they are multiplied.
  struct Place {
    RecomputeGpu* gpu = nullptr;  // nullptr: the CPU
    int chunk_rows = 0;           // of a product
    std::unique_ptr<recompute::ReloadExecutor> executor;
    ByteBudget::Charge buffers;
  };

  /// payer: of the cache's tenant. host: of memory for proofs on a GPU; outlives this.
  ProjectionSet(const CacheDigest& digest, std::string payer, const recompute::ProjectionModel& model,
                const Clock* clock, ByteBudget* host)
      : digest(digest),
        payer(std::move(payer)),
        model(model),
        profile(clock),
        ready(model.layers, false),
        clock_(clock),
        host_(host),
        hashes_(model.layers),
        layer_charges_(model.layers) {}

  recompute::ProjectionShape shape() const { return {model.hidden, model.width()}; }

  const CacheDigest digest;
  const std::string payer;  // whose bytes its charges are, and whose turns its work has
  const recompute::ProjectionModel model;
  recompute::Profile profile;  // of projections; what it knows of copies is this memory's

  // The loop's.
  bool begun = false;  // a layer was registered: `place` stays
  std::vector<bool> ready;
  std::string failed;  // why nothing more is recomputed

  recompute::MemoryLink link;  // of an executor on the CPU, which goes first
  Place place;

  // The recomputer's thread.

  /// Registers, and projects the proof. charge: of the layer's weights, kept with them. Errors: those of CheckWeights,
  /// INVALID_ARGUMENT naming what the proof has wrong, FAILED_PRECONDITION (other weights are registered), those of
  /// RecomputeDevice.
  absl::Status Register(const LayerRegistration& registration, ByteBudget::Charge charge);
  /// Of one layer, which is registered. workers: help with checksums. Errors: CANCELLED, DATA_LOSS (what is not
  /// finite), UNAVAILABLE.
  absl::StatusOr<std::vector<ArrivedPage>> Run(int layer, absl::Span<const RecomputePage> pages,
                                               const std::atomic<bool>* cancelled, WorkerPool* workers);

 private:
  // Memory for one page of activations, and a chunk's K and V.
  struct Scratch {
    std::vector<uint8_t> own;  // where the CPU computes
    uint8_t* x = nullptr;
    std::vector<uint8_t*> pages;
  };
  absl::StatusOr<Scratch> TakeScratch() const;
  absl::Status CheckProof(const LayerRegistration& registration, const Scratch& scratch);
  /// Fills a chunk, so that there is a rate to plan with. x: rows of activations.
  absl::Status Measure(int layer, absl::Span<const uint8_t> x, const Scratch& scratch);

  const Clock* const clock_;
  ByteBudget* const host_;
  std::vector<absl::optional<XXH128_hash_t>> hashes_;  // of the layers that are registered
  std::vector<ByteBudget::Charge> layer_charges_;
};

}  // namespace kvmanager
