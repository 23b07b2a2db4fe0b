// What a hand-off that is sent keeps of the store: pages that it pins, and blocks that it holds. A plain struct of the
// store, on its thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvmanager/store/block_index.h"

namespace kvmanager {

struct ExportHolds {
  static constexpr uint32_t kNotEncoded = UINT32_MAX;

  std::shared_ptr<Cache> cache;      // shared: see Block. Has a lease
  uint64_t counted = 0;              // pages of the hand-off (SequenceExports)
  std::vector<PageRef> pages;        // no block: not pinned
  std::vector<uint32_t> numbers;     // [pages] kNotEncoded: pinned as it is; else for its encoded form
  std::vector<PageRef> tail;         // pinned
  std::vector<PageRef> open;         // pinned
  std::vector<PageRef> activations;  // pinned
  std::vector<Block*> blocks;        // held, and noted (BlockIndex::NoteHolder)

  /// Gives back `pages_max` pages, or one block more, children first (EvictionPolicy). False: that was all.
  bool GiveBackSome(BlockIndex* from, size_t pages_max);
};

}  // namespace kvmanager
