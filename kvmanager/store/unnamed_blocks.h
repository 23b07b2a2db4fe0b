// The set of the blocks that have no name. On the store's thread.
#pragma once

#include <cstdint>
#include <deque>

#include "kvmanager/base/status.h"
#include "kvmanager/store/block.h"

namespace kvmanager {

/// Blocks that have no name, in no order. No insertion is long: what a deque moves as it grows is a table of 8 bytes
/// for 64 blocks, with a million of them 128 KB.
class UnnamedBlocks {
 public:
  void Insert(Block* block) {
    block->unnamed_place = static_cast<uint32_t>(blocks_.size());
    blocks_.push_back(block);
  }
  /// Of those inserted.
  void Erase(Block* block) {
    KV_CHECK(block->unnamed_place < blocks_.size() && blocks_[block->unnamed_place] == block);
    Block* const last = blocks_.back();
    blocks_[block->unnamed_place] = last;
    last->unnamed_place = block->unnamed_place;
    blocks_.pop_back();
  }
  const std::deque<Block*>& all() const { return blocks_; }

 private:
  std::deque<Block*> blocks_;  // each at its unnamed_place
};

}  // namespace kvmanager
