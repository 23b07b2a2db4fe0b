#include "kvmanager/store/block_checks.h"

#include <utility>

#include "kvmanager/store/page_comparison.h"

namespace kvmanager {
namespace {

class BlockCheckImpl final : public BlockCheck {
 public:
  // blocks: held.
  BlockCheckImpl(BlockIndex* index, std::vector<Block*> blocks, std::weak_ptr<const bool> alive)
      : index_(index), alive_(std::move(alive)), blocks_(std::move(blocks)), comparison_(index) {
    for (Block* block : blocks_) index_->NoteHolder(block);
  }
  ~BlockCheckImpl() override {
    if (alive_.expired()) return;
    for (; !blocks_.empty(); blocks_.pop_back()) {
      index_->ForgetHolder(blocks_.back());
      index_->Release(blocks_.back());
    }
  }

  bool Next() override {
    if (alive_.expired() || !comparison_.Settle()) return false;  // a prefix ends at a block that has changed
    for (; listed_to_ < blocks_.size() && comparison_.pages() < kPagesAtOnce; ++listed_to_) {
      comparison_.Add(blocks_[listed_to_]);
    }
    return comparison_.pages() > 0;
  }

  bool CompareOne() override { return comparison_.CompareOne(); }

 private:
  static constexpr size_t kPagesAtOnce = 1024;  // and those of one block more

  BlockIndex* const index_;
  const std::weak_ptr<const bool> alive_;
  std::vector<Block*> blocks_;
  size_t listed_to_ = 0;  // of blocks_
  PageComparison comparison_;
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
