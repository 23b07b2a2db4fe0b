#include "kvmanager/store/sequence_arrivals.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

class PageWait final : public EncodeWaiter {
 public:
  using EncodeWaiter::EncodeWaiter;
  void Start(std::vector<PageRef> pages, absl::AnyInvocable<void()> fn) {
    WaitFor(std::move(pages));
    CallWhenReady(std::move(fn));
  }

 private:
  void Resolve() override {}
};

// First it waits until what is to be copied is encoded, then until the copies are there.
class ArrivalLeaseImpl final : public ArrivalLease {
 public:
  ArrivalLeaseImpl(const SequenceArrivals::Parts& parts, std::shared_ptr<Cache> to)
      : parts_(parts), to_(std::move(to)), encoded_(parts.encodes, parts.alive), arrived_(parts.encodes, parts.alive) {
    ++to_->leases;
    sequence_ = parts_.sequences->New(to_);
    parts_.sequences->Hide(sequence_.get());
  }
  ~ArrivalLeaseImpl() override {
    if (parts_.alive.expired()) return;
    if (sequence_ != nullptr) {
      parts_.sequences->Unhide(sequence_.get());
      parts_.sequences->Leave(*sequence_, 0);
    }
    LetGo();
    --to_->leases;
    if (!to_->wanted) parts_.caches->CloseIfUnused(to_);
  }

  /// Of a fetch. A block of the target's memory that the caller holds, or of another that it holds until this returns.
  void AddBlock(Block* block) {
    Source source{block, block->cache == to_.get()};
    hit_tiers_.push_back(TakeHit(block));
    if (source.here) {
      parts_.blocks->NoteHolder(block);
    } else {
      Pin(block);
    }
    sources_.push_back(source);
  }
  void StartFetch(const MatchResult& match, uint64_t prompt_tokens) {
    result_.match = match;
    index_facts_.prompt_tokens = prompt_tokens;
    sequence_->hit_blocks = match.hit_blocks;
    // A hit is taken as it is found: its pages have aged.
    std::fill(sequence_->aged.begin(), sequence_->aged.end(), static_cast<uint32_t>(sources_.size()));
    std::fill(sequence_->tokens.begin(), sequence_->tokens.end(), uint64_t{sources_.size()} * to_->page_tokens());
    fetches_ = true;
    AwaitEncoding();
  }
  void StartCopy(const Sequence& from) {
    sequence_->tokens = from.tokens;
    sequence_->aged = from.aged;
    sequence_->hit_blocks = from.hit_blocks;
    if (from.index != nullptr) index_facts_ = from.index->facts();
    for (Block* block : from.blocks) AddBlock(block);
    AwaitEncoding();
  }

  bool ready() const override { return ready_; }
  bool awaits_room() const override { return ready_ && absl::IsResourceExhausted(status_) && !sources_.empty(); }
  void TryAgain() override {
    KV_CHECK(awaits_room());
    ready_ = false;
    if (!parts_.alive.expired()) GoOn();
  }
  int device() const override { return to_->config.device; }
  void OnReady(absl::AnyInvocable<void()> fn) override {
    if (ready_) return fn();
    fn_ = std::move(fn);
  }
  absl::StatusOr<CreateResult> Commit() override;

 private:
  struct Source {
    Block* block;
    bool here;               // held, and shared by the sequence; else pinned, and copied
    Block* equal = nullptr;  // of the target, held: shared instead of a copy
    bool looked = false;     // for `equal`
  };

  void Pin(Block* block) {
    for (uint32_t layer = 0; layer < block->pages().size(); ++layer) {
      if (block->pages()[layer].state != PageState::kFree) parts_.blocks->Pin({block, layer});
    }
  }
  void Unpin(Block* block) {
    // The last unpinning may delete the block.
    uint32_t pinned = 0;
    for (const Page page : block->pages()) pinned += page.state != PageState::kFree;
    for (uint32_t layer = 0; pinned > 0; ++layer) {
      if (block->pages()[layer].state == PageState::kFree) continue;
      --pinned;
      parts_.blocks->Unpin({block, layer});
    }
  }
  // Of the sources, what is not the sequence's.
  void LetGo() {
    for (; !sources_.empty(); sources_.pop_back()) {
      const Source& source = sources_.back();
      if (source.equal != nullptr) GiveBack(source.equal);
      source.here ? GiveBack(source.block) : Unpin(source.block);
    }
  }
  void GiveBack(Block* block) {
    parts_.blocks->ForgetHolder(block);
    parts_.blocks->Release(block);
  }

  void AwaitEncoding() {
    std::vector<PageRef> pending;
    for (const Source& source : sources_) {
      for (uint32_t layer = 0; !source.here && layer < source.block->pages().size(); ++layer) {
        if (source.block->pages()[layer].awaits_encoding()) pending.push_back({source.block, layer});
      }
    }
    encoded_.Start(std::move(pending), [this] { GoOn(); });
  }
  // What is to be copied is encoded.
  void GoOn() {
    status_ = Begin();
    if (!absl::IsResourceExhausted(status_)) LetGo();
    if (!status_.ok()) return End();
    std::vector<PageRef> arriving;
    for (Block* block : sequence_->blocks) {
      for (uint32_t layer = 0; layer < block->pages().size(); ++layer) {
        if (block->pages()[layer].state == PageState::kReceiving) arriving.push_back({block, layer});
      }
    }
    arrived_.Start(std::move(arriving), [this] { End(); });
  }
  // May destroy this.
  void End() {
    ready_ = true;
    absl::AnyInvocable<void()> fn = std::move(fn_);
    fn_ = nullptr;
    if (fn) fn();
  }

  // A block of the target that serves every read of the sequence as this one does, held; nullptr: there is none.
  Block* FindEqual(const Block& block);
  // Copies what is not there, and gives the sequence its blocks.
  absl::Status Begin();

  const SequenceArrivals::Parts parts_;
  const std::shared_ptr<Cache> to_;     // shared: see Block
  std::unique_ptr<Sequence> sequence_;  // not visible; nullptr after Commit
  std::vector<Source> sources_;         // in order; empty once copies have begun
  bool fetches_ = false;
  std::vector<HitTier> hit_tiers_;  // of a fetch, [blocks]
  CreateResult result_;
  IndexFacts index_facts_;
  PageWait encoded_, arrived_;
  absl::Status status_;
  bool ready_ = false;
  absl::AnyInvocable<void()> fn_;
};

Block* ArrivalLeaseImpl::FindEqual(const Block& block) {
  if (!block.published || block.index >= sequence_->tokens[0] / to_->page_tokens()) return nullptr;
  bool holds_raw = false;
  for (uint32_t layer = 0; layer < to_->layers(); ++layer) holds_raw |= sequence_->HoldsRaw(block.index, layer);
  if (const auto found = to_->arriving.find(block.name.key); found != to_->arriving.end() && !holds_raw) {
    Block* const arriving = found->second;
    if (!arriving->Is(block.name, block.index)) return nullptr;
    parts_.blocks->Hold(arriving);
    return arriving;
  }
  MissReason reason;
  Block* const equal = parts_.blocks->Find(*to_, block.name, block.index, BlockIndex::Bytes::kVerify, &reason);
  if (equal == nullptr) return nullptr;
  for (uint32_t layer = 0; layer < to_->layers(); ++layer) {
    const Page page = equal->pages()[layer];
    if (!sequence_->HoldsRaw(block.index, layer) || page.raw.valid() || (to_->identity() && page.encoded.valid())) {
      continue;
    }
    parts_.blocks->Release(equal);
    return nullptr;
  }
  return equal;
}

absl::Status ArrivalLeaseImpl::Begin() {
  const uint64_t tokens = sequence_->tokens[0], page_tokens = to_->page_tokens();
  const auto with_raw = [this](const Block& block, uint32_t layer) { return sequence_->HoldsRaw(block.index, layer); };
  const MoveForms forms{with_raw, static_cast<uint32_t>(tokens / page_tokens), static_cast<int>(tokens % page_tokens)};
  std::vector<Block*> blocks;  // the sequence's; nullptr: to be copied
  std::vector<Block*> missing;
  SlotCounts wanted;
  for (Source& source : sources_) {
    if (!source.here && !std::exchange(source.looked, true)) {
      source.equal = FindEqual(*source.block);
      if (source.equal != nullptr) parts_.blocks->NoteHolder(source.equal);
    }
    blocks.push_back(source.here ? source.block : source.equal);
    if (blocks.back() != nullptr) continue;
    missing.push_back(source.block);
    BlockMoves::CountSlots(*source.block, *to_, forms, &wanted);
  }
  // The GPU may have failed while this waited.
  if (!missing.empty() && BlockMoves::UpperOf(to_->tier, missing[0]->cache->tier)->mover() == nullptr) {
    return absl::UnavailableError("the GPU has failed: it moves no pages any more");
  }
  Reservation slots(to_->tier->pool());
  KV_RETURN_IF_ERROR(to_->tier->Reserve(*to_, wanted, &slots));
  std::vector<Block*> copies;
  if (!missing.empty()) {
    const std::shared_ptr<Cache> from = missing[0]->cache->shared_from_this();
    parts_.moves->Start(from, to_, missing, forms, /*demotes=*/false, &slots, &copies);
  }
  size_t copied = 0;
  for (Block* block : blocks) {
    if (block == nullptr) block = copies[copied++];
    parts_.blocks->Hold(block);
    parts_.sequences->Attach(*sequence_, block);
  }
  return absl::OkStatus();
}

absl::StatusOr<CreateResult> ArrivalLeaseImpl::Commit() {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (sequence_ == nullptr) return absl::FailedPreconditionError("this sequence was made before");
  KV_CHECK(ready_);
  KV_RETURN_IF_ERROR(status_);
  KV_RETURN_IF_ERROR(parts_.sequences->CheckLimit(*to_, sequence_->blocks.size()));
  size_t there = 0;
  while (there < sequence_->blocks.size() && !sequence_->blocks[there]->corrupt) ++there;
  if (there < sequence_->blocks.size()) {
    if (!fetches_) {
      return absl::DataLossError(absl::StrCat("block ", there, " of the sequence was not copied to ", to_->tier->name(),
                                              ": its bytes did not arrive, or are none that a page may have"));
    }
    while (sequence_->blocks.size() > there) parts_.sequences->DetachLast(*sequence_);
    std::fill(sequence_->aged.begin(), sequence_->aged.end(), static_cast<uint32_t>(there));
    std::fill(sequence_->tokens.begin(), sequence_->tokens.end(), uint64_t{there} * to_->page_tokens());
    result_.match = {static_cast<int>(there), MissReason::kChecksum};
    sequence_->hit_blocks = result_.match.hit_blocks;
  }
  if (fetches_) {
    HitTierCounts tiers{};
    for (size_t i = 0; i < there; ++i) ++tiers[static_cast<size_t>(hit_tiers_[i])];
    parts_.blocks->CountHits(result_.match, tiers);
  }
  parts_.sequences->Unhide(sequence_.get());
  parts_.indexes->Make(*sequence_, index_facts_, sequence_->tokens[0]);
  parts_.indexes->AdvanceAll(*sequence_);
  result_.sequence = parts_.sequences->Show(std::move(sequence_));
  return result_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ArrivalLease>> SequenceArrivals::Fetch(CacheId id, absl::Span<const BlockName> prefix,
                                                                      uint64_t prompt_tokens) {
  KV_ASSIGN_OR_RETURN(const auto cache, parts_.caches->Find(id));
  KV_RETURN_IF_ERROR(parts_.sequences->CheckNew(*cache, prefix, prompt_tokens));
  parts_.metrics->prefix_asked_blocks.Increment(static_cast<double>(prefix.size()));
  MatchResult match;
  const std::vector<Block*> found = parts_.caches->FindPrefix(*cache, prefix, BlockIndex::Bytes::kVerify, &match);
  auto lease = std::make_unique<ArrivalLeaseImpl>(parts_, cache);
  for (Block* block : found) lease->AddBlock(block);
  // What the lease pins needs no holder.
  for (auto block = found.rbegin(); block != found.rend(); ++block) {
    if ((*block)->cache != cache.get()) parts_.blocks->Release(*block);
  }
  lease->StartFetch(match, prompt_tokens);
  return lease;
}

absl::StatusOr<std::unique_ptr<ArrivalLease>> SequenceArrivals::Copy(SequenceId id, int device) {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, parts_.sequences->FindWhole(id));
  const std::shared_ptr<Cache> from = sequence->cache;
  if (!sequence->LayersAreEqual()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "tokens",
                      absl::StrCat("different in the layers, ", sequence->TokensInEveryLayer(), " in the shortest"),
                      "equal in all layers to copy");
  }
  KV_RETURN_IF_ERROR(parts_.sequences->CheckLimit(*from, sequence->blocks.size()));
  Tier* const target = parts_.caches->TierOf(device);
  const Tier* const upper = target == nullptr ? nullptr : BlockMoves::UpperOf(from->tier, target);
  if (upper == nullptr || upper->mover() == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(device),
                      absl::StrCat("a memory that pages of ", from->tier->name(),
                                   " move to: of it and the other one end is the host's, and one a GPU that this "
                                   "daemon was started with"));
  }
  KV_RETURN_IF_ERROR(upper->mover()->status());
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> to, parts_.caches->OpenCounterpart(*from, *target));
  auto lease = std::make_unique<ArrivalLeaseImpl>(parts_, std::move(to));
  lease->StartCopy(*sequence);
  return lease;
}

}  // namespace kvmanager
