// Plans attention of a batch for a GPU: which block of threads attends to which pages, as the kernels read it
// (codecs/device/attend_params.h).
//
// Made on the host, in a buffer of fixed capacity that the caller owns: a captured graph reads the same addresses at
// every replay, and follows whatever plan was copied there before. A plan names places in a layer's table of slots, not
// slots: it serves every layer whose sequences have the same pages in the same forms. The rules of what a query reads
// raw and what encoded are those of AttentionPlan (attention.h). Work is cut by what it costs, so that blocks finish
// together: cutting inside a sequence's context is free but for a merge, which the kernel does itself.
//
// A planner belongs to one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/page_runs.h"
#include "codecs/device/attend_params.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

/// One page of a sequence, by its slots' numbers (device::kSlotUnitBytes).
struct DevicePage {
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  uint32_t raw = kNoSlot;
  uint32_t encoded = kNoSlot;
};

/// One sequence's part of a batch. Page j's slots stand at raw_table + j and encoded_table + j of a layer's table.
/// Query tokens are at positions first_position ..., and pages cover them; each page has at least one form.
struct DeviceSequence {
  uint32_t raw_table = 0;
  uint32_t encoded_table = 0;  // unused where the encoded form is the raw form
  uint32_t aged = 0;           // pages [0, aged) are read encoded whatever the distance, but for a query's own
  /// Ascending, disjoint. Pages beyond what can be read may be in them.
  absl::Span<const PageRun> not_encoded;  // read raw whatever the distance
  absl::Span<const PageRun> not_raw;      // read encoded within the lag too
  uint64_t first_position = 0;            // of the first query token
  int tokens = 0;               // 1..DevicePlanner::kQueryTokensMax; token i sees positions 0 .. first_position + i
  uint32_t skipped_tokens = 0;  // in q, between the sequence before and this one: of others' plans
};

struct DevicePlanSize {
  uint32_t items = 0;          // of the buffer that are in use
  uint32_t parts = 0;          // places in AttendParams::partial: at most 2 * blocks
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
    int encoded_units = 1;      // the same
    /// By the number of the head; empty: encoded_cost. Items' heads are then places (device::HeadCosts).
    std::vector<uint32_t> head_costs;
  };
  explicit DevicePlanner(const Options& options);

  /// Plans a batch; query tokens follow one another in the order of `sequences`. items: at least `blocks`, and one for
  /// each further cut. Errors: RESOURCE_EXHAUSTED where they are too few; nothing useful is then in them. REQUIRES:
  /// what DeviceSequence says, and that a query's own page is raw, or whole and its last token the only one that asks.
  absl::StatusOr<DevicePlanSize> Plan(absl::Span<const DeviceSequence> sequences, absl::Span<device::AttendItem> items);

  /// Pages of one form.
  struct FormRun {
    PageRun pages;
    device::PageForm form;
  };
  /// The runs of pages 0 .. own, ascending, as a query on page `own` reads them.
  static void SplitByForm(const DeviceSequence& sequence, uint32_t own, uint32_t lag_pages, bool identity,
                          std::vector<FormRun>* forms);

 private:
  /// A tile's run of pages of one form, whole.
  struct Run {
    device::AttendItem item;
    uint32_t tile;
    uint32_t page_cost;
  };
  void AddGroup(const DeviceSequence& sequence, uint32_t first_row_token, int token, int tokens, DevicePlanSize* size);
  uint32_t CostOfEncoded(uint32_t head) const;
  uint32_t BlocksFor() const;
  void Share(uint64_t blocks);
  bool ShareByTiles(uint64_t limit, uint64_t blocks);

  const Options options_;
  const uint32_t group_heads_;
  const uint32_t raw_cost_;  // of one head of a page
  // Kept between plans, so that a plan of a familiar size allocates nothing.
  std::vector<FormRun> forms_;  // of a group, ascending
  std::vector<Run> runs_;
  std::vector<uint32_t> tile_items_;
  std::vector<uint64_t> tile_costs_;
  std::vector<uint64_t> share_ends_;  // [blocks in use], ascending
  uint32_t tiles_ = 0;
};

}  // namespace kvmanager
