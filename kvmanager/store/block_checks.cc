#include "kvmanager/store/block_checks.h"

#include <utility>

#include "absl/container/flat_hash_set.h"
#include "kvmanager/store/page_bytes.h"

namespace kvmanager {
namespace {

class BlockCheckImpl final : public BlockCheck {
 public:
  // blocks: held.
  BlockCheckImpl(BlockIndex* index, std::vector<Block*> blocks, std::weak_ptr<const bool> alive)
      : index_(index), alive_(std::move(alive)), blocks_(std::move(blocks)) {
    for (const Block* block : blocks_) index_->other_holders().Note(block);
  }
  ~BlockCheckImpl() override {
    if (alive_.expired()) return;
    for (; !blocks_.empty(); blocks_.pop_back()) {
      index_->other_holders().Forget(blocks_.back());
      index_->Release(blocks_.back());
    }
  }

  bool Next() override {
    if (alive_.expired()) return false;
    for (; settled_ < listed_to_; ++settled_) {
      Block* const block = blocks_[settled_];
      if (settled_ == corrupt_) {
        index_->NoteCompared(block, /*intact=*/false);
        return false;  // a prefix ends here
      }
      if (!partial_.contains(settled_)) index_->NoteCompared(block, /*intact=*/true);
    }
    pages_.clear();
    compared_ = 0;
    for (; listed_to_ < blocks_.size() && pages_.size() < kPagesAtOnce; ++listed_to_) List(listed_to_);
    return !pages_.empty();
  }

  bool CompareOne() override {
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

 private:
  static constexpr size_t kPagesAtOnce = 4096;  // and those of one block more
  static constexpr size_t kNone = SIZE_MAX;

  struct Listed {
    const MemoryBackend* memory;
    const uint8_t* bytes;
    size_t size;
    uint64_t checksum;
    size_t block;
  };

  // Pages that wait to be encoded have nothing to compare with. The others keep this form while the block is held.
  void List(size_t at) {
    const Block& block = *blocks_[at];
    const Cache& cache = *block.cache;
    for (uint32_t layer = 0; layer < block.pages.size(); ++layer) {
      const Page& page = block.pages[layer];
      if (page.state != PageState::kResident) {
        partial_.insert(at);
        continue;
      }
      const bool encoded = page.encoded.valid();
      pages_.push_back({&cache.tier->memory(), PageData(cache, encoded ? page.encoded : page.raw),
                        encoded ? cache.page_bytes(layer) : cache.layout().raw_bytes(), page.checksum, at});
    }
  }

  BlockIndex* const index_;
  const std::weak_ptr<const bool> alive_;
  std::vector<Block*> blocks_;
  size_t listed_to_ = 0, settled_ = 0;  // of blocks_
  std::vector<Listed> pages_;
  size_t compared_ = 0;
  size_t corrupt_ = kNone;               // of blocks_
  absl::flat_hash_set<size_t> partial_;  // of blocks_: not all of their pages were compared
};

}  // namespace

std::unique_ptr<BlockCheck> MakeBlockCheck(BlockIndex* blocks, std::vector<Block*> held,
                                           std::weak_ptr<const bool> alive) {
  std::vector<Block*> unverified;
  uint64_t bytes = 0;
  for (Block* block : held) {
    if (!blocks->IsUnverified(*block)) continue;
    unverified.push_back(block);
    bytes += block->bytes;
  }
  const bool little = bytes <= kVerifiedAtOnceBytes;
  if (!little) {
    for (Block* block : unverified) blocks->Hold(block);
  }
  // Of a chain, children first (EvictionPolicy).
  for (; !held.empty(); held.pop_back()) blocks->Release(held.back());
  if (little) return nullptr;
  return std::make_unique<BlockCheckImpl>(blocks, std::move(unverified), std::move(alive));
}

}  // namespace kvmanager
