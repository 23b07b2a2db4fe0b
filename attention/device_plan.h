// Plans attention of a batch for a GPU: which block of threads attends to which pages, as the kernels read it
// (codecs/device/attend_params.h).
//
// Made on the host, in buffers of fixed capacity that the caller owns: a captured graph reads the same addresses at
// every replay, and follows whatever plan was copied there before. The rules of what a query reads raw and what encoded
// are those of AttentionPlan (attention.h). Work is cut by what it costs, so that blocks finish together: cutting
// inside a sequence's context is free but for a merge, which the kernel does itself.
//
// A planner belongs to one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/device/attend_params.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

/// One page of a sequence, by its slots' numbers (device::kSlotUnitBytes). At least one form is there.
struct DevicePage {
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  uint32_t raw = kNoSlot;
  uint32_t encoded = kNoSlot;
  bool lag_applies = true;  // as AttentionPage's
};

struct DeviceSequence {
  absl::Span<const DevicePage> pages;  // cover positions 0 .. first_position + tokens - 1
  uint64_t first_position = 0;         // of the first query token
  int tokens = 0;  // 1..DevicePlanner::kQueryTokensMax; token i sees positions 0 .. first_position + i
};

/// Where a plan goes.
struct DevicePlanBuffers {
  absl::Span<device::AttendItem> items;  // at least `blocks`, and one for each further cut
  absl::Span<uint32_t> slots;
};

struct DevicePlanSize {
  uint32_t items = 0;  // of the buffer that are in use
  uint32_t parts = 0;  // places in AttendParams::partial
  uint32_t slots = 0;
  int rows_max = 0;            // of a tile
  uint64_t encoded_pairs = 0;  // (query token, context token) pairs read in either form
  uint64_t raw_pairs = 0;
};

class DevicePlanner {
 public:
  static constexpr int kQueryTokensMax = 16;

  struct Options {
    PageLayout layout;
    int query_heads = 0;
    int lag_pages = 0;
    bool identity = false;      // the encoded form is the raw form
    int blocks = 0;             // of threads that run at once
    int warps = 0;              // of a block
    uint32_t encoded_cost = 0;  // of one head of a page (device::AttendKernels)
  };
  explicit DevicePlanner(const Options& options);

  /// Plans a batch; query tokens follow one another in the order of `sequences`. Errors: RESOURCE_EXHAUSTED naming the
  /// buffer that is too small; nothing useful is then in them. REQUIRES: what DeviceSequence says.
  absl::StatusOr<DevicePlanSize> Plan(absl::Span<const DeviceSequence> sequences, const DevicePlanBuffers& buffers);

 private:
  /// A tile's run of pages of one form, whole.
  struct Run {
    device::AttendItem item;
    uint32_t tile;
    uint32_t page_cost;
  };
  void AddGroup(const DeviceSequence& sequence, uint32_t first_row_token, int token, int tokens, DevicePlanSize* size);

  const Options options_;
  const uint32_t group_heads_;
  const uint32_t raw_cost_;  // of one head of a page
  // Kept between plans, so that a plan of a familiar size allocates nothing.
  std::vector<Run> runs_;
  std::vector<device::AttendItem> group_runs_;
  std::vector<uint32_t> slots_;
  std::vector<uint32_t> tile_items_;
  uint32_t tiles_ = 0;
};

}  // namespace kvmanager
