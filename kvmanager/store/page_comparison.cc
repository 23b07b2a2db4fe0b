#include "kvmanager/store/page_comparison.h"

#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/page_bytes.h"

namespace kvmanager {

void PageComparison::Add(Block* block) {
  blocks_.push_back({block, false});
  const Cache& cache = *block->cache;
  for (uint32_t layer = 0; layer < block->pages().size(); ++layer) {
    const Page page = block->pages()[layer];
    if (page.state != PageState::kResident) {
      blocks_.back().partial = true;
      continue;
    }
    // The page keeps this form while the block is held.
    const bool encoded = page.encoded.valid();
    const size_t size = encoded ? cache.page_bytes(layer, page.rung) : cache.layout(layer).raw_bytes();
    pages_.push_back({&cache.tier->memory(), PageData(cache, encoded ? page.encoded : page.raw), size, page.checksum,
                      blocks_.size() - 1});
    bytes_ += size;
  }
}

bool PageComparison::CompareOne() {
  if (compared_ == pages_.size()) return false;
  const Listed& page = pages_[compared_];
  const uint64_t checksum = page.memory->Checksum(page.bytes, page.size);
  if (checksum != 0 && checksum != page.checksum) {  // 0: verified when it leaves its memory
    corrupt_ = page.block;
    compared_ = pages_.size();
    return false;
  }
  return ++compared_ < pages_.size();
}

bool PageComparison::Settle() {
  const bool intact = corrupt_ == kNone;
  for (size_t i = 0; i < blocks_.size() && i <= corrupt_; ++i) {
    if (i == corrupt_) {
      index_->NoteCompared(blocks_[i].block, /*intact=*/false);
    } else if (!blocks_[i].partial) {
      index_->NoteCompared(blocks_[i].block, /*intact=*/true);
    }
  }
  blocks_.clear();
  pages_.clear();
  bytes_ = compared_ = 0;
  corrupt_ = kNone;
  return intact;
}

}  // namespace kvmanager
