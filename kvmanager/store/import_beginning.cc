#include "kvmanager/store/import_beginning.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/import_lease.h"
#include "kvmanager/store/memory_backend.h"

namespace kvmanager {

ImportBeginning::~ImportBeginning() {
  if (in_ != nullptr && !in_->parts.alive.expired()) LeaveFound();
}

LongCall::Next ImportBeginning::DoPiece() {
  if (status_.ok() && in_->parts.alive.expired()) status_ = absl::UnavailableError("the store has closed");
  if (!status_.ok()) return Next::kDone;
  switch (stage_) {
    case Stage::kHeader:
      if (!looked_ && first().size() + first().blocks.size() > kCountedOfPiece) {
        looked_ = true;
        return Next::kCompare;
      }
      while (check_.Next()) {
      }
      status_ = check_.status();
      if (status_.ok()) TakeHeader();
      break;
    case Stage::kFind:
      return FindSome();
    case Stage::kCountWhole:
    case Stage::kCountActivations:
      CountPagesSome();
      break;
    case Stage::kChoose:
      ChooseSome();
      break;
    case Stage::kCount:
      CountSlotsSome();
      break;
    case Stage::kRoom:
      MakeRoom();
      break;
    case Stage::kSlots:
      TakeSlotsSome();
      break;
    case Stage::kTargets:
      FindTargetsSome();
      break;
    case Stage::kDone:
      break;
  }
  return !status_.ok() || stage_ == Stage::kDone ? Next::kDone : Next::kPiece;
}

std::unique_ptr<ImportLease> ImportBeginning::Commit() {
  KV_CHECK(status_.ok() && stage_ == Stage::kDone && in_ != nullptr);
  return std::make_unique<ImportLeaseImpl>(std::move(in_));
}

void ImportBeginning::TakeHeader() {
  in_->forms = check_.TakeForms();
  in_->trailer_pages = check_.trailer_pages();
  std::fill(in_->hidden->tokens.begin(), in_->hidden->tokens.end(), first().tokens);
  in_->hidden->aged = first().aged;
  found_.assign(full_blocks(), nullptr);
  GoTo(Stage::kFind);
}

// ---- blocks that are here ----

LongCall::Next ImportBeginning::FindSome() {
  if (!SettleFound()) return Next::kCompare;
  piece_begin_ = at_;
  for (size_t pages = 0; at_ < full_blocks() && pages < kPagesOfPiece; ++at_) {
    const HandOffBlock& named = first().blocks[at_];
    if (!named.named) continue;
    pages += cache().layers();
    MissReason reason;
    Block* const block =
        in_->parts.blocks->Find(cache(), named.name, static_cast<uint32_t>(at_), BlockIndex::Bytes::kTrust, &reason);
    if (block == nullptr) continue;
    in_->parts.blocks->NoteHolder(block);
    found_[at_] = block;
    if (in_->parts.blocks->IsUnverified(*block)) comparison_.Add(block);
  }
  if (comparison_.bytes() > kVerifiedAtOnceBytes) return Next::kCompare;
  do {
    while (comparison_.CompareOne()) {
    }
  } while (!SettleFound());
  if (at_ < full_blocks()) return Next::kPiece;
  for (Block* const block : unfit_) in_->parts.blocks->ForgetHolder(block);
  in_->parts.sequences->LeaveBlocks(in_->cache, std::exchange(unfit_, {}));
  pages_of_layer_.assign(cache().layers(), 0);
  recomputed_of_layer_.assign(cache().layers(), 0);
  GoTo(keeps_activations() ? Stage::kCountWhole : Stage::kCount);
  return Next::kPiece;
}

bool ImportBeginning::SettleFound() {
  const bool intact = comparison_.Settle();
  bool behind = false;  // one that has changed: those were not looked at
  for (size_t i = piece_begin_; i < at_; ++i) {
    Block* const block = found_[i];
    if (block == nullptr) continue;
    if (block->corrupt) {
      behind = true;
      found_[i] = nullptr;
      in_->parts.blocks->ForgetHolder(block);
      in_->parts.blocks->Release(block);
    } else if (!intact && behind && in_->parts.blocks->IsUnverified(*block)) {
      comparison_.Add(block);
    }
  }
  if (comparison_.pages() > 0) return false;
  for (size_t i = piece_begin_; i < at_; ++i) {
    if (found_[i] != nullptr && !CanShare(*found_[i])) unfit_.push_back(std::exchange(found_[i], nullptr));
  }
  piece_begin_ = at_;
  return true;
}

// Whether the block that is here serves every read of the received sequence.
bool ImportBeginning::CanShare(const Block& block) const {
  for (uint32_t layer = 0; layer < cache().layers(); ++layer) {
    if (!in_->hidden->HoldsRaw(block.index, layer)) continue;
    if (RawPageData(cache(), block.pages[layer]) == nullptr) return false;
  }
  return true;
}

void ImportBeginning::LeaveFound() {
  std::vector<Block*> left = std::move(found_);
  left.insert(left.end(), unfit_.begin(), unfit_.end());
  std::erase(left, nullptr);
  for (Block* const block : left) in_->parts.blocks->ForgetHolder(block);
  in_->parts.sequences->LeaveBlocks(in_->cache, std::move(left));
}

// ---- which pages are recomputed ----

void ImportBeginning::CountPagesSome() {
  const bool whole = stage_ == Stage::kCountWhole;
  const std::vector<HandOffPage>& pages = whole ? first().pages : first().activations;
  std::vector<uint32_t>& counts = whole ? pages_of_layer_ : recomputed_of_layer_;
  for (const size_t to = std::min(pages.size(), at_ + kCountedOfPiece); at_ < to; ++at_) {
    counts[pages[at_].layer] += found_[pages[at_].block] == nullptr;
  }
  if (at_ < pages.size()) return;
  if (whole) return GoTo(Stage::kCountActivations);
  for (uint32_t layer = 0; layer < cache().layers(); ++layer) {
    uint32_t& with = recomputed_of_layer_[layer];
    if (with > 0) with = std::min(with, recompute_(layer, pages_of_layer_[layer], with));
  }
  GoTo(Stage::kChoose);
}

void ImportBeginning::ChooseSome() {
  const std::vector<HandOffPage>& pages = first().activations;
  for (const size_t to = std::min(pages.size(), at_ + kCountedOfPiece); at_ < to; ++at_) {
    const HandOffPage& page = pages[at_];
    if (found_[page.block] != nullptr || recomputed_of_layer_[page.layer] == 0) continue;
    --recomputed_of_layer_[page.layer];
    ArrivalForm& form = in_->form(page.block, page.layer);
    in_->trailer_pages -= form == ArrivalForm::kRaw;
    form = ArrivalForm::kRecomputed;
  }
  if (at_ == pages.size()) GoTo(Stage::kCount);
}

// ---- slots ----

// Of a block that is to come; behind the full ones, of the open one.
SlotCounts ImportBeginning::SlotsOf(uint32_t block) {
  SlotCounts counts;
  if (block == full_blocks()) {
    counts.raw = cache().layers();
    return counts;
  }
  for (uint32_t layer = 0; layer < cache().layers(); ++layer) {
    const ArrivalForm form = in_->form(block, layer);
    counts.raw += !cache().identity() && form != ArrivalForm::kEncoded;
    counts.activations += form == ArrivalForm::kRecomputed;
    if (!cache().keeps_raw(block, layer))
      cache().CountEncodedSlots(layer, 1, &counts);  // a raw page's is for its encoding
  }
  return counts;
}

void ImportBeginning::CountSlotsSome() {
  const uint32_t blocks = in_->pages_per_layer();
  for (size_t pages = 0; at_ < blocks && pages < kCountedOfPiece; ++at_) {
    ++pages;
    if (at_ < full_blocks() && found_[at_] != nullptr) continue;
    wanted_.Add(SlotsOf(static_cast<uint32_t>(at_)));
    pages += cache().layers();
  }
  if (at_ == blocks) GoTo(Stage::kRoom);
}

void ImportBeginning::MakeRoom() {
  const Tier& tier = *cache().tier;
  if (!wanted_.none() && !tier.CanReserve(cache(), wanted_)) {
    if (in_->parts.owner->GiveBackSome()) return;
    if (!tier.CanReserve(cache(), wanted_)) {
      status_ = in_->parts.owner->Exhausted(cache(), wanted_);
      return;
    }
  }
  in_->new_blocks.resize(in_->pages_per_layer());
  GoTo(Stage::kSlots);
}

void ImportBeginning::TakeSlotsSome() {
  const size_t blocks = in_->pages_per_layer(), from = at_;
  const uint64_t block_bytes = cache().layers() * (cache().raw_slot_bytes + cache().activation_slot_bytes);
  SlotCounts wanted;
  uint64_t pages = 0, bytes = 0;
  size_t to = from;
  for (; to < blocks && to < from + kPagesOfPiece && pages < kPagesOfPiece && bytes < kBytesOfPiece; ++to) {
    if (to < full_blocks() && found_[to] != nullptr) continue;
    wanted.Add(SlotsOf(static_cast<uint32_t>(to)));
    pages += cache().layers();
    bytes += block_bytes;
  }
  Reservation slots(cache().tier->pool());
  status_ = cache().tier->Reserve(cache(), wanted, &slots);
  if (!status_.ok()) return;
  for (; at_ < to; ++at_) {
    if (at_ == full_blocks() || found_[at_] == nullptr) {
      AddNewBlock(static_cast<uint32_t>(at_), &slots);
    } else {
      in_->parts.blocks->ForgetHolder(found_[at_]);
      in_->parts.sequences->Attach(*in_->hidden, std::exchange(found_[at_], nullptr));
    }
  }
  if (at_ < blocks) return;
  in_->awaited.reserve(first().size());
  in_->targets.reserve(first().size());
  GoTo(Stage::kTargets);
}

void ImportBeginning::AddNewBlock(uint32_t index, Reservation* slots) {
  BlockIndex& blocks = *in_->parts.blocks;
  const bool open = index == full_blocks();
  Block* const block = blocks.New(in_->cache, index);
  in_->new_blocks[index] = {block, cache().layers(), !open};
  for (uint32_t layer = 0; layer < cache().layers(); ++layer) {
    const ArrivalForm form = in_->form(index, layer);
    PageChange reserved;
    if (open || (!cache().identity() && form != ArrivalForm::kEncoded)) reserved.raw = slots->TakeRaw();
    if (!open && !cache().keeps_raw(index, layer)) reserved.encoded = slots->TakeEncoded(cache(), layer);
    blocks.Apply({block, layer}, PageEvent::kReserve, reserved);
    if (form != ArrivalForm::kRecomputed) continue;
    blocks.Apply({block, layer, PageKind::kActivations}, PageEvent::kReserve, {PageId(), slots->TakeActivations()});
  }
  in_->parts.sequences->Attach(*in_->hidden, block);
  if (open) return;
  blocks.Hold(block);
  blocks.NoteHolder(block);
}

// ---- where pages go ----

void ImportBeginning::FindTargetsSome() {
  for (const size_t to = std::min(first().size(), at_ + kPagesOfPiece * 8); at_ < to; ++at_) {
    const auto number = static_cast<uint32_t>(at_);
    const HandOffPage& page = first().page(number);
    const Block* const block = in_->new_blocks[page.block].block;
    const ArrivalForm form = in_->form(page.block, page.layer);
    const bool recomputed = form == ArrivalForm::kRecomputed;
    const bool wanted = block != nullptr && in_->is_activations(number) == recomputed && form != ArrivalForm::kRaw;
    in_->awaited.push_back(wanted);
    in_->awaited_first += wanted;
    in_->targets.emplace_back();
    if (!wanted) {
      in_->unwanted.push_back(number);
      continue;
    }
    const Page& into = recomputed ? block->activations[page.layer] : block->pages[page.layer];
    const PageId slot = form == ArrivalForm::kKeptRaw ? into.raw : into.encoded;
    in_->targets.back() = absl::Span<uint8_t>(PageData(cache(), slot), page.bytes);
  }
  if (at_ == first().size()) GoTo(Stage::kDone);
}

}  // namespace kvmanager
