// What training sees of a model: second moments of Q, K, V and W_O of every head, and some rows of K and V.
//
// A Collector takes a layer's rows as they come; Q is never stored. Samples are immutable afterwards and may be read
// from any thread. Which rows are kept depends on their order alone.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "codecs/calibrate/capture.h"
#include "codecs/calibrate/factors.h"
#include "codecs/calibration.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager::calibrate {

struct SampleLimits {
  int rows_max = 32768;                    // of K and of V that are kept per layer and KV head, for codebooks
  uint64_t bytes_max = uint64_t{2} << 30;  // of all of them together: a larger model keeps fewer rows per head
};

/// Rows of K, and of V, that are kept per layer and KV head of a model that runs over `tokens`.
uint64_t RowsKept(const CalibrationModel& model, uint64_t tokens, const SampleLimits& limits);

/// Of one layer and KV head.
struct HeadSamples {
  Moment q;  // of all query heads of the group
  Moment k, v;
  Moment within[2];  // of K, of V about the mean of their page: what a codec that keeps the mean has to code
  Moment w_o;        // of W_O's rows for each query head of the group; count 0: unknown, all outputs alike
  std::vector<uint16_t> rows[2];  // [kept][d] of K, of V, float16
};

struct Samples {
  CalibrationModel model;
  uint64_t tokens = 0;
  int rows = 0;                    // kept per head
  std::vector<HeadSamples> heads;  // [layers][kv_heads]

  const HeadSamples& head(int layer, int kv_head) const { return heads[size_t(layer) * model.kv_heads + kv_head]; }
};

class Collector {
 public:
  static constexpr int kPageTokens = 64;

  /// tokens: that will come, of every layer. pool: nullptr, or what Add spreads its work over; outlives this.
  Collector(const CalibrationModel& model, uint64_t tokens, const SampleLimits& limits, WorkerPool* pool);

  /// The next rows of `layer`, in runs of `run` consecutive tokens of one context that begin with a page. q
  /// [rows][query_heads][d], k, v [rows][kv_heads][d]. Errors: INVALID_ARGUMENT for what is not finite, or not in
  /// float16 (K and V).
  absl::Status Add(int layer, int rows, int run, absl::Span<const float> q, absl::Span<const float> k,
                   absl::Span<const float> v);
  /// w_o [hidden][query_heads * d]: attention's output times its transpose is what the layer adds. Errors:
  /// INVALID_ARGUMENT for what is not finite.
  absl::Status SetOutputProjection(int layer, absl::Span<const float> w_o);

  /// All rows must have come.
  Samples Finish();

 private:
  Samples samples_;
  uint64_t tokens_, every_;     // one row of `every` is kept
  std::vector<uint64_t> seen_;  // [layers]
  WorkerPool* const pool_;
  std::vector<std::vector<double>> scratch_;  // [kv_heads]
};

/// All of a capture but its sinks. progress(layers done, layers). Errors: the Collector's.
absl::StatusOr<Samples> ReadSamples(const Capture& capture, const SampleLimits& limits, WorkerPool* pool,
                                    absl::FunctionRef<void(int64_t done, int64_t total)> progress);

}  // namespace kvmanager::calibrate
