#include "kvmanager/store/append_in_pieces.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

AppendInPieces::AppendInPieces(StoreAppends* appends, std::shared_ptr<Cache> cache, int layer,
                               absl::Span<const AppendEntry> entries, size_t pages_at_once)
    : appends_(appends),
      alive_(appends->parts().alive),
      cache_(std::move(cache)),
      layer_(layer),
      entries_(entries.begin(), entries.end()),
      pages_at_once_(pages_at_once) {}

AppendInPieces::~AppendInPieces() {
  if (store_has_gone()) {
    for (Piece& piece : pieces_) piece.slots.Forget();
  } else {
    LetGo();
  }
}

absl::Status AppendInPieces::Begin() {
  KV_RETURN_IF_ERROR(appends_->Check(*cache_, layer_, entries_, &sequences_, &wanted_));
  const Reservation none(pool());
  // A memory that is not written at once refuses this.
  KV_RETURN_IF_ERROR(cache_->tier->memory().Plan({*cache_, layer_, entries_, sequences_, none, {}, 0}, nullptr));
  if (wanted_.raw > 0 && Fails(Failpoint::kAppendReserve)) {
    return absl::ResourceExhaustedError("failpoint append.reserve");
  }
  holds_ = true;
  ++cache_->leases;
  const uint32_t layer = static_cast<uint32_t>(layer_);
  for (size_t i = 0; i < entries_.size(); ++i) {
    sequences_[i]->appending = true;
    if (entries_[i].position % cache_->page_tokens() == 0) continue;
    Block* const block = sequences_[i]->blocks[entries_[i].position / cache_->page_tokens()];
    pins_.push_back({block, layer});
    if (entries_[i].x != nullptr && block->OpenActivations(layer).valid()) {
      pins_.push_back({block, layer, PageKind::kActivations});
    }
  }
  for (const PageRef& ref : pins_) appends_->parts().blocks->Pin(ref);
  return absl::OkStatus();
}

void AppendInPieces::LetGo() {
  if (!holds_) return;
  holds_ = false;
  for (const AppendEntry& entry : entries_) {
    const auto sequence = appends_->parts().sequences->Find(entry.sequence);
    if (sequence.ok()) (*sequence)->appending = false;
  }
  for (const PageRef& ref : pins_) appends_->parts().blocks->Unpin(ref);
  pins_.clear();
  --cache_->leases;
}

// ---- slots ----

bool AppendInPieces::MakeRoom() {
  if (cache_->tier->CanReserve(*cache_, wanted_)) {
    has_room_ = true;
    return false;
  }
  if (appends_->parts().owner->GiveBackSome()) return true;
  if (!cache_->tier->CanReserve(*cache_, wanted_)) status_ = appends_->parts().owner->Exhausted(*cache_, wanted_);
  has_room_ = true;
  return false;
}

SlotCounts AppendInPieces::CountPages(size_t* pages) const {
  const uint64_t page_tokens = cache_->page_tokens();
  SlotCounts wanted;
  size_t count = 0, sealed = 0;
  uint64_t first = reserved_.first;
  for (uint32_t i = reserved_.entry; i < entries_.size() && count < *pages; ++i, first = 0) {
    const AppendEntry& entry = entries_[i];
    const uint64_t end = entry.position + entry.tokens;
    for (uint64_t position = entry.position + first; position < end && count < *pages; ++count) {
      const bool opens = position % page_tokens == 0;
      position = std::min(end, (position / page_tokens + 1) * page_tokens);
      wanted.raw += opens;
      if (entry.x != nullptr) wanted.activations += opens;
      sealed += position % page_tokens == 0;
    }
  }
  if (!cache_->identity()) cache_->CountEncodedSlots(static_cast<uint32_t>(layer_), sealed, &wanted);
  *pages = count;
  return wanted;
}

absl::Status AppendInPieces::AddPiece() {
  size_t pages = pages_at_once_;
  const SlotCounts wanted = CountPages(&pages);
  Piece& piece = pieces_.emplace_back(pool());
  KV_RETURN_IF_ERROR(cache_->tier->Reserve(*cache_, wanted, &piece.slots));
  for (const PageId slot : piece.slots.unclean) piece.unclean.push_back({pool()->Data(slot), pool()->SlotBytes(slot)});
  piece.writes.reserve(pages);
  for (size_t i = reserved_.entry; i < std::min(entries_.size(), reserved_.entry + pages); ++i) {
    KV_ASSIGN_OR_RETURN(sequences_[i], appends_->parts().sequences->FindUsable(entries_[i].sequence));
  }
  KV_RETURN_IF_ERROR(cache_->tier->memory().Plan({*cache_, layer_, entries_, sequences_, piece.slots, reserved_, pages},
                                                 &piece.writes));
  piece.sums.resize(piece.writes.size());
  const PageWrite& last = piece.writes.back();
  reserved_ = {last.entry, last.first + last.tokens};
  if (reserved_.first == entries_[last.entry].tokens) reserved_ = {last.entry + 1, 0};
  return absl::OkStatus();
}

bool AppendInPieces::ReserveNext() {
  if (status_.ok() && store_has_gone()) status_ = absl::UnavailableError("the store has closed");
  if (!status_.ok() || reserved_.entry == entries_.size()) return false;
  if (!has_room_ && MakeRoom()) return true;
  if (status_.ok()) status_ = AddPiece();
  return status_.ok() && reserved_.entry < entries_.size();
}

// ---- bytes, on any thread ----

bool AppendInPieces::WriteNext() {
  for (size_t bytes = 0; bytes < kWrittenAtOnce && writing_ < pieces_.size() && status_.ok();) {
    Piece& piece = pieces_[writing_];
    if (piece.cleaned < piece.unclean.size()) {
      const absl::Span<uint8_t> slot = piece.unclean[piece.cleaned++];
      std::memset(slot.data(), 0, slot.size());
      bytes += slot.size();
    } else if (piece.written < piece.writes.size()) {
      WritePage(piece);
      bytes += cache_->layout(layer_).raw_bytes();
    } else {
      ++writing_;
    }
  }
  return writing_ < pieces_.size() && status_.ok();
}

void AppendInPieces::WritePage(Piece& piece) {
  const MemoryBackend& memory = cache_->tier->memory();
  const PageWrite& write = piece.writes[piece.written];
  status_ = memory.WritePage(*cache_, layer_, entries_[write.entry], write);
  if (status_.ok() && write.at + write.tokens == cache_->page_tokens()) {
    StoreAppends::PageSums& sums = piece.sums[piece.written];
    if (cache_->identity()) sums.raw = memory.Checksum(write.page, cache_->layout(layer_).raw_bytes());
    if (write.activations != nullptr) {
      sums.activations = memory.Checksum(write.activations, cache_->activation_page_bytes());
    }
  }
  ++piece.written;
}

// ---- tokens ----

absl::Status AppendInPieces::CheckUnchanged() const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    KV_ASSIGN_OR_RETURN(const Sequence* sequence, appends_->parts().sequences->FindUsable(entries_[i].sequence));
    KV_RETURN_IF_ERROR(StoreAppends::CheckPlace(*sequence, layer_, entries_, i));
  }
  return absl::OkStatus();
}

bool AppendInPieces::AgeSome() {
  for (size_t left = pages_at_once_; aged_ < entries_.size(); ++aged_) {
    const auto sequence = appends_->parts().sequences->Find(entries_[aged_].sequence);
    if (!sequence.ok()) continue;
    left -= appends_->parts().sequences->Age(**sequence, layer_, entries_[aged_].position, left);
    if (left == 0) return true;
  }
  return false;
}

void AppendInPieces::CommitPiece(Piece& piece) {
  for (const PageId slot : piece.slots.unclean) pool()->NoteCleaned(slot);
  const uint32_t first = committed_to_.entry;
  for (uint32_t i = first; i <= piece.writes.back().entry; ++i) {
    const auto sequence = appends_->parts().sequences->FindUsable(entries_[i].sequence);
    sequences_[i] = sequence.ok() ? *sequence : nullptr;
  }
  std::vector<PageRef> to_encode;
  appends_->CommitPages({cache_, static_cast<uint32_t>(layer_), entries_, sequences_, &piece.slots, piece.sums},
                        piece.writes.size(), &committed_to_, &to_encode);
  uint64_t tokens = 0;
  for (const PageWrite& write : piece.writes) tokens += write.tokens;
  appends_->parts().metrics->appended_tokens.Increment(static_cast<double>(tokens));
  appends_->parts().encodes->Post(cache_, std::move(to_encode));
  for (uint32_t i = first; i < committed_to_.entry; ++i) {
    if (sequences_[i] != nullptr) appends_->EndEntry(*sequences_[i], layer_);
  }
}

bool AppendInPieces::CommitNext() {
  if (status_.ok() && store_has_gone()) status_ = absl::UnavailableError("the store has closed");
  if (status_.ok() && !committing_) {
    KV_CHECK(reserved_.entry == entries_.size() && writing_ == pieces_.size());
    status_ = CheckUnchanged();
    committing_ = status_.ok();
  }
  if (!status_.ok() && !store_has_gone()) appends_->parts().metrics->refused_appends.Increment();
  if (!status_.ok() || committed_ == pieces_.size()) return false;
  if (AgeSome()) return true;
  CommitPiece(pieces_[committed_]);
  if (++committed_ < pieces_.size()) return true;
  LetGo();
  return false;
}

}  // namespace kvmanager
