#include "kvmanager/store/host_export.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::Status GpuHasFailed() { return absl::UnavailableError("the GPU has failed: it moves no pages any more"); }

class HostExportLease final : public ExportLease {
 public:
  explicit HostExportLease(std::shared_ptr<HostExport> copies) : copies_(std::move(copies)) {}
  ~HostExportLease() override { copies_->Close(); }

  const HandOffHeader& header() const override { return copies_->sent().header(); }
  uint64_t needed_bytes() const override { return copies_->sent().needed_bytes(); }
  absl::Status status() const override { return copies_->status(); }
  std::vector<ExportedPage> TakeReady(size_t pages_max) override { return copies_->TakeReady(pages_max); }
  void OnReady(absl::AnyInvocable<void()> fn) override { copies_->OnReady(std::move(fn)); }
  absl::Status Finish() override { return copies_->sent().Finish(); }
  bool finished() const override { return copies_->sent().finished(); }
  const HandOffTrailer* trailer() const override { return copies_->trailer(); }
  absl::Span<const ExportedPage> trailer_pages() const override { return copies_->trailer_pages(); }
  absl::Span<const ExportedOpenPage> open_pages() const override { return {}; }

 private:
  const std::shared_ptr<HostExport> copies_;  // shared: see there
};

}  // namespace

absl::StatusOr<std::shared_ptr<HostExport>> HostExport::Make(SequenceExports* exports,
                                                             const std::shared_ptr<Cache>& from) {
  if (from->tier->mover() == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(from->config.device),
                      "a GPU that moves pages");
  }
  KV_RETURN_IF_ERROR(from->tier->mover()->status());
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> to, exports->parts().caches->OpenCounterpart(*from, *from->tier->lower()));
  return std::make_shared<HostExport>(exports, from, std::move(to));
}

HostExport::HostExport(SequenceExports* exports, std::shared_ptr<Cache> from, std::shared_ptr<Cache> to)
    : exports_(exports), alive_(exports->parts().alive), from_(std::move(from)), to_(std::move(to)) {
  ++to_->leases;
}

HostExport::~HostExport() {
  sent_ = nullptr;
  if (alive_.expired()) return;
  exports_->Forget(this);
  ExportHolds holds;
  holds.cache = to_;
  holds.blocks = std::move(blocks_);
  exports_->GiveBack(std::move(holds));
}

void HostExport::Close() {
  *closed_ = true;
  fn_ = nullptr;
}

void HostExport::Take(std::unique_ptr<ExportedSequence> sent) {
  sent_ = std::move(sent);
  sent_->GoFrom(to_->config);
}

// ---- room ----

SlotCounts HostExport::CountAll() const {
  SlotCounts wanted;
  wanted.raw = size_t{to_->layers()} * (full_blocks() + (open_tokens() > 0));
  for (uint32_t layer = 0; layer < to_->layers(); ++layer) {
    const size_t encoded = sent_->encoded_pages(layer);
    to_->CountEncodedSlots(layer, encoded, &wanted);
    wanted.raw -= encoded;
  }
  return wanted;
}

absl::StatusOr<bool> HostExport::ReserveNext() {
  // What would not fit as a whole evicts nothing.
  if (!has_room_) {
    const SlotCounts all = CountAll();
    if (!to_->tier->CanReserve(*to_, all)) {
      if (parts().owner->GiveBackSome()) return true;
      if (!to_->tier->CanReserve(*to_, all)) return parts().owner->Exhausted(*to_, all);
    }
    has_room_ = true;
  }
  const uint32_t layers = to_->layers(), blocks = full_blocks() + (open_tokens() > 0);
  const uint32_t first = static_cast<uint32_t>(blocks_.size());
  const uint32_t end = std::min(blocks, first + std::max<uint32_t>(1, static_cast<uint32_t>(slots_at_once() / layers)));
  SlotCounts wanted;
  for (uint32_t i = first; i < end; ++i) {
    for (uint32_t layer = 0; layer < layers; ++layer) {
      goes_encoded(i, layer) ? to_->CountEncodedSlots(layer, 1, &wanted) : void(++wanted.raw);
    }
  }
  Reservation slots(to_->tier->pool());
  KV_RETURN_IF_ERROR(to_->tier->Reserve(*to_, wanted, &slots));
  for (uint32_t i = first; i < end; ++i) {
    blocks_.push_back(parts().blocks->New(to_, i));
    parts().blocks->NoteHolder(blocks_.back());
    for (uint32_t layer = 0; layer < layers; ++layer) {
      PageChange reserved;
      if (goes_encoded(i, layer)) {
        reserved.encoded = slots.TakeEncoded(*to_, layer);
      } else {
        reserved.raw = slots.TakeRaw();
      }
      parts().blocks->Apply({blocks_.back(), layer}, PageEvent::kReserve, reserved);
    }
  }
  return end < blocks;
}

std::unique_ptr<ExportLease> HostExport::Start(std::shared_ptr<HostExport> copies) {
  HostExport& self = *copies;
  self.sent_->OnReady([&self] { self.Go(); });  // the lease is this object's
  return std::make_unique<HostExportLease>(std::move(copies));
}

// ---- copies ----

void HostExport::Fail(absl::Status why) {
  if (status_.ok()) status_ = std::move(why);
}

void HostExport::OnReady(absl::AnyInvocable<void()> fn) {
  fn_ = std::move(fn);
  told_trailer_ = false;
  Tell();
}

void HostExport::Tell() {
  const bool news = !ready_.empty() || !status_.ok() || (settled() && !std::exchange(told_trailer_, true));
  if (fn_ != nullptr && news) fn_();
}

std::vector<ExportedPage> HostExport::TakeReady(size_t pages_max) {
  const auto end = ready_.begin() + static_cast<std::ptrdiff_t>(std::min(pages_max, ready_.size()));
  std::vector<ExportedPage> pages(ready_.begin(), end);
  ready_.erase(ready_.begin(), end);
  return pages;
}

void HostExport::Add(uint32_t number, const HandOffPage& page, const ExportedPage& from, bool raw, Copies* copies) {
  MovingPage moving;
  moving.to = {blocks_[page.block], page.layer};
  moving.source = from.bytes.data();
  moving.target = PageData(*to_, raw ? moving.to.page().raw : moving.to.page().encoded);
  moving.bytes = page.bytes;
  moving.raw = raw;
  moving.open_tokens = page.block == full_blocks() ? open_tokens() : 0;
  moving.checksum = from.checksum;
  copies->numbers.push_back(number);
  copies->pages.push_back(moving);
}

void HostExport::Go() {
  if (!later_ && CopySome()) {
    later_ = true;
    exports_->Later(this);
  }
  Tell();
}

bool HostExport::CopySome() {
  if (*closed_ || !status_.ok()) return false;
  Copies copies;
  const std::vector<ExportedPage> ready = sent_->TakeReady(SequenceExports::kPagesAtOnce);
  for (const ExportedPage& page : ready) {
    const HandOffPage& of = header().pages[page.page];
    Add(page.page, of, page, to_->keeps_raw(of.block, of.layer), &copies);
  }
  bool more = ready.size() == SequenceExports::kPagesAtOnce;
  if (!more && sent_->trailer() != nullptr && !took_trailer()) {
    const absl::StatusOr<bool> last = TakeTrailer(&copies);
    if (!last.ok()) Fail(last.status());
    more = last.ok() && *last;
  }
  if (!copies.pages.empty() && status_.ok()) Move(std::move(copies));
  return more;
}

// What the codec declined needs slots of another size.
absl::StatusOr<bool> HostExport::TakeTrailer(Copies* copies) {
  const HandOffTrailer& trailer = *sent_->trailer();
  if (withdrawn_taken_ < trailer.withdrawn.size()) {
    const size_t end = std::min(trailer.withdrawn.size(), withdrawn_taken_ + slots_at_once());
    Reservation slots(to_->tier->pool());
    KV_RETURN_IF_ERROR(to_->tier->Reserve(*to_, {.raw = end - withdrawn_taken_}, &slots));
    for (; withdrawn_taken_ < end; ++withdrawn_taken_) {
      const HandOffPage& page = header().pages[trailer.withdrawn[withdrawn_taken_]];
      const PageRef ref{blocks_[page.block], page.layer};
      parts().blocks->Apply(ref, PageEvent::kFree, {});
      parts().blocks->Apply(ref, PageEvent::kReserve, {slots.TakeRaw(), PageId()});
    }
    if (withdrawn_taken_ < trailer.withdrawn.size()) return true;
  }
  if (trailer_pages_.capacity() == 0) trailer_pages_.reserve(trailer.pages.size());
  for (size_t left = SequenceExports::kPagesAtOnce; trailer_pages_.size() < trailer.pages.size(); --left) {
    if (left == 0) return true;
    const size_t i = trailer_pages_.size();
    const ExportedPage& from = sent_->trailer_pages()[i];
    trailer_pages_.push_back({from.page, {}, 0});
    Add(from.page, trailer.pages[i], from, /*raw=*/true, copies);
  }
  return false;
}

void HostExport::Move(Copies copies) {
  if (from_->tier->mover() == nullptr) return Fail(GpuHasFailed());
  ++on_their_way_;
  parts().mover->Move(*from_->tier, to_, std::move(copies.pages), closed_,
                      [self = shared_from_this(), numbers = std::move(copies.numbers)](
                          bool moved, const std::vector<MovingPage>& pages) {
                        --self->on_their_way_;
                        if (!moved || *self->closed_) {
                          self->Fail(GpuHasFailed());
                        } else {
                          self->Land(numbers, pages);
                        }
                        self->Tell();
                      });
}

void HostExport::Land(absl::Span<const uint32_t> numbers, absl::Span<const MovingPage> pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    const MovingPage& moved = pages[i];
    if (moved.refused) {
      return Fail(absl::DataLossError(absl::StrCat("page ", moved.to.block->index, " of layer ", moved.to.layer,
                                                   " was not copied to the host: its bytes are none that a page may "
                                                   "have")));
    }
    const Page page = moved.to.page();
    if (moved.open_tokens > 0) {
      parts().blocks->Apply(moved.to, PageEvent::kReceivedOpen, {page.raw, page.encoded});
    } else {
      parts().blocks->Apply(moved.to, PageEvent::kReceivedCopy, {page.raw, page.encoded, moved.raw, moved.checksum});
    }
    const ExportedPage there{numbers[i], {moved.target, moved.bytes}, moved.checksum};
    if (numbers[i] < header().size()) {
      ready_.push_back(there);
    } else {
      trailer_pages_[numbers[i] - header().size()] = there;
    }
  }
}

}  // namespace kvmanager
