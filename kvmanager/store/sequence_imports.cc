#include "kvmanager/store/sequence_imports.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/hand_off_check.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/page_check.h"
#include "kvmanager/store/raw_page.h"

namespace kvmanager {
namespace {

class ImportLeaseImpl final : public ImportLease {
 public:
  ImportLeaseImpl(const SequenceImports::Parts& parts, std::shared_ptr<Cache> cache, const HandOffHeader& first)
      : parts_(parts), cache_(std::move(cache)), first_(first) {
    ++cache_->leases;
    parts_.metrics->import_leases.Increment();
  }
  ~ImportLeaseImpl() override {
    if (parts_.alive.expired()) return;
    Break(absl::CancelledError("it was given up"));
    if (hidden_ != nullptr) {
      parts_.sequences->Unhide(hidden_.get());
      parts_.sequences->Leave(*hidden_, 0);
    }
    for (NewBlock& block : new_blocks_) LetGo(block);
    --cache_->leases;
    if (!cache_->wanted) parts_.caches->CloseIfUnused(cache_);
    parts_.metrics->import_leases.Decrement();
  }

  absl::Status Start(RecomputeChoice recompute);
  CacheId cache() const override { return cache_->id; }
  absl::Span<uint8_t> target(size_t page) const override {
    if (page < first_targets_.size()) return first_targets_[page];
    KV_CHECK(page - first_targets_.size() < last_targets_.size());
    return last_targets_[page - first_targets_.size()];
  }
  absl::Status Extend(const HandOffTrailer& last) override;
  absl::StatusOr<uint64_t> Validate(uint32_t page) const override;
  absl::Status Arrived(absl::Span<const ArrivedPage> pages) override;
  std::vector<RecomputePage> TakeRecomputable() override { return std::exchange(recomputable_, {}); }
  absl::Status Recomputed(absl::Span<const ArrivedPage> pages) override;
  bool can_show() const override { return extended_ && awaited_last_ == 0 && (!first_awaited() || !shows_whole_); }
  absl::StatusOr<SequenceId> Show() override;
  bool complete() const override { return extended_ && awaited_last_ == 0 && !first_awaited(); }
  absl::Status Commit() override;
  void Break(const absl::Status& why) override;

 private:
  absl::StatusOr<uint64_t> Look(uint32_t number, absl::Span<const uint8_t> bytes) const;
  // How a page of the sequence travels: with the header, encoded or raw since the codec keeps it so; raw with the
  // trailer; as activations.
  enum class How : uint8_t { kEncoded, kKeptRaw, kRaw, kRecomputed };
  // A block that was not here. It is held by the sequence, and from Show on by this too while pages are to come.
  struct NewBlock {
    Block* block = nullptr;  // nullptr: shared
    uint32_t awaited = 0;    // pages of K and V
    bool held = false;
  };

  uint32_t full_blocks() const { return static_cast<uint32_t>(first_.blocks.size()); }
  uint32_t pages_per_layer() const { return full_blocks() + (first_.tokens % cache_->page_tokens() != 0); }
  How& how(uint32_t block, uint32_t layer) { return how_[size_t{layer} * pages_per_layer() + block]; }
  const HandOffPage& page_of(uint32_t number) const {
    return number < first_.size() ? first_.page(number) : last_.pages[number - first_.size()];
  }
  bool is_activations(uint32_t number) const { return number >= first_.pages.size() && number < first_.size(); }
  bool first_awaited() const { return awaited_first_ > 0 || recomputing_.size() > 0; }
  // Decides which pages of blocks that are to come (not in `shared`) are recomputed.
  void ChooseRecomputed(absl::Span<Block* const> shared, RecomputeChoice recompute);
  // A full page of K and V is in its slot; it is to be encoded unless it came so or stays raw.
  void ShowFull(PageRef ref, uint64_t checksum, std::vector<PageRef>* to_encode);
  void LetGoOf(absl::Span<const ArrivedPage> pages);
  bool CanShare(const Block& block) const;
  absl::Status CheckLast(const HandOffTrailer& last) const;
  void LetGo(NewBlock& block);

  const SequenceImports::Parts parts_;
  const std::shared_ptr<Cache> cache_;  // shared: see Block
  const HandOffHeader first_;
  HandOffTrailer last_;
  std::vector<How> how_;                            // [layers][pages_per_layer()]
  std::unique_ptr<Sequence> hidden_;                // nullptr after Show
  SequenceId sequence_ = 0;                         // after Show; it may have been dropped since
  std::vector<NewBlock> new_blocks_;                // [pages_per_layer()]
  std::vector<absl::Span<uint8_t>> first_targets_;  // unchanged after Start
  std::vector<absl::Span<uint8_t>> last_targets_;   // unchanged after Extend
  std::vector<bool> awaited_;                       // by number: wanted, and not here yet
  uint64_t awaited_first_ = 0, awaited_last_ = 0;
  std::vector<RecomputePage> recomputable_;    // not taken yet
  absl::flat_hash_set<uint32_t> recomputing_;  // numbers of activations that are here, whose K and V are not
  bool shows_whole_ = false;                   // with a codec that has indexes: they are made from all pages
  bool extended_ = false, committed_ = false, broken_ = false;
};

// Whether the block that is here serves every read of the received sequence.
bool ImportLeaseImpl::CanShare(const Block& block) const {
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    if (!hidden_->HoldsRaw(block.index, layer)) continue;
    if (RawPageData(*cache_, block.pages[layer]) == nullptr) return false;
  }
  return true;
}

void ImportLeaseImpl::ChooseRecomputed(absl::Span<Block* const> shared, RecomputeChoice recompute) {
  if (!cache_->keeps_activations()) return;  // on a GPU
  std::vector<uint32_t> pages(cache_->layers(), 0), left(cache_->layers(), 0);
  for (const HandOffPage& page : first_.pages) pages[page.layer] += shared[page.block] == nullptr;
  for (const HandOffPage& page : first_.activations) left[page.layer] += shared[page.block] == nullptr;
  for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
    if (left[layer] > 0) left[layer] = std::min(left[layer], recompute(layer, pages[layer], left[layer]));
  }
  for (const HandOffPage& page : first_.activations) {
    if (shared[page.block] != nullptr || left[page.layer] == 0) continue;
    --left[page.layer];
    how(page.block, page.layer) = How::kRecomputed;
  }
}

absl::Status ImportLeaseImpl::Start(RecomputeChoice recompute) {
  KV_RETURN_IF_ERROR(CheckFirst(*cache_, first_));
  const bool identity = cache_->identity();
  shows_whole_ = cache_->codec->NewIndex({}) != nullptr;
  hidden_ = parts_.sequences->New(cache_);
  parts_.sequences->Hide(hidden_.get());
  std::fill(hidden_->tokens.begin(), hidden_->tokens.end(), first_.tokens);
  hidden_->aged = first_.aged;
  how_.assign(size_t{pages_per_layer()} * cache_->layers(), How::kRaw);
  for (const HandOffPage& page : first_.pages) {
    if (!cache_->keeps_raw(page.block, page.layer)) {
      how(page.block, page.layer) = How::kEncoded;
    } else if (page.bytes == cache_->layout().raw_bytes()) {
      how(page.block, page.layer) = How::kKeptRaw;
    }  // else an earlier build sends it with the trailer, and it is not wanted before
  }
  // Find and hold first: reserving may evict.
  std::vector<Block*> shared(full_blocks(), nullptr), unfit;
  SlotCounts wanted;
  for (uint32_t i = 0; i < full_blocks(); ++i) {
    MissReason reason;
    Block* block = first_.blocks[i].named
                       ? parts_.blocks->Find(*cache_, first_.blocks[i].name, i, BlockIndex::Bytes::kVerify, &reason)
                       : nullptr;
    if (block != nullptr && !CanShare(*block)) {
      unfit.push_back(block);
      block = nullptr;
    }
    shared[i] = block;
  }
  ChooseRecomputed(shared, recompute);
  for (uint32_t i = 0; i < full_blocks(); ++i) {
    for (uint32_t layer = 0; shared[i] == nullptr && layer < cache_->layers(); ++layer) {
      wanted.raw += !identity && how(i, layer) != How::kEncoded;
      wanted.activations += how(i, layer) == How::kRecomputed;
      if (!cache_->keeps_raw(i, layer))
        cache_->CountEncodedSlots(layer, 1, &wanted);  // a raw page's is for its encoding
    }
  }
  for (; !unfit.empty(); unfit.pop_back()) parts_.blocks->Release(unfit.back());
  if (pages_per_layer() > full_blocks()) wanted.raw += cache_->layers();
  Reservation slots(cache_->tier->pool());
  if (absl::Status status = cache_->tier->Reserve(*cache_, wanted, &slots); !status.ok()) {
    for (auto block = shared.rbegin(); block != shared.rend(); ++block) {
      if (*block != nullptr) parts_.blocks->Release(*block);
    }
    return status;
  }
  new_blocks_.resize(pages_per_layer());
  for (uint32_t i = 0; i < pages_per_layer(); ++i) {
    const bool open = i == full_blocks();
    if (!open && shared[i] != nullptr) {
      parts_.sequences->Attach(*hidden_, shared[i]);
      continue;
    }
    Block* block = parts_.blocks->New(cache_, i);
    new_blocks_[i].block = block;
    new_blocks_[i].awaited = cache_->layers();
    for (uint32_t layer = 0; layer < cache_->layers(); ++layer) {
      PageChange reserved;
      if (open || (!identity && how(i, layer) != How::kEncoded)) reserved.raw = slots.TakeRaw();
      if (!open && !cache_->keeps_raw(i, layer)) reserved.encoded = slots.TakeEncoded(*cache_, layer);
      parts_.blocks->Apply({block, layer}, PageEvent::kReserve, reserved);
      if (how(i, layer) != How::kRecomputed) continue;
      parts_.blocks->Apply({block, layer, PageKind::kActivations}, PageEvent::kReserve,
                           {PageId(), slots.TakeActivations()});
    }
    parts_.sequences->Attach(*hidden_, block);
  }
  for (uint32_t number = 0; number < first_.size(); ++number) {
    const HandOffPage& page = first_.page(number);
    const Block* block = new_blocks_[page.block].block;
    const bool recomputed = how(page.block, page.layer) == How::kRecomputed;
    const bool wanted_here =
        block != nullptr && is_activations(number) == recomputed && how(page.block, page.layer) != How::kRaw;
    awaited_.push_back(wanted_here);
    awaited_first_ += wanted_here;
    first_targets_.emplace_back();
    if (!wanted_here) continue;
    const Page& into = recomputed ? block->activations[page.layer] : block->pages[page.layer];
    const PageId slot = how(page.block, page.layer) == How::kKeptRaw ? into.raw : into.encoded;
    first_targets_.back() = absl::Span<uint8_t>(PageData(*cache_, slot), page.bytes);
  }
  return absl::OkStatus();
}

absl::Status ImportLeaseImpl::CheckLast(const HandOffTrailer& last) const {
  const uint64_t tokens_max = kSequenceBlocksMax * cache_->page_tokens();
  if (last.index.prompt_tokens > tokens_max) {
    return InvalidField("prompt_tokens", last.index.prompt_tokens, absl::StrCat("at most ", tokens_max));
  }
  if (last.index.iterations > IndexFacts::kIterationsMax) {
    return InvalidField("index_iterations", last.index.iterations,
                        absl::StrCat("at most ", IndexFacts::kIterationsMax));
  }
  std::vector<How> how = how_;
  for (size_t i = 0; i < last.withdrawn.size(); ++i) {
    const uint32_t number = last.withdrawn[i];
    const std::string field = absl::StrCat("withdrawn[", i, "]");
    if (number >= first_.pages.size() || (i > 0 && number <= last.withdrawn[i - 1])) {
      return InvalidField(field, number, absl::StrCat("ascending, below ", first_.pages.size()));
    }
    const HandOffPage& page = first_.pages[number];
    if (cache_->identity()) return InvalidField(field, number, "none: this codec declines no page");
    if (!first_targets_[number].empty() && !awaited_[number]) return InvalidField(field, number, "one that never came");
    how[size_t{page.layer} * pages_per_layer() + page.block] = How::kRaw;
  }
  if (last.blocks.size() != first_.blocks.size()) {
    return InvalidField("blocks", last.blocks.size(), absl::StrCat(first_.blocks.size(), ", as in the header"));
  }
  absl::flat_hash_set<BlockKey> keys;
  KV_RETURN_IF_ERROR(CheckBlockNames("blocks", first_.blocks, &keys));
  KV_RETURN_IF_ERROR(CheckBlockNames("blocks", last.blocks, &keys));
  for (size_t i = 0; i < last.blocks.size(); ++i) {
    if (last.blocks[i].named && first_.blocks[i].named) {
      return InvalidField(absl::StrCat("blocks[", i, "].name"), last.blocks[i].name.key.ToHex(8),
                          "none: the header named it");
    }
  }
  // Exactly what the header does not send, in order.
  const uint64_t raw = static_cast<uint64_t>(std::count(how.begin(), how.end(), How::kRaw));
  if (last.pages.size() != raw) {
    return InvalidField("pages", last.pages.size(), absl::StrCat(raw, ", those that the header does not send"));
  }
  size_t at = 0;
  for (size_t i = 0; i < last.pages.size(); ++i, ++at) {
    while (how[at] != How::kRaw) ++at;
    const HandOffPage& page = last.pages[i];
    const auto field = [i](absl::string_view name) { return absl::StrCat("pages[", i, "].", name); };
    const uint64_t layer = at / pages_per_layer(), block = at % pages_per_layer();
    if (page.layer != layer) return InvalidField(field("layer"), page.layer, absl::StrCat(layer));
    if (page.block != block) return InvalidField(field("block"), page.block, absl::StrCat(block));
    const uint64_t bytes = cache_->layout().raw_bytes();
    if (page.bytes != bytes) return InvalidField(field("bytes"), page.bytes, absl::StrCat(bytes));
  }
  return absl::OkStatus();
}

absl::Status ImportLeaseImpl::Extend(const HandOffTrailer& last) {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (extended_) return absl::FailedPreconditionError("the trailer of this hand-off came before");
  KV_RETURN_IF_ERROR(CheckLast(last));
  SlotCounts wanted;
  // A page that the codec keeps raw has its raw slot: senders of earlier builds withdraw pages of raw layers.
  const auto kept_raw = [this](uint32_t number) {
    return how(first_.pages[number].block, first_.pages[number].layer) == How::kKeptRaw;
  };
  for (const uint32_t number : last.withdrawn) wanted.raw += awaited_[number] && !kept_raw(number);
  Reservation slots(cache_->tier->pool());
  KV_RETURN_IF_ERROR(cache_->tier->Reserve(*cache_, wanted, &slots));
  last_ = last;
  extended_ = true;
  for (const uint32_t number : last_.withdrawn) {
    if (!awaited_[number]) continue;
    awaited_[number] = false;
    --awaited_first_;
    if (kept_raw(number)) continue;
    const PageRef ref{new_blocks_[first_.pages[number].block].block, first_.pages[number].layer};
    parts_.blocks->Apply(ref, PageEvent::kReserveRaw, {slots.TakeRaw(), ref.page().encoded});
  }
  for (const HandOffPage& page : last_.pages) {
    const Block* block = new_blocks_[page.block].block;
    // What is recomputed was withdrawn by its sender: its codec declined it. Here the codec is asked again.
    const bool wanted_here = block != nullptr && how(page.block, page.layer) != How::kRecomputed;
    awaited_.push_back(wanted_here);
    awaited_last_ += wanted_here;
    if (!wanted_here) {
      last_targets_.emplace_back();
      continue;
    }
    const Page& into = block->pages[page.layer];
    last_targets_.emplace_back(PageData(*cache_, into.raw.valid() ? into.raw : into.encoded), page.bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ImportLeaseImpl::Validate(uint32_t number) const {
  const absl::Span<const uint8_t> bytes = target(number);
  if (bytes.empty()) return InvalidField("page", number, "a page that is wanted");
  return cache_->tier->memory().LookAtArrival([&] { return Look(number, bytes); });
}

// At the bytes of a page, which come from a stranger.
absl::StatusOr<uint64_t> ImportLeaseImpl::Look(uint32_t number, absl::Span<const uint8_t> bytes) const {
  const HandOffPage& page = page_of(number);
  if (is_activations(number)) {
    const size_t count = bytes.size() / DTypeBytes(cache_->layout().dtype);
    const size_t at = FindNonFinite(cache_->layout().dtype, bytes.data(), count);
    if (at == count) return Checksum(bytes.data(), bytes.size());
    return InvalidField(absl::StrCat("activations[", number - first_.pages.size(), "][token ",
                                     at / cache_->config.hidden, "][value ", at % cache_->config.hidden, "]"),
                        "NaN or Inf", "finite");
  }
  const bool is_raw = number >= first_.pages.size() || cache_->keeps_raw(page.block, page.layer);
  return CheckPageBytes(*cache_, page.layer, is_raw, bytes, absl::StrCat("pages[", number, "]"));
}

void ImportLeaseImpl::ShowFull(PageRef ref, uint64_t checksum, std::vector<PageRef>* to_encode) {
  const Page& page = ref.page();
  if (!page.raw.valid()) {
    parts_.blocks->Apply(ref, PageEvent::kReceivedEncoded, {page.raw, page.encoded, false, checksum});
  } else if (page.encoded.valid()) {
    parts_.blocks->Apply(ref, PageEvent::kReceivedRaw, {page.raw, page.encoded});
    to_encode->push_back(ref);
  } else {
    parts_.blocks->Apply(ref, PageEvent::kReceivedCopy, {page.raw, PageId(), true, checksum});
    parts_.metrics->sink_pages.Increment();
  }
}

absl::Status ImportLeaseImpl::Arrived(absl::Span<const ArrivedPage> pages) {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (broken_) return absl::FailedPreconditionError("this hand-off has ended");
  std::vector<PageRef> to_encode;
  absl::Status status;
  for (const ArrivedPage& arrived : pages) {
    if (arrived.page >= awaited_.size() || !awaited_[arrived.page]) {
      status = InvalidField("page", arrived.page, "a page that is awaited");
      break;
    }
    awaited_[arrived.page] = false;
    --(arrived.page < first_.size() ? awaited_first_ : awaited_last_);
    const HandOffPage& received = page_of(arrived.page);
    const PageRef ref{new_blocks_[received.block].block, received.layer};
    const Page& page = ref.page();
    if (is_activations(arrived.page)) {
      const PageRef activations{ref.block, ref.layer, PageKind::kActivations};
      const PageId slot = activations.page().encoded;
      parts_.blocks->Apply(activations, PageEvent::kReceivedEncoded, {PageId(), slot, false, arrived.checksum});
      recomputing_.insert(arrived.page);
      recomputable_.push_back({arrived.page, received.layer, uint64_t{received.block} * cache_->page_tokens(),
                               PageData(*cache_, slot), PageData(*cache_, page.raw.valid() ? page.raw : page.encoded)});
      continue;
    }
    if (received.block == full_blocks()) {
      parts_.blocks->Apply(ref, PageEvent::kReceivedOpen, {page.raw, page.encoded});
    } else {
      ShowFull(ref, arrived.checksum, &to_encode);
    }
    --new_blocks_[received.block].awaited;
  }
  parts_.encodes->Post(cache_, std::move(to_encode));
  LetGoOf(pages);
  parts_.encodes->NotifyWaiters();
  return status;
}

absl::Status ImportLeaseImpl::Recomputed(absl::Span<const ArrivedPage> pages) {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (broken_) return absl::FailedPreconditionError("this hand-off has ended");
  std::vector<PageRef> to_encode;
  absl::Status status;
  for (const ArrivedPage& done : pages) {
    if (recomputing_.erase(done.page) == 0) {
      status = InvalidField("page", done.page, "activations whose K and V are being recomputed");
      break;
    }
    const HandOffPage& recomputed = page_of(done.page);
    const PageRef ref{new_blocks_[recomputed.block].block, recomputed.layer};
    ShowFull(ref, done.checksum, &to_encode);
    --new_blocks_[recomputed.block].awaited;
  }
  parts_.encodes->Post(cache_, std::move(to_encode));
  LetGoOf(pages);
  parts_.encodes->NotifyWaiters();
  return status;
}

void ImportLeaseImpl::LetGoOf(absl::Span<const ArrivedPage> pages) {
  for (const ArrivedPage& page : pages) {
    if (page.page >= awaited_.size()) break;
    NewBlock& block = new_blocks_[page_of(page.page).block];
    if (block.awaited == 0) LetGo(block);
  }
}

void ImportLeaseImpl::LetGo(NewBlock& block) {
  if (!std::exchange(block.held, false)) return;
  parts_.blocks->other_holders().Forget(block.block);
  parts_.blocks->Release(std::exchange(block.block, nullptr));
}

absl::StatusOr<SequenceId> ImportLeaseImpl::Show() {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (hidden_ == nullptr) return absl::FailedPreconditionError("this hand-off was shown before");
  if (broken_ || !can_show()) return absl::FailedPreconditionError("the trailer of this hand-off is still to come");
  KV_RETURN_IF_ERROR(parts_.sequences->CheckLimit(*hidden_->cache, hidden_->blocks.size()));
  hidden_->hit_blocks = static_cast<int>(full_blocks());
  hidden_->arriving = true;
  for (NewBlock& block : new_blocks_) {
    if (block.awaited == 0) continue;
    parts_.blocks->Hold(block.block);
    parts_.blocks->other_holders().Note(block.block);
    block.held = true;
  }
  parts_.sequences->Unhide(hidden_.get());
  parts_.indexes->Make(*hidden_, last_.index, first_.tokens);
  parts_.indexes->AdvanceAll(*hidden_);
  sequence_ = parts_.sequences->Show(std::move(hidden_));
  return sequence_;
}

absl::Status ImportLeaseImpl::Commit() {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (sequence_ == 0 || committed_ || broken_ || !complete()) {
    return absl::FailedPreconditionError("a hand-off is committed once, when it was shown and every page is here");
  }
  committed_ = true;
  const auto found = parts_.sequences->Find(sequence_);
  if (!found.ok()) return absl::OkStatus();  // dropped meanwhile
  Sequence& sequence = **found;
  sequence.arriving = false;
  for (uint32_t i = 0; i < full_blocks(); ++i) {
    const HandOffBlock& named = first_.blocks[i].named ? first_.blocks[i] : last_.blocks[i];
    Block* block = sequence.blocks[i];
    // A key that somebody else published meanwhile stays theirs; the next publish shares it.
    if (!named.named || block->published || cache_->table.FindKey(named.name.key) != nullptr) continue;
    parts_.blocks->Name(block, named.name, &sequence.run);
    parts_.metrics->published.Increment();
  }
  parts_.metrics->imports.Increment();
  return absl::OkStatus();
}

void ImportLeaseImpl::Break(const absl::Status& why) {
  if (parts_.alive.expired() || committed_ || std::exchange(broken_, true) || sequence_ == 0) return;
  const absl::Status status = absl::UnavailableError(
      absl::StrCat("sequence ", sequence_, " did not arrive whole, its hand-off ended: ", why.message()));
  if (const auto found = parts_.sequences->Find(sequence_); found.ok()) {
    (*found)->arriving = false;
    (*found)->broken = status;
  }
  for (NewBlock& block : new_blocks_) {
    if (!block.held) continue;
    block.block->corrupt = true;
    block.block->arrival = status;
  }
  parts_.encodes->NotifyWaiters();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ImportLease>> SequenceImports::Import(const HandOffHeader& first,
                                                                     std::shared_ptr<const Codec> codec,
                                                                     RecomputeChoice recompute) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache,
                      parts_.caches->FindOrOpen(first.config, std::move(codec), &first.codec_version));
  absl::Status may = parts_.sequences->CheckLimit(*cache, 0);
  if (may.ok() && cache->index.chunk_tokens > 0) may = cache->IndexStaysHere();
  if (!may.ok()) {
    if (!cache->wanted) parts_.caches->CloseIfUnused(cache);
    return may;
  }
  auto lease = std::make_unique<ImportLeaseImpl>(parts_, std::move(cache), first);
  KV_RETURN_IF_ERROR(lease->Start(recompute));
  return lease;
}

void SequenceImports::RoomCame() {
  if (on_room_ == nullptr) return;
  absl::AnyInvocable<void()> fn = std::move(on_room_);
  on_room_ = nullptr;
  fn();
}

}  // namespace kvmanager
