// Training: from samples of a model to the tensors of an artifact.
//
// Runs on the calling thread and a pool's; the tensors are the same bytes for any number of threads and any
// instruction set of this processor family that OpenBLAS treats alike (docs/calibration.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "codecs/calibrate/plan.h"
#include "codecs/calibrate/samples.h"
#include "codecs/calibrate/tensor_set.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager::calibrate {

struct TrainOptions {
  /// A codebook wants this many rows per centroid at least.
  static constexpr int kRowsPerCentroidMin = 4;
  uint64_t seed = 0;
  int iterations = 25;  // of k-means, at most
};

/// What one step of training made.
struct TrainStage {
  std::string what;  // "million.k.m64.b8", "zack"
  uint64_t bytes = 0;
  double seconds = 0;
  double relative_error = 0;  // of codebooks: squared error over the variance, all heads; else 0
};

/// progress(what, done, total), on the calling thread.
using TrainProgress = absl::FunctionRef<void(absl::string_view what, int64_t done, int64_t total)>;

/// Whether `samples` are enough for `plan`. Errors: INVALID_ARGUMENT naming how many tokens are needed.
absl::Status CheckEnough(const CalibrationPlan& plan, uint64_t tokens, const SampleLimits& limits,
                         const CalibrationModel& model);

/// Adds every tensor of `plan` to `set` (docs/calibration.md). Errors: INTERNAL (LAPACK).
absl::Status Train(const Samples& samples, const CalibrationPlan& plan, const TrainOptions& options, WorkerPool* pool,
                   TrainProgress progress, TensorSet* set, std::vector<TrainStage>* stages);

/// Replaces zack_hack.{mode}.sensitivity, which Train leaves at 1: what a unit of energy that is lost in (layer, KV
/// head, side) costs the model. values [layers][kv_heads][2], not negative. Whoever measures it calls this before the
/// artifact is serialised (examples/engine/calibrate.cc).
absl::Status SetSensitivity(const CalibrationModel& model, ZackMode mode, absl::Span<const float> values,
                            TensorSet* set);

}  // namespace kvmanager::calibrate
