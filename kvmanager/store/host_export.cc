#include "kvmanager/store/host_export.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::Status GpuHasFailed() { return absl::UnavailableError("the GPU has failed: it moves no pages any more"); }

// The copies, and what they are made of. Shared by the lease and by moves on their way, which may end after it: slots
// of either memory stay until then.
class HostCopies final : public std::enable_shared_from_this<HostCopies> {
 public:
  HostCopies(const SequenceExports::Parts& parts, std::unique_ptr<ExportLease> lease, std::shared_ptr<Cache> from,
             std::shared_ptr<Cache> to)
      : parts_(parts), from_(std::move(from)), to_(std::move(to)), lease_(std::move(lease)) {
    ++to_->leases;
    first_ = lease_->first();
    first_.config = to_->config;
  }
  ~HostCopies() {
    lease_ = nullptr;
    if (parts_.alive.expired()) return;
    for (; !blocks_.empty(); blocks_.pop_back()) {
      parts_.blocks->ForgetHolder(blocks_.back());
      parts_.blocks->Release(blocks_.back());
    }
    --to_->leases;
    if (!to_->wanted) parts_.caches->CloseIfUnused(to_);
  }

  absl::Status Start();
  /// Nobody wants them any more.
  void Close() {
    *closed_ = true;
    fn_ = nullptr;
  }

  ExportLease& lease() { return *lease_; }
  const HandOffHeader& first() const { return first_; }
  const absl::Status& status() const { return status_; }
  std::vector<ExportedPage> TakeReady() { return std::exchange(ready_, {}); }
  const HandOffTrailer* last() const { return settled() ? lease_->last() : nullptr; }
  absl::Span<const ExportedPage> last_pages() const { return last_pages_; }
  void OnReady(absl::AnyInvocable<void()> fn) {
    fn_ = std::move(fn);
    told_last_ = false;
    Tell();
  }

 private:
  // A page on its way, and its number in the hand-off.
  struct Copies {
    std::vector<uint32_t> numbers;
    std::vector<MovingPage> pages;
  };

  uint32_t full_blocks() const { return static_cast<uint32_t>(first_.blocks.size()); }
  int open_tokens() const { return static_cast<int>(first_.tokens % to_->page_tokens()); }
  bool settled() const { return took_last_ && on_their_way_ == 0 && status_.ok(); }
  void Tell() {
    const bool news = !ready_.empty() || !status_.ok() || (settled() && !std::exchange(told_last_, true));
    if (fn_ != nullptr && news) fn_();
  }
  void Fail(absl::Status why) {
    if (status_.ok()) status_ = std::move(why);
  }
  // Copies what has become ready.
  void Go();
  absl::Status TakeLast(Copies* copies);
  void Add(uint32_t number, const HandOffPage& page, const ExportedPage& from, bool raw, Copies* copies);
  void Move(Copies copies);
  void Land(absl::Span<const uint32_t> numbers, absl::Span<const MovingPage> pages);

  const SequenceExports::Parts parts_;
  const std::shared_ptr<Cache> from_, to_;  // shared: see Block
  std::unique_ptr<ExportLease> lease_;
  HandOffHeader first_;
  std::vector<Block*> blocks_;  // of the copies, each with this as its holder
  std::vector<ExportedPage> ready_, last_pages_;
  size_t on_their_way_ = 0;  // moves
  bool took_last_ = false, told_last_ = false;
  const std::shared_ptr<bool> closed_ = std::make_shared<bool>(false);  // shared with moves on their way
  absl::Status status_;
  absl::AnyInvocable<void()> fn_;
};

absl::Status HostCopies::Start() {
  const uint32_t layers = to_->layers(), blocks = full_blocks() + (open_tokens() > 0);
  std::vector<bool> encoded(size_t{layers} * blocks);
  SlotCounts wanted;
  for (const HandOffPage& page : first_.pages) {
    if (to_->keeps_raw(page.block, page.layer)) continue;
    encoded[size_t{page.layer} * blocks + page.block] = true;
    to_->CountEncodedSlots(page.layer, 1, &wanted);
  }
  wanted.raw = static_cast<size_t>(std::count(encoded.begin(), encoded.end(), false));
  Reservation slots(to_->tier->pool());
  KV_RETURN_IF_ERROR(to_->tier->Reserve(*to_, wanted, &slots));
  for (uint32_t i = 0; i < blocks; ++i) {
    blocks_.push_back(parts_.blocks->New(to_, i));
    parts_.blocks->NoteHolder(blocks_.back());
    for (uint32_t layer = 0; layer < layers; ++layer) {
      PageChange reserved;
      if (encoded[size_t{layer} * blocks + i]) {
        reserved.encoded = slots.TakeEncoded(*to_, layer);
      } else {
        reserved.raw = slots.TakeRaw();
      }
      parts_.blocks->Apply({blocks_.back(), layer}, PageEvent::kReserve, reserved);
    }
  }
  lease_->OnReady([this] { Go(); });  // the lease is this object's
  return absl::OkStatus();
}

void HostCopies::Add(uint32_t number, const HandOffPage& page, const ExportedPage& from, bool raw, Copies* copies) {
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

void HostCopies::Go() {
  if (*closed_ || !status_.ok()) return;
  Copies copies;
  for (const ExportedPage& page : lease_->TakeReady()) {
    const HandOffPage& of = first_.pages[page.page];
    Add(page.page, of, page, to_->keeps_raw(of.block, of.layer), &copies);
  }
  if (lease_->last() != nullptr && !std::exchange(took_last_, true)) {
    if (absl::Status status = TakeLast(&copies); !status.ok()) Fail(std::move(status));
  }
  if (!copies.pages.empty() && status_.ok()) Move(std::move(copies));
  Tell();
}

// What the codec declined needs slots of another size.
absl::Status HostCopies::TakeLast(Copies* copies) {
  const HandOffTrailer& last = *lease_->last();
  Reservation slots(to_->tier->pool());
  KV_RETURN_IF_ERROR(to_->tier->Reserve(*to_, {.raw = last.withdrawn.size()}, &slots));
  for (const uint32_t number : last.withdrawn) {
    const PageRef ref{blocks_[first_.pages[number].block], first_.pages[number].layer};
    parts_.blocks->Apply(ref, PageEvent::kFree, {});
    parts_.blocks->Apply(ref, PageEvent::kReserve, {slots.TakeRaw(), PageId()});
  }
  for (size_t i = 0; i < last.pages.size(); ++i) {
    const ExportedPage& from = lease_->last_pages()[i];
    last_pages_.push_back({from.page, {}, 0});
    Add(from.page, last.pages[i], from, /*raw=*/true, copies);
  }
  return absl::OkStatus();
}

void HostCopies::Move(Copies copies) {
  if (from_->tier->mover() == nullptr) return Fail(GpuHasFailed());
  ++on_their_way_;
  parts_.mover->Move(*from_->tier, to_, std::move(copies.pages), closed_,
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

void HostCopies::Land(absl::Span<const uint32_t> numbers, absl::Span<const MovingPage> pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    const MovingPage& moved = pages[i];
    if (moved.refused) {
      return Fail(absl::DataLossError(absl::StrCat("page ", moved.to.block->index, " of layer ", moved.to.layer,
                                                   " was not copied to the host: its bytes are none that a page may "
                                                   "have")));
    }
    const Page& page = moved.to.page();
    if (moved.open_tokens > 0) {
      parts_.blocks->Apply(moved.to, PageEvent::kReceivedOpen, {page.raw, page.encoded});
    } else {
      parts_.blocks->Apply(moved.to, PageEvent::kReceivedCopy, {page.raw, page.encoded, moved.raw, moved.checksum});
    }
    const ExportedPage there{numbers[i], {moved.target, moved.bytes}, moved.checksum};
    if (numbers[i] < first_.size()) {
      ready_.push_back(there);
    } else {
      last_pages_[numbers[i] - first_.size()] = there;
    }
  }
}

class HostExportLease final : public ExportLease {
 public:
  explicit HostExportLease(std::shared_ptr<HostCopies> copies) : copies_(std::move(copies)) {}
  ~HostExportLease() override { copies_->Close(); }

  const HandOffHeader& first() const override { return copies_->first(); }
  absl::Status status() const override { return copies_->status(); }
  std::vector<ExportedPage> TakeReady() override { return copies_->TakeReady(); }
  void OnReady(absl::AnyInvocable<void()> fn) override { copies_->OnReady(std::move(fn)); }
  absl::Status Finish() override { return copies_->lease().Finish(); }
  bool finished() const override { return copies_->lease().finished(); }
  const HandOffTrailer* last() const override { return copies_->last(); }
  absl::Span<const ExportedPage> last_pages() const override { return copies_->last_pages(); }
  absl::Span<const ExportedOpenPage> open_pages() const override { return {}; }

 private:
  const std::shared_ptr<HostCopies> copies_;  // shared: see there
};

}  // namespace

absl::StatusOr<std::unique_ptr<ExportLease>> MakeHostExport(const SequenceExports::Parts& parts,
                                                            std::unique_ptr<ExportLease> lease,
                                                            const std::shared_ptr<Cache>& from) {
  if (from->tier->mover() == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(from->config.device),
                      "a GPU that moves pages");
  }
  KV_RETURN_IF_ERROR(from->tier->mover()->status());
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> to, parts.caches->OpenCounterpart(*from, *from->tier->lower()));
  auto copies = std::make_shared<HostCopies>(parts, std::move(lease), from, std::move(to));
  KV_RETURN_IF_ERROR(copies->Start());
  return std::make_unique<HostExportLease>(std::move(copies));
}

}  // namespace kvmanager
