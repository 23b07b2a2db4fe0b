#include "kvmanager/store/page_table.h"

#include "kvmanager/base/status.h"

namespace kvmanager {

Block* PageTable::Find(const BlockName& name, uint32_t index, MissReason* reason) const {
  Block* block = FindKey(name.key);
  if (block == nullptr || block->index != index) {
    *reason = MissReason::kNotFound;
    return nullptr;
  }
  if (block->name.tokens != name.tokens) {
    *reason = MissReason::kTokenMismatch;
    return nullptr;
  }
  *reason = MissReason::kNone;
  return block;
}

Block* PageTable::FindAndPin(const BlockName& name, uint32_t index, MissReason* reason) {
  Block* block = Find(name, index, reason);
  if (block != nullptr) ++block->holders;
  return block;
}

Block* PageTable::FindKey(const BlockKey& key) const {
  const auto found = blocks_.find(key);
  return found == blocks_.end() ? nullptr : found->second;
}

void PageTable::Insert(Block* block) {
  KV_CHECK(!block->published && blocks_.emplace(block->name.key, block).second);
  block->published = true;
}

void PageTable::Erase(Block* block) {
  KV_CHECK(block->published && blocks_.erase(block->name.key) == 1);
  block->published = false;
}

}  // namespace kvmanager
