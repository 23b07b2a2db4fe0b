// The capture format: Q, K and V of a model that some engine ran, instead of the model (docs/calibration.md).
//
// Safetensors, a file or a directory of shards: layers.{i}.q [query_heads, tokens, d], layers.{i}.k and layers.{i}.v
// [kv_heads, tokens, d], after RoPE, F16, BF16 or F32; layers.{i}.w_o [hidden, query_heads * d], in all layers or none;
// metadata "model", "revision" (may be absent), "windows" (tokens of one context, if several follow one another) and
// "sinks" (the first tokens of each context, which a cache keeps raw: training leaves them out). Nothing in it is
// believed. A Capture is immutable; any thread may read it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "codecs/calibration.h"
#include "kvmanager/base/safetensors.h"

namespace kvmanager::calibrate {

class Capture {
 public:
  static constexpr int kLayersMax = 1024;
  enum class Part { kQ, kK, kV };

  /// Checks names, shapes and metadata; the elements are not looked at. Errors: NOT_FOUND, INVALID_ARGUMENT (file,
  /// tensor, value, bound).
  static absl::StatusOr<std::unique_ptr<Capture>> Open(const std::string& path);

  const CalibrationModel& model() const { return model_; }
  uint64_t tokens() const { return tokens_; }
  /// Of one context; the last one may have fewer.
  uint64_t window() const { return window_; }
  /// Tokens at the beginning of each context that training leaves out: whole pages, fewer than window().
  uint64_t sinks() const { return sinks_; }
  /// Tokens of all contexts without their sinks.
  uint64_t counted_tokens() const;
  bool has_output_projection() const { return has_w_o_; }

  /// Tokens [first, first + count) of a head (of queries, or of KV), each head_dim floats, `stride` floats apart. They
  /// may be anything, NaN too. REQUIRES: they are there.
  void CopyRows(int layer, Part part, int head, uint64_t first, uint64_t count, float* out, size_t stride) const;
  /// [hidden][query_heads * d]. REQUIRES: has_output_projection().
  std::vector<float> OutputProjection(int layer) const;

 private:
  Capture() = default;
  absl::StatusOr<const Tensor*> Find(int layer, const char* name) const;
  absl::Status CheckShapes(const std::string& path);
  absl::Status ReadWindows(const std::string& path);

  std::unique_ptr<Safetensors> file_;
  CalibrationModel model_;
  uint64_t tokens_ = 0, window_ = 0, sinks_ = 0;
  bool has_w_o_ = false;
};

}  // namespace kvmanager::calibrate
