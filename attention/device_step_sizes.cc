#include "attention/device_step_sizes.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "attention/device_step_kernels.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

/// Items beside those of a tile's two forms: pages that have no encoded form, between others.
constexpr size_t kItemsOfTile = 4;
constexpr size_t kItemsMin = 4096;
/// Runs of pages of a tile of many query tokens, which all KV heads share: before, within and behind the lag, and pages
/// that are there in one form alone.
constexpr size_t kRunsOfTile = 128;
constexpr size_t kRingBytesMin = size_t{1} << 20, kRingRoundBytes = 4096;

absl::Status Check(const DeviceStep::Options& o) {
  const PageLayout& layout = o.layout;
  if (layout.dtype == DType::kFloat32) return InvalidField("dtype", "float32", "float16 or bfloat16");
  if (layout.kv_heads < 1 || layout.kv_heads > PageLayout::kKvHeadsMax || layout.head_dim < PageLayout::kHeadDimMin ||
      layout.head_dim > PageLayout::kHeadDimMax || layout.head_dim % 16 != 0 ||
      layout.page_tokens < PageLayout::kPageTokensMin || layout.page_tokens > PageLayout::kPageTokensMax ||
      layout.page_tokens % 16 != 0) {
    return absl::InvalidArgumentError("the layout is not one of pages");
  }
  if (o.layers < 1 || o.layers > DeviceStep::kLayersMax) {
    return InvalidField("layers", o.layers, absl::StrCat("1..", DeviceStep::kLayersMax));
  }
  if (o.query_heads < 1 || o.query_heads % layout.kv_heads != 0) {
    return InvalidField("query_heads", o.query_heads, absl::StrCat("a multiple of ", layout.kv_heads));
  }
  if (o.lag_pages < 0) return InvalidField("lag_pages", o.lag_pages, "0 or more");
  if (o.codec == nullptr) return absl::InvalidArgumentError("a codec without a GPU's part has no steps there");
  if (o.multiprocessors < 1) return InvalidField("multiprocessors", o.multiprocessors, "1 or more");
  if (o.sequences_max < 1) return InvalidField("sequences_max", o.sequences_max, "1 or more");
  if (o.tokens_max < 1) return InvalidField("tokens_max", o.tokens_max, "1 or more");
  if (o.non_finite != nullptr && o.non_finite_words < uint32_t(o.sequences_max)) {
    return InvalidField("non_finite_words", o.non_finite_words, absl::StrCat("at least ", o.sequences_max));
  }
  return absl::OkStatus();
}

}  // namespace

float ScaleOf(const DeviceStep::Options& o) { return o.scale != 0 ? o.scale : 1 / std::sqrt(float(o.layout.head_dim)); }

device::Prefill PrefillOf(const DeviceStep::Options& o, int layer) {
  if (o.layout.page_tokens != device::kPrefillPageTokens || o.tokens_max < PrefillPlanner::kTokensMin ||
      o.query_heads / o.layout.kv_heads > device::kPrefillGroupMax || !(ScaleOf(o) > 0)) {
    return {};
  }
  return o.codec->prefill(layer);
}

PrefillPlanner::Options PrefillOptions(const DeviceStep::Options& o, int layer) {
  PrefillPlanner::Options plan;
  plan.layout = o.layout;
  plan.query_heads = o.query_heads;
  plan.lag_pages = o.lag_pages;
  plan.identity = o.identity;
  plan.blocks = o.multiprocessors;
  plan.apart = PrefillOf(o, layer).kernels->maps;
  return plan;
}

absl::StatusOr<StepSizes> StepSizesOf(const DeviceStep::Options& o) {
  KV_RETURN_IF_ERROR(Check(o));
  StepSizes sizes;
  for (int layer = 0; layer < o.layers; ++layer) {
    const device::AttendKernels* const kernels = o.codec->attention(layer);
    if (kernels == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("there is no GPU kernel for the pages of layer ", layer, " (head_dim ", o.layout.head_dim, ")"));
    }
    sizes.blocks_max = std::max(sizes.blocks_max, size_t(o.multiprocessors) * size_t(kernels->grid.blocks_per_sm));
  }
  if (const DeviceSelection* const selection = o.codec->selection(); selection != nullptr) {
    if (!o.identity) return absl::InvalidArgumentError("queries choose among raw pages alone");
    KV_ASSIGN_OR_RETURN(sizes.selection, StepSelection::SizesOf(o));
    sizes.blocks_max =
        std::max(sizes.blocks_max, size_t(o.multiprocessors) * size_t(selection->rows().grid.blocks_per_sm));
  }
  // Groups of tokens end with a page, with a piece of a long entry, and with an entry.
  const size_t tokens = o.tokens_max, group_heads = o.query_heads / o.layout.kv_heads;
  const size_t groups = std::min(tokens, 2 * (tokens / DevicePlanner::kQueryTokensMax + size_t(o.sequences_max)) + 2);
  const size_t tiles = o.layout.kv_heads * (tokens * group_heads / device::kTileRows + groups);
  sizes.items_max = 2 * sizes.blocks_max + std::max(kItemsMin, kItemsOfTile * tiles);
  for (int layer = 0; layer < o.layers; ++layer) {
    if (PrefillOf(o, layer).kernels == nullptr) continue;
    const PrefillPlanner::Options plan = PrefillOptions(o, layer);
    sizes.prefill_items_max = std::max(sizes.prefill_items_max, PrefillPlanner::ItemsMax(plan, tokens));
    sizes.prefill_runs_max =
        std::max({kItemsMin, sizes.prefill_runs_max, kRunsOfTile * PrefillPlanner::TileGroupsMax(plan, tokens)});
  }
  const size_t largest = std::max(sizes.plan_bytes(), sizes.selection.plan_bytes()) + tokens * sizeof(step::AppendRow) +
                         size_t(o.sequences_max) * sizeof(uint32_t) + kRingRoundBytes;
  sizes.ring_bytes = (std::max(kRingBytesMin, 4 * largest) + kRingRoundBytes - 1) / kRingRoundBytes * kRingRoundBytes;
  return sizes;
}

}  // namespace kvmanager
