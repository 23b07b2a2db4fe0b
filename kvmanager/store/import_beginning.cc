#include "kvmanager/store/import_beginning.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/shown_slabs.h"
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
      if (!looked_ && header().size() + header().blocks.size() > kCountedOfPiece) {
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
  std::fill(in_->hidden->tokens.begin(), in_->hidden->tokens.end(), header().tokens);
  in_->hidden->aged = header().aged;
  found_.assign(full_blocks(), nullptr);
  GoTo(Stage::kFind);
}

// ---- blocks that are here ----

LongCall::Next ImportBeginning::FindSome() {
  if (!SettleFound()) return Next::kCompare;
  piece_begin_ = at_;
  const size_t to = std::min<size_t>(full_blocks(), at_ + kCountedOfPiece);
  for (size_t pages = 0; at_ < to && pages < kPagesOfPiece; ++at_) {
    const HandOffBlock& named = header().blocks[at_];
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
    if (RawPageData(cache(), block.pages()[layer]) == nullptr) return false;
  }
  return true;
}

void ImportBeginning::LeaveFound() {
  std::vector<Block*> left = std::move(found_);
  left.push_back(std::exchange(begun_, nullptr));
  left.insert(left.end(), unfit_.begin(), unfit_.end());
  std::erase(left, nullptr);
  for (Block* const block : left) in_->parts.blocks->ForgetHolder(block);
  in_->parts.sequences->LeaveBlocks(in_->cache, std::move(left));
}

// ---- which pages are recomputed ----

void ImportBeginning::CountPagesSome() {
  const bool whole = stage_ == Stage::kCountWhole;
  const std::vector<HandOffPage>& pages = whole ? header().pages : header().activations;
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
  const std::vector<HandOffPage>& pages = header().activations;
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

// Of a page that is to come.
SlotCounts ImportBeginning::SlotsOf(uint32_t block, uint32_t layer) const {
  SlotCounts counts;
  if (block == full_blocks()) {
    counts.raw = 1;
    return counts;
  }
  const ArrivalForm form = in_->form(block, layer);
  counts.raw = !cache().identity() && form != ArrivalForm::kEncoded;
  counts.activations = form == ArrivalForm::kRecomputed;
  if (!cache().keeps_raw(block, layer))
    cache().CountEncodedSlots(layer, 1, &counts);  // a raw page's is for its encoding
  return counts;
}

void ImportBeginning::CountSlotsSome() {
  const uint32_t blocks = in_->pages_per_layer();
  for (size_t pages = 0; at_ < blocks && pages < kCountedOfPiece; ++at_, ++pages) {
    if (is_here(at_)) continue;
    for (uint32_t layer = 0; layer < cache().layers(); ++layer) wanted_.Add(SlotsOf(static_cast<uint32_t>(at_), layer));
    pages += cache().layers();
  }
  if (at_ == blocks) GoTo(Stage::kRoom);
}

void ImportBeginning::MakeRoom() {
  const Tier& tier = *cache().tier;
  if (!wanted_.none() && !tier.CanReserve(cache(), wanted_)) {
    if (in_->parts.owner->GiveBackSome() || TakeBackSlab(tier.pool())) return;
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
  const uint64_t page_bytes = cache().raw_slot_bytes + cache().activation_slot_bytes;
  SlotCounts wanted;
  size_t to = from, pages = 0;
  uint32_t to_layer = layer_;
  while (to < blocks && to < from + kCountedOfPiece && pages < kPagesOfPiece && pages * page_bytes < kBytesOfPiece) {
    if (is_here(to)) {
      ++to;
      continue;
    }
    wanted.Add(SlotsOf(static_cast<uint32_t>(to), to_layer));
    ++pages;
    if (++to_layer < cache().layers()) continue;
    to_layer = 0;
    ++to;
  }
  Reservation slots(cache().tier->pool());
  status_ = cache().tier->Reserve(cache(), wanted, &slots);
  if (!status_.ok()) return;
  while (at_ < to || layer_ < to_layer) {
    if (is_here(at_)) {
      in_->parts.blocks->ForgetHolder(found_[at_]);
      in_->parts.sequences->Attach(*in_->hidden, std::exchange(found_[at_], nullptr));
      ++at_;
      continue;
    }
    if (begun_ == nullptr) {
      begun_ = in_->parts.blocks->New(in_->cache, static_cast<uint32_t>(at_));
      in_->parts.blocks->NoteHolder(begun_);
    }
    TakeSlotsOf(layer_, &slots);
    if (++layer_ < cache().layers()) continue;
    AddBegun();
    layer_ = 0;
    ++at_;
  }
  if (at_ < blocks) return;
  in_->awaited.reserve(header().size());
  in_->targets.reserve(header().size());
  GoTo(Stage::kTargets);
}

void ImportBeginning::TakeSlotsOf(uint32_t layer, Reservation* slots) {
  const uint32_t index = begun_->index;
  const bool open = index == full_blocks();
  const ArrivalForm form = in_->form(index, layer);
  PageChange reserved;
  if (open || (!cache().identity() && form != ArrivalForm::kEncoded)) reserved.raw = slots->TakeRaw();
  if (!open && !cache().keeps_raw(index, layer)) reserved.encoded = slots->TakeEncoded(cache(), layer);
  in_->parts.blocks->Apply({begun_, layer}, PageEvent::kReserve, reserved);
  if (form != ArrivalForm::kRecomputed) return;
  in_->parts.blocks->Apply({begun_, layer, PageKind::kActivations}, PageEvent::kReserve,
                           {PageId(), slots->TakeActivations()});
}

void ImportBeginning::AddBegun() {
  Block* const block = std::exchange(begun_, nullptr);
  const bool open = block->index == full_blocks();
  in_->new_blocks[block->index] = {block, cache().layers(), !open};
  if (open) {
    in_->parts.blocks->ForgetHolder(block);  // the sequence's alone
  } else {
    in_->parts.blocks->Hold(block);
  }
  in_->parts.sequences->Attach(*in_->hidden, block);
}

// ---- where pages go ----

void ImportBeginning::FindTargetsSome() {
  for (const size_t to = std::min(header().size(), at_ + kPagesOfPiece * 8); at_ < to; ++at_) {
    const auto number = static_cast<uint32_t>(at_);
    const HandOffPage& page = header().page(number);
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
    const Page into = recomputed ? block->activations()[page.layer] : block->pages()[page.layer];
    const PageId slot = form == ArrivalForm::kKeptRaw ? into.raw : into.encoded;
    in_->targets.back() = absl::Span<uint8_t>(PageData(cache(), slot), page.bytes);
  }
  if (at_ == header().size()) GoTo(Stage::kDone);
}

}  // namespace kvmanager
