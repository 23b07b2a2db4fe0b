#include "codecs/zack/factors.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack {
namespace {

constexpr const char* kSides[2] = {"qk", "vw"};

absl::StatusOr<absl::Span<const float>> ReadFactor(const CodecContext& context, absl::string_view mode, int side,
                                                   absl::string_view which) {
  const uint64_t d = context.layout.head_dim;
  const uint64_t shape[] = {uint64_t(context.layers), context.layout.kv_heads, d, d};
  const std::string name = absl::StrCat("zack.", mode, ".", kSides[side], ".", which);
  KV_ASSIGN_OR_RETURN(const absl::Span<const float> elements, context.calibration->Floats(name, shape, "zack"));
  const auto beyond = std::find_if(elements.begin(), elements.end(), [](float x) { return std::abs(x) > kFactorMax; });
  if (beyond != elements.end()) {
    return InvalidField(absl::StrCat("calibration ", context.calibration->source(), " tensor ", name, "[",
                                     beyond - elements.begin(), "]"),
                        *beyond, absl::StrCat("at most ", kFactorMax, " in magnitude"));
  }
  return elements;
}

}  // namespace

absl::StatusOr<std::string> ReadMode(const CodecParameters& parameters, const Calibration& calibration,
                                     absl::string_view metadata_key) {
  constexpr absl::string_view kBound = "joint or balanced";
  if (const auto given = parameters.find("mode"); given != parameters.end()) {
    if (given->second == "joint" || given->second == "balanced") return given->second;
    return InvalidField("codec parameter mode", absl::StrCat("\"", given->second, "\""), kBound);
  }
  const auto trained = calibration.metadata().find(std::string(metadata_key));
  if (trained == calibration.metadata().end()) return std::string("balanced");
  if (trained->second == "joint" || trained->second == "balanced") return trained->second;
  return InvalidField(absl::StrCat("calibration ", calibration.source(), " metadata ", metadata_key),
                      absl::StrCat("\"", trained->second, "\""), kBound);
}

absl::StatusOr<Factors> ReadFactors(const CodecContext& context, absl::string_view mode) {
  Factors factors;
  factors.mode = std::string(mode);
  factors.kv_heads = context.layout.kv_heads;
  factors.d = context.layout.head_dim;
  for (int side = 0; side < 2; ++side) {
    KV_ASSIGN_OR_RETURN(factors.left[side], ReadFactor(context, mode, side, "left"));
    KV_ASSIGN_OR_RETURN(factors.right[side], ReadFactor(context, mode, side, "right"));
  }
  return factors;
}

void CopyColumns(const float* from, int rows, int columns, int n, float* to) {
  for (int r = 0; r < rows; ++r) std::copy_n(from + size_t(r) * columns, n, to + size_t(r) * n);
}

void CopyColumnsTransposed(const float* from, int rows, int columns, int n, float* to) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < n; ++c) to[size_t(c) * rows + r] = from[size_t(r) * columns + c];
  }
}

}  // namespace kvmanager::zack
