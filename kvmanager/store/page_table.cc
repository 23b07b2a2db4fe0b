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

Block* PageTable::FindKey(const BlockKey& key) const {
  auto found = blocks_.find(key);
  if (found == blocks_.end() && fill_ != nullptr && fill_(key)) found = blocks_.find(key);
  return found == blocks_.end() ? nullptr : const_cast<Block*>(&*found);  // the blocks are not the table's
}

void PageTable::Insert(Block* block) {
  KV_CHECK(!block->published && blocks_.insert(*block).second);
  block->published = true;
  ++size_;
  Grow();
}

// As many buckets are in use as there are blocks, at least: each insertion splits one. Once all are, there are twice as
// many, half of which are not in use yet.
void PageTable::Grow() {
  if (blocks_.split_count() > size_) return;
  if (blocks_.split_count() == buckets_.size()) {
    std::vector<Blocks::bucket_type> more(2 * buckets_.size());
    KV_CHECK(blocks_.incremental_rehash(Blocks::bucket_traits(more.data(), more.size())));
    buckets_.swap(more);
  }
  KV_CHECK(blocks_.incremental_rehash());
}

void PageTable::Erase(Block* block) {
  KV_CHECK(block->published && size_ > 0);
  blocks_.erase(blocks_.iterator_to(*block));
  block->published = false;
  --size_;
}

}  // namespace kvmanager
