// ZACK's factors as an artifact holds them: where K and V of each head are kept, and how queries and outputs get there
// and back (docs/codecs.md, "ZACK").
//
// For one head and side, `left` and `right` are [d][d], row-major, columns descending in weight; the first n columns of
// each make the rank-n approximation x y^T ~ (x left_n) (y right_n)^T of the product of the two sides: queries and keys
// (qk), slices of W_O and values (vw). joint: left = right, a rotation. balanced: the pair that loses the least of the
// product. Values; views into the artifact, valid as long as it is.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "codecs/registry.h"

namespace kvmanager::zack {

/// Factors beyond this are refused: attention in fp32 on any finite fp16 page then stays finite.
constexpr float kFactorMax = 1e12f;

struct Factors {
  std::string mode;                  // "joint" or "balanced"
  absl::Span<const float> left[2];   // [side: qk, vw] -> [layers][kv_heads][d][d]
  absl::Span<const float> right[2];  // likewise
  int kv_heads = 0, d = 0;

  /// [d][d] of one head.
  const float* left_of(int side, int layer, int head) const { return left[side].data() + offset(layer, head); }
  const float* right_of(int side, int layer, int head) const { return right[side].data() + offset(layer, head); }

 private:
  size_t offset(int layer, int head) const { return (size_t(layer) * kv_heads + head) * d * d; }
};

/// The value of `mode=` in `parameters` or, without it, the artifact's metadata `metadata_key` ("zack.mode"), or
/// "balanced" where it has none. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::string> ReadMode(const CodecParameters& parameters, const Calibration& calibration,
                                     absl::string_view metadata_key);

/// Errors: FAILED_PRECONDITION if the artifact lacks them; INVALID_ARGUMENT if a tensor is not as above or an element
/// is not finite or beyond kFactorMax.
absl::StatusOr<Factors> ReadFactors(const CodecContext& context, absl::string_view mode);

/// `to` [rows][n] = the first n columns of `from` [rows][columns].
void CopyColumns(const float* from, int rows, int columns, int n, float* to);
/// `to` [n][rows] = the first n columns of `from` [rows][columns], transposed.
void CopyColumnsTransposed(const float* from, int rows, int columns, int n, float* to);

}  // namespace kvmanager::zack
