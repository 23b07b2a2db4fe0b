// The tables of slots that attention on a GPU reads: which page of which sequence lies where, in each layer.
//
// The host's side: a copy of what the device has, the changes that it has yet to be told, and, for each sequence and
// layer, which pages are there in which form, by which a step knows what each of its queries reads. Each layer's table
// has the same entries: a sequence has a region, its pages' raw slots and then their encoded slots, which grows and may
// move. Of a codec whose queries choose what they read (codecs/sequence_index.h) there is one form, and the second half
// of a region has the sequence's index: its codebook, then its chunks of codes. Owned by a DeviceStep; single-threaded;
// knows no device.
#pragma once

#include <climits>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/device_plan.h"
#include "attention/page_runs.h"
#include "attention/table_regions.h"

namespace kvmanager {

/// One sequence's part of a step on a GPU. (client::StepEntry is the RPC's, by sequence id.)
struct DeviceStepEntry {
  uint32_t place = 0;      // of the sequence
  uint64_t position = 0;   // of its first token; below 2^32
  int tokens = 0;          // 1 or more
  uint32_t aged = 0;       // pages [0, aged) are read encoded whatever the distance, but for a query's own
  int sparse_queries = 0;  // of its queries, the last ones, that choose what they read: they are in no plan of pages
  friend bool operator==(const DeviceStepEntry&, const DeviceStepEntry&) = default;
};

/// DeviceStepEntry::sparse_queries of queries at `position` and behind, where those from `sparse_from` on choose.
inline int SparseQueries(uint64_t sparse_from, uint64_t position, int tokens) {
  const uint64_t end = position + uint64_t(tokens);
  return sparse_from >= end ? 0 : int(end - (sparse_from > position ? sparse_from : position));
}

/// What the entries of a step read in one layer; layers where it is equal share a plan.
struct StepReading {
  struct Counts {
    uint32_t not_encoded = 0, not_raw = 0;  // of an entry's runs, which follow one another in this order
    friend bool operator==(const Counts&, const Counts&) = default;
  };
  std::vector<Counts> counts;  // [entries]
  std::vector<PageRun> runs;
  friend bool operator==(const StepReading&, const StepReading&) = default;
};

/// An entry of the device's tables: [layers][layer_entries].
struct SlotChange {
  uint32_t at;
  uint32_t slot;
};

class StepTables {
 public:
  struct Options {
    int layers = 0;
    bool identity = false;  // the encoded form is the raw form: raw slots alone
    int lag_pages = 0;
    uint32_t page_tokens = 0;
    uint64_t pages_max = 0;  // of all sequences together
    int sequences_max = 0;
    uint32_t index_tokens = 0;  // of a chunk of codes; 0: sequences have no index
  };
  /// Pages that a region grows by at least.
  static constexpr uint32_t kRegionPages = 16;

  /// Errors: INVALID_ARGUMENT where the tables would have 2^32 entries or more.
  static absl::StatusOr<StepTables> Make(const Options& options);

  /// Entries of each layer's table.
  uint32_t layer_entries() const { return layer_entries_; }

  /// A place for a sequence without pages. A place that was given back is used again as late as possible. Errors:
  /// RESOURCE_EXHAUSTED.
  absl::StatusOr<uint32_t> AddSequence(uint64_t pages_hint);
  void RemoveSequence(uint32_t place);
  bool Has(uint32_t place) const { return place < sequences_.size() && sequences_[place].used; }
  /// Pages first_page ... of a layer; a form that is kNoSlot is not there. Where there are gaps, pages without any
  /// form. Of sequences with an index, DevicePage::encoded is the index's slot at that place, kNoSlot: as before.
  /// Errors: INVALID_ARGUMENT; RESOURCE_EXHAUSTED, when nothing has changed.
  absl::Status SetPages(uint32_t place, int layer, uint32_t first_page, absl::Span<const DevicePage> pages);
  /// Pages from `pages` on are not there, in any layer.
  void Truncate(uint32_t place, uint32_t pages);

  /// Grows whenever what a step reads may have changed; `moves` when a region has moved.
  uint64_t generation() const { return generation_; }
  uint64_t moves() const { return moves_; }

  /// The places in each layer's table of the first page's raw and encoded slots, or of the index.
  uint32_t raw_table(uint32_t place) const { return sequences_[place].first; }
  uint32_t encoded_table(uint32_t place) const {
    return sequences_[place].first + (halves() == 1 ? 0 : sequences_[place].capacity);
  }

  /// What the entries read in a layer. attend: queries at an entry's positions; append: they are written first. Errors:
  /// FAILED_PRECONDITION naming a page that is not there in the form that this needs.
  absl::Status Read(int layer, absl::Span<const DeviceStepEntry> entries, bool append, bool attend,
                    StepReading* reading) const;

  /// The sequences of a plan for layers that read so, in the order of the entries; long entries are cut, but for those
  /// of `whole_from` tokens and more, which become sequences of a plan of their own. They point into `reading`.
  void MakeSequences(absl::Span<const DeviceStepEntry> entries, const StepReading& reading,
                     std::vector<DeviceSequence>* sequences, int whole_from = INT_MAX,
                     std::vector<DeviceSequence>* whole = nullptr) const;

  /// Changes that the device has yet to be told.
  size_t changes() const { return change_count_; }
  /// Some of them, all if `to` is large enough, in no order; equal entries have equal slots. Returns how many.
  size_t TakeChanges(absl::Span<SlotChange> to);

 private:
  struct LayerPages {
    PageRuns not_encoded, not_raw;  // both without end
  };
  struct Sequence {
    bool used = false;
    uint32_t first = 0;     // of the region, in each layer's table
    uint32_t capacity = 0;  // pages
    uint32_t pages = 0;     // that have, or had, slots
    std::vector<LayerPages> layers;
  };
  struct Change {
    uint32_t at, count;
  };

  StepTables(const Options& options, uint32_t layer_entries);
  uint32_t halves() const { return options_.identity && options_.index_tokens == 0 ? 1 : 2; }  // of a region
  uint32_t EntriesFor(uint32_t pages) const { return halves() * pages; }
  absl::Status Grow(Sequence* sequence, uint32_t pages);
  /// What changes among `count` entries of a layer from `at` on; *slot of page i is slot_of(i).
  template <typename SlotOf>
  void Write(int layer, uint32_t at, size_t count, SlotOf slot_of);
  void AddChange(uint32_t at, uint32_t count);
  absl::Status ReadEntry(int layer, const DeviceStepEntry& entry, bool append, bool attend, StepReading* reading) const;

  Options options_;
  uint32_t layer_entries_;
  TableRegions regions_;
  std::vector<uint32_t> slots_;  // [layers][layer_entries], as the device's when it has all changes
  std::vector<Sequence> sequences_;
  std::deque<uint32_t> free_places_;
  std::vector<Change> changes_;
  size_t change_count_ = 0;
  uint64_t generation_ = 0;
  uint64_t moves_ = 0;
};

}  // namespace kvmanager
