// Names to blocks, for one cache. Owned by the cache, on the store's thread; the blocks are the store's.
//
// Invariant: a block is in the table exactly while it is `published`, under its name's key.
#pragma once

#include "absl/container/flat_hash_map.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/miss_reason.h"

namespace kvmanager {

class PageTable {
 public:
  /// The block named `name` at place `index` of a sequence, or nullptr and the reason.
  Block* Find(const BlockName& name, uint32_t index, MissReason* reason) const;
  /// Find, and one more holder of the block found, in one step: nothing can evict it in between.
  Block* FindAndPin(const BlockName& name, uint32_t index, MissReason* reason);
  /// The block with this key, whatever its place and tokens, or nullptr.
  Block* FindKey(const BlockKey& key) const;

  /// `block->name.key` must be new.
  void Insert(Block* block);
  void Erase(Block* block);

  size_t size() const { return blocks_.size(); }
  const absl::flat_hash_map<BlockKey, Block*>& blocks() const { return blocks_; }

 private:
  absl::flat_hash_map<BlockKey, Block*> blocks_;
};

}  // namespace kvmanager
