// K and V of rows of activations on the CPU: widen, multiply, rotate, round, scatter to pages.
//
// Owned by CpuExecutor; one thread calls, a pool helps. Buffers are taken once.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kvmanager/base/worker_pool.h"
#include "transport/recompute/blas.h"
#include "transport/recompute/executor.h"

namespace kvmanager::recompute {

class Projection {
 public:
  /// model: checked.
  Projection(const ProjectionModel& model, int chunk_rows, WorkerPool* pool, const Blas* blas);

  absl::Status RegisterWeights(int layer, const LayerWeights& weights);
  bool HasWeights(int layer) const { return !layers_[layer].k.weights.empty(); }

  /// x: [rows of pages][hidden] of the layout's dtype. cancelled, aborted: looked at between products; then CANCELLED,
  /// and pages are partly written. Errors: DATA_LOSS if a K or V is not finite.
  absl::Status Run(const uint8_t* x, int layer, absl::Span<const PageRows> pages, const std::atomic<bool>* cancelled,
                   const std::atomic<bool>& aborted);

 private:
  struct Side {
    std::vector<float> weights;  // [width][hidden]
    std::vector<float> bias;     // [width] or empty
  };
  struct Layer {
    Side k, v;
  };
  /// One product: some heads of one side.
  void ProjectHeads(const Layer& layer, int side, int head_begin, int head_end, absl::Span<const PageRows> pages,
                    int rows, std::atomic<int64_t>* not_finite);

  const ProjectionModel model_;
  const Blas& blas_;
  const int heads_per_product_;
  WorkerPool* const pool_;
  const Rope rope_;
  std::vector<Layer> layers_;
  std::vector<float> x_;          // [chunk_rows][hidden]
  std::vector<float> out_[2];     // K, V: [chunk_rows][width]
  std::vector<float> cos_, sin_;  // [chunk_rows][rope pairs]
  std::vector<int> row_begin_;    // of each page
};

}  // namespace kvmanager::recompute
