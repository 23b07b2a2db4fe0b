// Plans attention of a batch over chosen tokens for a GPU (codecs/pq/pq_device.h): how many rows each query reads of
// each KV head is known before which ones they are, so a plan is made on the host, and the choice on the device.
//
// A query's rows of a KV head are a list; a plan cuts lists as DevicePlanner cuts pages.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/device_plan.h"
#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_parameters.h"

namespace kvmanager {

/// Tokens that a query at `position` reads, as counts of `select`.
void SetReads(const pq::Parameters& parameters, uint64_t position, pq::DeviceSelect* select);

/// What a batch's lists and scratch memory come to.
struct SelectedSizes {
  uint32_t rows = 0;        // entries of lists
  uint32_t runs = 0;        // of scratch memory
  uint32_t middle_max = 0;  // of a query
};
/// Gives each query its place in the lists and in the scratch memory, one after another. Errors: RESOURCE_EXHAUSTED
/// where they leave 32 bits.
absl::StatusOr<SelectedSizes> PlaceSelects(const pq::DeviceShape& shape, absl::Span<pq::DeviceSelect> queries);

/// A planner belongs to one thread.
class SelectedPlanner {
 public:
  /// blocks, warps: of pq::SelectedRowsKernels.
  SelectedPlanner(const PageLayout& layout, int query_heads, int blocks, int warps);

  /// items: as of DevicePlanner::Plan, for those kernels; errors: the same. Queries follow one another in q.
  absl::StatusOr<DevicePlanSize> Plan(absl::Span<const pq::DeviceSelect> queries, absl::Span<device::AttendItem> items);

 private:
  const uint32_t page_tokens_;
  DevicePlanner planner_;
  std::vector<DeviceSequence> sequences_;
};

}  // namespace kvmanager
