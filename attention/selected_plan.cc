#include "attention/selected_plan.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

DevicePlanner::Options OptionsOf(const PageLayout& layout, int query_heads, int blocks, int warps) {
  DevicePlanner::Options options;
  options.layout = layout;
  options.query_heads = query_heads;
  options.identity = true;
  options.blocks = blocks;
  options.warps = warps;
  options.encoded_cost = uint32_t(2 * layout.raw_head_bytes());
  return options;
}

}  // namespace

SelectedPlanner::SelectedPlanner(const PageLayout& layout, int query_heads, int blocks, int warps)
    : page_tokens_(layout.page_tokens), planner_(OptionsOf(layout, query_heads, blocks, warps)) {}

absl::StatusOr<DevicePlanSize> SelectedPlanner::Plan(absl::Span<const SelectedList> lists,
                                                     absl::Span<device::AttendItem> items) {
  sequences_.clear();
  uint32_t next_token = 0;
  for (const SelectedList& list : lists) {
    KV_CHECK(list.token >= next_token);
    DeviceSequence sequence;
    sequence.skipped_tokens = list.token - next_token;
    next_token = list.token + 1;
    sequence.first_position = list.rows - 1;
    sequence.tokens = 1;
    sequences_.push_back(sequence);
  }
  KV_ASSIGN_OR_RETURN(const DevicePlanSize size, planner_.Plan(sequences_, items));
  // A list's pages began at 0.
  for (device::AttendItem& item : items.subspan(0, size.items)) {
    if (item.pages == 0) continue;
    const SelectedList& list =
        *std::lower_bound(lists.begin(), lists.end(), item.first_token,
                          [](const SelectedList& of, uint32_t token) { return of.token < token; });
    item.first_page = list.first + item.kv_head * list.stride + item.first_page * page_tokens_;
  }
  return size;
}

}  // namespace kvmanager
