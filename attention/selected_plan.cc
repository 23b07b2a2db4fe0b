#include "attention/selected_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
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

void SetReads(const pq::Parameters& parameters, uint64_t position, pq::DeviceSelect* select) {
  const pq::Parameters::Reads reads = parameters.ReadsOf(position);
  select->sinks = uint32_t(reads.sinks);
  select->middle = uint32_t(reads.local_begin - reads.sinks);
  select->chosen = uint32_t(reads.chosen);
  select->local = uint32_t(position + 1 - reads.local_begin);
}

absl::StatusOr<SelectedSizes> PlaceSelects(const pq::DeviceShape& shape, absl::Span<pq::DeviceSelect> queries) {
  uint64_t rows = 0, runs = 0;
  SelectedSizes sizes;
  for (pq::DeviceSelect& query : queries) {
    const uint64_t page_tokens = uint64_t(shape.page_tokens);
    const uint64_t stride = (query.rows() + page_tokens - 1) / page_tokens * page_tokens;
    query.list = uint32_t(rows);
    query.list_stride = uint32_t(stride);
    query.first_run = uint32_t(runs);
    rows += stride * shape.kv_heads;
    runs += uint64_t{pq::SelectRuns(query.middle)} * shape.kv_heads;
    if (rows > UINT32_MAX || runs > UINT32_MAX) {
      return FieldError(absl::StatusCode::kResourceExhausted, "rows that a batch reads", absl::StrCat(rows),
                        absl::StrCat("at most ", UINT32_MAX));
    }
    sizes.middle_max = std::max(sizes.middle_max, query.middle);
  }
  sizes.rows = uint32_t(rows);
  sizes.runs = uint32_t(runs);
  return sizes;
}

SelectedPlanner::SelectedPlanner(const PageLayout& layout, int query_heads, int blocks, int warps)
    : page_tokens_(layout.page_tokens), planner_(OptionsOf(layout, query_heads, blocks, warps)) {}

absl::StatusOr<DevicePlanSize> SelectedPlanner::Plan(absl::Span<const pq::DeviceSelect> queries,
                                                     absl::Span<device::AttendItem> items) {
  sequences_.clear();
  for (const pq::DeviceSelect& query : queries) {
    DeviceSequence sequence;
    sequence.first_position = query.rows() - 1;
    sequence.tokens = 1;
    sequences_.push_back(sequence);
  }
  KV_ASSIGN_OR_RETURN(const DevicePlanSize size, planner_.Plan(sequences_, items));
  // A list's pages began at 0.
  for (device::AttendItem& item : items.subspan(0, size.items)) {
    if (item.pages == 0) continue;
    const pq::DeviceSelect& query = queries[item.first_token];
    item.first_page = query.list + item.kv_head * query.list_stride + item.first_page * page_tokens_;
  }
  return size;
}

}  // namespace kvmanager
