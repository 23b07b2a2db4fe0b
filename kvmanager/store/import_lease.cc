#include "kvmanager/store/import_lease.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/shown_slabs.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/page_check.h"
#include "kvmanager/store/raw_page.h"

namespace kvmanager {

ImportLeaseImpl::ImportLeaseImpl(std::unique_ptr<ImportedSequence> in)
    : in_(std::move(in)), parts_(in_->parts), cache_(*in_->cache) {}

ImportLeaseImpl::~ImportLeaseImpl() { Break(absl::CancelledError("it was given up")); }

// ---- the trailer ----

void ImportLeaseImpl::BeginExtend(HandOffTrailer trailer) {
  extending_ = absl::OkStatus();
  if (parts_.alive.expired()) {
    extending_ = absl::UnavailableError("the store has closed");
  } else if (extended_ || stage_ != Stage::kDone) {
    extending_ = absl::FailedPreconditionError("the trailer of this hand-off came before");
  } else {
    trailer_ = std::move(trailer);
    check_.emplace(cache_, header(), in_->forms, in_->trailer_pages, trailer_);
    raw_wanted_ = 0;
    GoTo(Stage::kCheck);
  }
}

bool ImportLeaseImpl::ExtendNext() {
  if (!extending_.ok() || stage_ == Stage::kDone) return false;
  if (parts_.alive.expired()) {
    extending_ = absl::UnavailableError("the store has closed");
    return false;
  }
  switch (stage_) {
    case Stage::kCheck:
      if (check_->Next()) break;
      extending_ = check_->status();
      GoTo(Stage::kCount);
      break;
    case Stage::kCount:
      CountWithdrawn();
      break;
    case Stage::kRoom:
      MakeRoom();
      break;
    case Stage::kWithdraw:
      WithdrawSome();
      break;
    case Stage::kTargets:
      FindTargetsSome();
      break;
    case Stage::kDone:
      break;
  }
  if (!extending_.ok()) GoTo(Stage::kDone);
  return stage_ != Stage::kDone;
}

void ImportLeaseImpl::CountWithdrawn() {
  for (const size_t to = std::min(trailer_.withdrawn.size(), at_ + kPagesAtOnce); at_ < to; ++at_) {
    const uint32_t number = trailer_.withdrawn[at_];
    if (!in_->targets[number].empty() && !in_->awaited[number]) {
      extending_ = InvalidField(absl::StrCat("withdrawn[", at_, "]"), number, "one that never came");
      return;
    }
    raw_wanted_ += NeedsRawSlot(number);
  }
  if (at_ == trailer_.withdrawn.size()) GoTo(Stage::kRoom);
}

void ImportLeaseImpl::MakeRoom() {
  const SlotCounts wanted{.raw = raw_wanted_};
  if (!wanted.none() && !cache_.tier->CanReserve(cache_, wanted)) {
    if (parts_.owner->GiveBackSome() || TakeBackSlab(cache_.tier->pool())) return;
    if (!cache_.tier->CanReserve(cache_, wanted)) {
      extending_ = parts_.owner->Exhausted(cache_, wanted);
      return;
    }
  }
  check_.reset();
  GoTo(Stage::kWithdraw);
}

void ImportLeaseImpl::WithdrawSome() {
  const size_t at_once = std::clamp<size_t>(kBytesAtOnce / cache_.raw_slot_bytes, 1, kBlocksAtOnce);
  const size_t to = std::min(trailer_.withdrawn.size(), at_ + at_once);
  SlotCounts wanted;
  for (size_t i = at_; i < to; ++i) wanted.raw += NeedsRawSlot(trailer_.withdrawn[i]);
  Reservation slots(cache_.tier->pool());
  extending_ = cache_.tier->Reserve(cache_, wanted, &slots);
  for (; extending_.ok() && at_ < to; ++at_) {
    const uint32_t number = trailer_.withdrawn[at_];
    if (!in_->awaited[number]) {
      if (!in_->targets[number].empty()) {
        extending_ = InvalidField(absl::StrCat("withdrawn[", at_, "]"), number, "one that never came");
      }
      continue;
    }
    const bool needs_slot = NeedsRawSlot(number);
    in_->awaited[number] = false;
    --in_->awaited_first;
    if (!needs_slot) continue;
    const PageRef ref{in_->new_blocks[header().pages[number].block].block, header().pages[number].layer};
    parts_.blocks->Apply(ref, PageEvent::kReserveRaw, {slots.TakeRaw(), ref.page().encoded});
  }
  if (!extending_.ok() || at_ < trailer_.withdrawn.size()) return;
  last_targets_.reserve(trailer_.pages.size());
  in_->awaited.reserve(header().size() + trailer_.pages.size());
  GoTo(Stage::kTargets);
}

void ImportLeaseImpl::FindTargetsSome() {
  for (const size_t to = std::min(trailer_.pages.size(), at_ + kPagesAtOnce); at_ < to; ++at_) {
    const HandOffPage& page = trailer_.pages[at_];
    const Block* const block = in_->new_blocks[page.block].block;
    // What is recomputed was withdrawn by its sender: its codec declined it. Here the codec is asked again.
    const bool wanted = block != nullptr && in_->form(page.block, page.layer) != ArrivalForm::kRecomputed;
    in_->awaited.push_back(wanted);
    awaited_last_ += wanted;
    last_targets_.emplace_back();
    if (!wanted) {
      in_->unwanted.push_back(static_cast<uint32_t>(header().size() + at_));
      continue;
    }
    const Page into = block->pages()[page.layer];
    last_targets_.back() =
        absl::Span<uint8_t>(PageData(cache_, into.raw.valid() ? into.raw : into.encoded), page.bytes);
  }
  if (at_ < trailer_.pages.size()) return;
  extended_ = true;
  GoTo(Stage::kDone);
}

// ---- pages ----

absl::StatusOr<uint64_t> ImportLeaseImpl::Validate(uint32_t number) const {
  const absl::Span<const uint8_t> bytes = target(number);
  if (bytes.empty()) return InvalidField("page", number, "a page that is wanted");
  return cache_.tier->memory().LookAtArrival([&] { return Look(number, bytes); });
}

// At the bytes of a page, which come from a stranger.
absl::StatusOr<uint64_t> ImportLeaseImpl::Look(uint32_t number, absl::Span<const uint8_t> bytes) const {
  const HandOffPage& page = page_of(number);
  if (in_->is_activations(number)) {
    const size_t count = bytes.size() / DTypeBytes(cache_.layout().dtype);
    const size_t at = FindNonFinite(cache_.layout().dtype, bytes.data(), count);
    if (at == count) return Checksum(bytes.data(), bytes.size());
    return InvalidField(absl::StrCat("activations[", number - header().pages.size(), "][token ",
                                     at / cache_.config.hidden, "][value ", at % cache_.config.hidden, "]"),
                        "NaN or Inf", "finite");
  }
  const bool is_raw = number >= header().pages.size() || cache_.keeps_raw(page.block, page.layer);
  return CheckPageBytes(cache_, page.layer, is_raw, bytes, absl::StrCat("pages[", number, "]"));
}

void ImportLeaseImpl::ShowFull(PageRef ref, uint64_t checksum, std::vector<PageRef>* to_encode) {
  const Page page = ref.page();
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
    if (arrived.page >= in_->awaited.size() || !in_->awaited[arrived.page]) {
      status = InvalidField("page", arrived.page, "a page that is awaited");
      break;
    }
    in_->awaited[arrived.page] = false;
    --(arrived.page < header().size() ? in_->awaited_first : awaited_last_);
    const HandOffPage& received = page_of(arrived.page);
    const PageRef ref{in_->new_blocks[received.block].block, received.layer};
    const Page page = ref.page();
    if (in_->is_activations(arrived.page)) {
      const PageRef activations{ref.block, ref.layer, PageKind::kActivations};
      const PageId slot = activations.page().encoded;
      parts_.blocks->Apply(activations, PageEvent::kReceivedEncoded, {PageId(), slot, false, arrived.checksum});
      recomputing_.insert(arrived.page);
      recomputable_.push_back({arrived.page, received.layer, uint64_t{received.block} * cache_.page_tokens(),
                               PageData(cache_, slot), PageData(cache_, page.raw.valid() ? page.raw : page.encoded)});
      continue;
    }
    if (received.block == in_->full_blocks()) {
      parts_.blocks->Apply(ref, PageEvent::kReceivedOpen, {page.raw, page.encoded});
    } else {
      ShowFull(ref, arrived.checksum, &to_encode);
    }
    --in_->new_blocks[received.block].awaited;
  }
  parts_.encodes->Post(in_->cache, std::move(to_encode));
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
    const PageRef ref{in_->new_blocks[recomputed.block].block, recomputed.layer};
    ShowFull(ref, done.checksum, &to_encode);
    --in_->new_blocks[recomputed.block].awaited;
  }
  parts_.encodes->Post(in_->cache, std::move(to_encode));
  LetGoOf(pages);
  parts_.encodes->NotifyWaiters();
  return status;
}

void ImportLeaseImpl::LetGoOf(absl::Span<const ArrivedPage> pages) {
  for (const ArrivedPage& page : pages) {
    if (page.page >= in_->awaited.size()) break;
    ImportedSequence::NewBlock& block = in_->new_blocks[page_of(page.page).block];
    if (block.awaited == 0) in_->LetGo(block);
  }
}

absl::StatusOr<SequenceId> ImportLeaseImpl::Show() {
  if (parts_.alive.expired()) return absl::UnavailableError("the store has closed");
  if (in_->hidden == nullptr) return absl::FailedPreconditionError("this hand-off was shown before");
  if (broken_ || !can_show()) return absl::FailedPreconditionError("the trailer of this hand-off is still to come");
  KV_RETURN_IF_ERROR(parts_.sequences->CheckLimit(*in_->hidden->cache, in_->hidden->blocks.size()));
  in_->hidden->hit_blocks = static_cast<int>(in_->full_blocks());
  in_->hidden->arriving = true;
  parts_.sequences->Unhide(in_->hidden.get());
  parts_.indexes->Make(*in_->hidden, trailer_.index, header().tokens);
  parts_.indexes->AdvanceAll(*in_->hidden);
  sequence_ = parts_.sequences->Show(std::move(in_->hidden));
  return sequence_;
}

bool ImportLeaseImpl::CommitNext() {
  committing_ = absl::OkStatus();
  if (parts_.alive.expired()) {
    committing_ = absl::UnavailableError("the store has closed");
    return false;
  }
  if (sequence_ == 0 || committed_ || broken_ || !complete()) {
    committing_ =
        absl::FailedPreconditionError("a hand-off is committed once, when it was shown and every page is here");
    return false;
  }
  const auto found = parts_.sequences->Find(sequence_);
  if (!found.ok()) {  // dropped meanwhile
    committed_ = true;
    return false;
  }
  Sequence& sequence = **found;
  for (const size_t to = std::min<size_t>(in_->full_blocks(), named_ + kBlocksAtOnce); named_ < to; ++named_) {
    const HandOffBlock& named = header().blocks[named_].named ? header().blocks[named_] : trailer_.blocks[named_];
    Block* const block = sequence.blocks[named_];
    // A key that somebody else published meanwhile stays theirs; the next publish shares it.
    if (!named.named || block->published || cache_.table.FindKey(named.name.key) != nullptr) continue;
    parts_.blocks->Name(block, named.name, &sequence.run);
    parts_.metrics->published.Increment();
  }
  if (named_ < in_->full_blocks()) return true;
  committed_ = true;
  sequence.arriving = false;
  parts_.metrics->imports.Increment();
  return false;
}

void ImportLeaseImpl::Break(const absl::Status& why) {
  if (parts_.alive.expired() || committed_ || std::exchange(broken_, true) || sequence_ == 0) return;
  const absl::Status status = absl::UnavailableError(
      absl::StrCat("sequence ", sequence_, " did not arrive whole, its hand-off ended: ", why.message()));
  if (const auto found = parts_.sequences->Find(sequence_); found.ok()) {
    (*found)->arriving = false;
    (*found)->broken = status;
  }
  for (ImportedSequence::NewBlock& block : in_->new_blocks) {
    if (!block.held) continue;
    block.block->corrupt = true;
    block.block->never_arrives = true;
    block.block->cache->failed_arrivals[block.block] = status;
  }
  parts_.encodes->NotifyWaiters();
}

}  // namespace kvmanager
