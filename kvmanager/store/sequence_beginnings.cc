#include "kvmanager/store/sequence_beginnings.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_comparison.h"

namespace kvmanager {

class SequenceBeginnings::Beginning final : public SequenceBeginning {
 public:
  Beginning(const Parts& parts, std::shared_ptr<Cache> cache, std::vector<BlockName> prefix, uint64_t prompt_tokens)
      : parts_(parts),
        cache_(std::move(cache)),
        prefix_(std::move(prefix)),
        prompt_tokens_(prompt_tokens),
        sequence_(SequenceTable::New(cache_)),
        comparison_(parts.blocks) {
    ++cache_->leases;
    parts_.sequences->Hide(sequence_.get());
  }
  ~Beginning() override {
    if (parts_.alive.expired()) return;
    for (; !piece_.empty(); piece_.pop_back()) GiveBack(piece_.back());
    if (sequence_ != nullptr) {
      parts_.sequences->Unhide(sequence_.get());
      parts_.sequences->Leave(*sequence_, 0);
    }
    --cache_->leases;
    if (!cache_->wanted) parts_.caches->CloseIfUnused(cache_);
  }

  Next DoPiece() override {
    if (parts_.alive.expired()) return Next::kDone;
    Attach();
    if (ended_) return Next::kDone;
    for (size_t pages = 0; !ended_ && pages < kPagesOfPiece; pages += cache_->layers()) {
      const uint32_t index = static_cast<uint32_t>(sequence_->blocks.size() + piece_.size());
      Block* const block = index == prefix_.size() ? nullptr
                                                   : parts_.blocks->Find(*cache_, prefix_[index], index,
                                                                         BlockIndex::Bytes::kTrust, &match_.reason);
      ended_ = block == nullptr;
      if (ended_) break;
      parts_.blocks->NoteHolder(block);
      piece_.push_back(block);
      if (parts_.blocks->IsUnverified(*block)) comparison_.Add(block);
    }
    if (comparison_.bytes() > kVerifiedAtOnceBytes) return Next::kCompare;
    while (comparison_.CompareOne()) {
    }
    Attach();
    return ended_ ? Next::kDone : Next::kPiece;
  }

  bool CompareOne() override { return comparison_.CompareOne(); }

  absl::StatusOr<CreateResult> Commit() override {
    if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
    KV_CHECK(ended_ && piece_.empty() && sequence_ != nullptr);
    const size_t found = sequence_->blocks.size();
    KV_RETURN_IF_ERROR(parts_.sequences->CheckLimit(*cache_, found));
    match_.hit_blocks = static_cast<int>(found);
    parts_.metrics->prefix_asked_blocks.Increment(static_cast<double>(prefix_.size()));
    parts_.blocks->CountHits(match_, tiers_);
    sequence_->hit_blocks = match_.hit_blocks;
    parts_.sequences->Unhide(sequence_.get());
    parts_.indexes->Make(*sequence_, {prompt_tokens_, 0}, sequence_->tokens[0]);
    parts_.indexes->AdvanceAll(*sequence_);
    return CreateResult{parts_.sequences->Show(std::move(sequence_)), match_};
  }

 private:
  static constexpr size_t kPagesOfPiece = 256;  // and those of one block more: some 0.1 ms

  // Those of the piece that are intact become the sequence's, until one is not. A hit is taken as it is found: its
  // pages have aged.
  void Attach() {
    comparison_.Settle();
    size_t taken = 0;
    for (; taken < piece_.size() && !piece_[taken]->corrupt; ++taken) {
      const uint32_t blocks = static_cast<uint32_t>(sequence_->blocks.size()) + 1;
      std::fill(sequence_->aged.begin(), sequence_->aged.end(), blocks);
      std::fill(sequence_->tokens.begin(), sequence_->tokens.end(), uint64_t{blocks} * cache_->page_tokens());
      parts_.blocks->ForgetHolder(piece_[taken]);
      parts_.sequences->Attach(*sequence_, piece_[taken]);
      ++tiers_[static_cast<size_t>(TakeHit(piece_[taken]))];
      if (cache_->rungs() > 1) parts_.metrics->Rung(piece_[taken]->rung()).hit_blocks->Increment();
    }
    if (taken < piece_.size()) {
      ended_ = true;
      match_.reason = MissReason::kChecksum;
    }
    for (; piece_.size() > taken; piece_.pop_back()) GiveBack(piece_.back());
    piece_.clear();
  }
  void GiveBack(Block* block) {
    parts_.blocks->ForgetHolder(block);
    parts_.blocks->Release(block);
  }

  const Parts parts_;                   // it may outlive the store
  const std::shared_ptr<Cache> cache_;  // shared: see Block
  const std::vector<BlockName> prefix_;
  const uint64_t prompt_tokens_;
  std::unique_ptr<Sequence> sequence_;  // not visible; nullptr after Commit
  std::vector<Block*> piece_;           // found, held, and not the sequence's yet
  PageComparison comparison_;           // of these
  MatchResult match_;
  HitTierCounts tiers_{};  // of the sequence's blocks
  bool ended_ = false;     // no more are to be found
};

absl::StatusOr<std::unique_ptr<SequenceBeginning>> SequenceBeginnings::Begin(CacheId id, std::vector<BlockName> prefix,
                                                                             uint64_t prompt_tokens) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  KV_RETURN_IF_ERROR(parts_.sequences->CheckNew(*cache, prefix, prompt_tokens));
  return std::unique_ptr<SequenceBeginning>(
      std::make_unique<Beginning>(parts_, std::move(cache), std::move(prefix), prompt_tokens));
}

}  // namespace kvmanager
