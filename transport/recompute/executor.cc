#include "transport/recompute/executor.h"

#include <algorithm>

#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

constexpr size_t kPiecesPerChunk = 8, kPieceBytesMin = 16 << 10;

absl::Status CheckSize(absl::string_view field, absl::Span<const uint8_t> bytes, size_t want) {
  if (bytes.size() == want) return absl::OkStatus();
  return InvalidField(absl::StrCat(field, ".bytes"), bytes.size(), absl::StrCat(want));
}

}  // namespace

absl::Status CheckModel(const ProjectionModel& model) {
  const PageLayout& l = model.layout;
  if (l.dtype != DType::kFloat16 && l.dtype != DType::kBFloat16) {
    return InvalidField("layout.dtype", int(l.dtype), "0 (float16) or 1 (bfloat16)");
  }
  if (l.kv_heads < 1 || l.kv_heads > PageLayout::kKvHeadsMax) {
    return InvalidField("layout.kv_heads", l.kv_heads, absl::StrCat("1..", PageLayout::kKvHeadsMax));
  }
  if (l.head_dim < PageLayout::kHeadDimMin || l.head_dim > PageLayout::kHeadDimMax || l.head_dim % 16 != 0) {
    return InvalidField("layout.head_dim", l.head_dim,
                        absl::StrCat("a multiple of 16, ", PageLayout::kHeadDimMin, "..", PageLayout::kHeadDimMax));
  }
  if (l.page_tokens < PageLayout::kPageTokensMin || l.page_tokens > PageLayout::kPageTokensMax ||
      l.page_tokens % 16 != 0) {
    return InvalidField(
        "layout.page_tokens", l.page_tokens,
        absl::StrCat("a multiple of 16, ", PageLayout::kPageTokensMin, "..", PageLayout::kPageTokensMax));
  }
  if (model.layers < 1 || model.layers > ProjectionModel::kLayersMax) {
    return InvalidField("layers", model.layers, absl::StrCat("1..", ProjectionModel::kLayersMax));
  }
  if (model.hidden < 1 || model.hidden > ProjectionModel::kHiddenMax) {
    return InvalidField("hidden", model.hidden, absl::StrCat("1..", ProjectionModel::kHiddenMax));
  }
  if (const int64_t weights = int64_t{model.hidden} * model.width(); weights > ProjectionModel::kWeightsMax) {
    return InvalidField("hidden * kv_heads * head_dim", weights,
                        absl::StrCat("at most ", ProjectionModel::kWeightsMax));
  }
  return CheckRope(model.rope, l.head_dim);
}

absl::Status CheckWeights(const ProjectionModel& model, int layer, const LayerWeights& w) {
  if (layer < 0 || layer >= model.layers) {
    return InvalidField("layer", layer, absl::StrCat("0..", model.layers - 1));
  }
  if (w.dtype != DType::kFloat16 && w.dtype != DType::kBFloat16 && w.dtype != DType::kFloat32) {
    return InvalidField("weights.dtype", int(w.dtype), "0..2");
  }
  const size_t width = size_t(model.width()), bytes = width * model.hidden * DTypeBytes(w.dtype);
  KV_RETURN_IF_ERROR(CheckSize("weights.k", w.k, bytes));
  KV_RETURN_IF_ERROR(CheckSize("weights.v", w.v, bytes));
  if (!w.k_bias.empty()) KV_RETURN_IF_ERROR(CheckSize("weights.k_bias", w.k_bias, width * DTypeBytes(w.dtype)));
  if (!w.v_bias.empty()) KV_RETURN_IF_ERROR(CheckSize("weights.v_bias", w.v_bias, width * DTypeBytes(w.dtype)));
  for (const auto& [field, span] : {std::pair{"weights.k", w.k}, std::pair{"weights.v", w.v},
                                    std::pair{"weights.k_bias", w.k_bias}, std::pair{"weights.v_bias", w.v_bias}}) {
    const size_t count = span.size() / DTypeBytes(w.dtype);
    if (const size_t at = FindNonFinite(w.dtype, span.data(), count); at != count) {
      return InvalidField(absl::StrCat(field, "[", at, "]"), "not finite", "finite");
    }
  }
  return absl::OkStatus();
}

absl::Status NotFinite(int layer, int side, int head, int64_t position) {
  return absl::DataLossError(absl::StrCat("recomputed ", side == 0 ? "K" : "V", " of layer ", layer, ", head ", head,
                                          ", position ", position,
                                          " is not finite: activations are damaged, or too large for the dtype"));
}

size_t ReloadExecutor::kv_piece_bytes() const {
  const size_t row_bytes = size_t(model().hidden) * DTypeBytes(model().layout.dtype);
  return std::max(kPieceBytesMin, chunk_rows() * row_bytes / kPiecesPerChunk);
}

}  // namespace kvmanager::recompute
