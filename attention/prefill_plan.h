// Plans attention of many query tokens for a GPU (codecs/device/prefill_params.h): tiles of query rows, the runs of
// pages that they read, and which block of threads works on which part of which tile.
//
// What a query reads raw and what encoded is DevicePlanner's rule. A tile's tokens may lie on several pages and
// therefore read a page in different forms: it is then among the tile's runs once in each form. As DevicePlanner's, a
// plan names places in a layer's table, and goes into buffers of fixed capacity that captured graphs read.
//
// A planner belongs to one thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/device_plan.h"
#include "codecs/device/prefill_params.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

struct PrefillPlanSize {
  uint32_t items = 0;          // of the buffer that are in use
  uint32_t runs = 0;           // the same
  uint32_t parts = 0;          // places in PrefillParams::partial: at most PrefillPlanner::PartsMax
  uint64_t encoded_pairs = 0;  // (query token, context token) pairs read in either form
  uint64_t raw_pairs = 0;
};

class PrefillPlanner {
 public:
  /// Query tokens of a sequence from which on it is worth a tile of 128 rows.
  static constexpr int kTokensMin = 64;

  struct Options {
    PageLayout layout;    // pages of device::kPrefillPageTokens
    int query_heads = 0;  // at most device::kPrefillGroupMax to a KV head
    int lag_pages = 0;
    bool identity = false;  // the encoded form is the raw form
    int blocks = 0;         // of threads: one for each multiprocessor
    bool apart = false;     // tiles of the two forms are apart (device::PrefillKernels::maps)
    /// Of an encoded page, by the number of the head; empty: as a raw one's (device::Prefill).
    std::vector<uint32_t> head_costs;
  };
  explicit PrefillPlanner(const Options& options);

  static uint32_t PartsMax(int blocks) { return 4 * uint32_t(blocks); }
  /// Items that suffice for every batch of at most `tokens` tokens, each sequence with kTokensMin or more.
  static size_t ItemsMax(const Options& options, size_t tokens);
  /// Tiles of such a batch that differ in more than their head.
  static size_t TileGroupsMax(const Options& options, size_t tokens);

  /// Plans a batch; query tokens follow one another in the order of `sequences`, whose tokens are not limited. Errors:
  /// RESOURCE_EXHAUSTED where a buffer is too small; nothing useful is then in them. REQUIRES: what DeviceSequence
  /// says, and of DevicePlanner::Plan.
  absl::StatusOr<PrefillPlanSize> Plan(absl::Span<const DeviceSequence> sequences,
                                       absl::Span<device::PrefillItem> items, absl::Span<device::PrefillRun> runs);

 private:
  /// Tiles of all KV heads that have the same tokens.
  struct TileGroup {
    uint32_t first_run, first_token, first_position;
    uint32_t pages;
    int tokens;
    bool encoded;  // all of it, where forms are apart
  };
  enum class Forms { kAll, kRaw, kEncoded };
  /// Tokens of a tile that are on one page.
  struct OwnPage {
    uint32_t own;
    uint16_t begin, end;
    std::vector<DevicePlanner::FormRun> forms;
    size_t next;  // of forms
  };
  /// A part of a tile.
  struct Part {
    uint32_t group;
    uint16_t kv_head;
    uint8_t part, parts;
    uint32_t skip, pages;
    uint32_t first_part;
    uint64_t cost;
  };
  struct Load {
    uint64_t cost;
    uint32_t block;
  };

  bool AddRun(absl::Span<device::PrefillRun> runs, TileGroup* group, uint32_t first_page, uint32_t end_page,
              const DeviceSequence& sequence, bool encoded, uint16_t begin, uint16_t end);
  absl::Status AddTileGroup(const DeviceSequence& sequence, uint32_t first_token, int token, int tokens, Forms forms,
                            absl::Span<device::PrefillRun> runs, PrefillPlanSize* size);
  /// Of a page to a block.
  uint64_t PageCost(const TileGroup& group, int head) const;
  uint32_t PartsOf(uint32_t pages, uint32_t cuts) const;
  /// Parts of all tiles, of which the largest is cut into `cuts`, the costliest first. false: too many.
  bool CutTiles(uint32_t cuts);
  /// Gives each part to the block that has least; returns the largest load. give(part, block).
  template <typename Give>
  uint64_t Distribute(const Give& give);

  const Options options_;
  const int tile_tokens_;
  // Kept between plans, so that a plan of a familiar size allocates nothing.
  std::vector<TileGroup> groups_;
  std::vector<OwnPage> own_pages_;
  std::vector<Part> parts_;
  std::vector<Load> loads_;
  std::vector<uint32_t> last_;  // [blocks] item of each
  uint32_t run_count_ = 0;
  uint32_t pages_max_ = 0;  // of a tile
  uint32_t part_places_ = 0;
};

}  // namespace kvmanager
