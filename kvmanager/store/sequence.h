// The ordered pages of one context: shared full blocks, then the block that its layers still fill. A plain struct of
// the store.
//
// Invariants:
//  1. Layer l has tokens[l] tokens, in pages 0 .. ceil(tokens[l] / page_tokens) - 1; pages beyond are Free.
//  2. Pages 0 .. aged[l] - 1 of layer l have aged for this sequence and are full; it holds the raw form of all later
//     ones.
//  3. A block that is not full in every layer belongs to this sequence alone.
//  4. Pages are Receiving only while `arriving`, or once it is `broken`.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "codecs/sequence_index.h"
#include "kvmanager/store/block.h"

namespace kvmanager {

class PageFollower;

struct Sequence {
  uint64_t id = 0;
  std::shared_ptr<Cache> cache;  // shared: see Block
  std::vector<Block*> blocks;    // each with this sequence as a holder
  std::vector<uint64_t> tokens;  // [layers]
  std::vector<uint32_t> aged;    // [layers]
  /// [keepers][layers] what TakeChanges will name; empty before a keeper first asked.
  struct Changes {
    bool followed = false;        // once this layer was asked for; before, every page is a change
    std::vector<uint32_t> pages;  // since it was last asked for, in any order and perhaps twice
    std::vector<uint32_t> index;  // the same, of the index's places
  };
  std::array<std::vector<Changes>, 2> changed;
  /// [layers] where reads follow tables: pages before this one need no waiting for: they are encoded or declined.
  std::vector<uint32_t> settled;
  int hit_blocks = 0;
  EvictionRun run;                       // its use of its blocks, for the eviction policy
  size_t shared_blocks = 0;              // it began with
  std::unique_ptr<SequenceIndex> index;  // nullptr: queries read everything
  uint64_t index_bytes = 0;              // of it, as counted in the metrics
  /// [layers] where the index lies, if it takes slots; else empty. Place 0 is the part that training makes, place 1 + i
  /// chunk i of codes.
  struct IndexPlaces {
    std::shared_ptr<const IndexMemory> book;                 // shared with the job that makes it, and with forks
    std::vector<std::shared_ptr<const IndexMemory>> chunks;  // full ones shared with forks
  };
  std::vector<IndexPlaces> index_places;
  uint64_t call = 0;                     // the last append that named it, so that one call names it once
  bool appending = false;                // in pieces, by an AppendLease
  bool arriving = false;                 // by a hand-off that is visible and not committed
  absl::Status broken;                   // an error: that hand-off ended early, and why
  std::vector<PageFollower*> followers;  // hand-offs that send it while it grows

  uint64_t TokensInEveryLayer() const { return *std::min_element(tokens.begin(), tokens.end()); }
  uint64_t bytes() const {  // of its pages, shared ones in full
    uint64_t bytes = 0;
    for (const Block* block : blocks) bytes += block->bytes;
    return bytes;
  }
  bool LayersAreEqual() const {
    return std::all_of(tokens.begin(), tokens.end(), [this](uint64_t n) { return n == tokens[0]; });
  }
  /// A page has other slots now, for those who keep tables.
  void NoteChange(uint32_t layer, uint32_t page) {
    for (auto& keeper : changed) {
      if (!keeper.empty() && keeper[layer].followed) keeper[layer].pages.push_back(page);
    }
  }
  /// The same of a place of the index.
  void NoteIndexChange(uint32_t layer, uint32_t place) {
    for (auto& keeper : changed) {
      if (!keeper.empty() && keeper[layer].followed) keeper[layer].index.push_back(place);
    }
  }
  /// Whether somebody will ask for changes.
  bool has_keepers() const {
    return std::any_of(changed.begin(), changed.end(), [](const auto& keeper) { return !keeper.empty(); });
  }
  bool HoldsRaw(uint32_t block_index, uint32_t layer) const { return block_index >= aged[layer]; }
};

}  // namespace kvmanager
