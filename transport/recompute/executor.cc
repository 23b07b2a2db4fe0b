#include "transport/recompute/executor.h"

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {

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

}  // namespace kvmanager::recompute
