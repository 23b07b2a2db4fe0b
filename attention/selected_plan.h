// Plans attention of a batch over chosen tokens for a GPU: how many rows a query reads of each KV head is known before
// which ones they are, so a plan is made on the host, and the selection on the device (codecs/pq/pq_device.h).
//
// A query's rows of a KV head are a list; a plan cuts lists as DevicePlanner cuts pages.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/device_plan.h"

namespace kvmanager {

/// Lists of one query token: that of KV head h begins at first + h * stride, a multiple of page_tokens.
struct SelectedList {
  uint32_t first = 0;
  uint32_t stride = 0;
  uint32_t rows = 0;   // of each, at least 1
  uint32_t token = 0;  // in q
};

/// A planner belongs to one thread.
class SelectedPlanner {
 public:
  /// blocks, warps: of the kernels that read lists (codecs/pq/pq_rows_cuda.h).
  SelectedPlanner(const PageLayout& layout, int query_heads, int blocks, int warps);

  /// items: as of DevicePlanner::Plan, their pages being runs of page_tokens rows of a list; errors: the same. lists:
  /// of a query token each, in the order of q.
  absl::StatusOr<DevicePlanSize> Plan(absl::Span<const SelectedList> lists, absl::Span<device::AttendItem> items);

 private:
  const uint32_t page_tokens_;
  DevicePlanner planner_;
  std::vector<DeviceSequence> sequences_;
};

}  // namespace kvmanager
