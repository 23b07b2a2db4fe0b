// Sending a growing sequence of a GPU by way of the host: each page is copied into a slot there as soon as it is ready.
//
// What is exported out of the GPU's memory stays as it is (page_store_export.cc); this takes its pages, copies them,
// has workers look at the copies, as at all that leaves a GPU, and offers those. Room for all of them is taken before
// the hand-off is offered, so that prefill cannot run into a full host.
#include <algorithm>
#include <utility>

#include "kvmanager/base/checksum.h"
#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {
namespace {

constexpr size_t kPagesPerTask = 16;  // that a worker looks at

// The copies, and what they are made of. Shared by the lease and by moves on their way, which may end after it: slots
// of either memory stay until then.
class HostCopies final : public std::enable_shared_from_this<HostCopies> {
 public:
  HostCopies(PageStoreImpl* store, std::unique_ptr<ExportLease> lease, std::shared_ptr<Cache> from,
             std::shared_ptr<Cache> to)
      : store_(store), alive_(store->alive()), from_(std::move(from)), to_(std::move(to)), lease_(std::move(lease)) {
    ++to_->leases;
    first_ = lease_->first();
    first_.config = to_->config;
  }
  ~HostCopies() {
    lease_ = nullptr;
    if (alive_.expired()) return;
    for (; !blocks_.empty(); blocks_.pop_back()) {
      store_->hand_off_blocks.erase(blocks_.back());
      store_->Release(blocks_.back());
    }
    --to_->leases;
    if (!to_->wanted) store_->CloseIfUnused(to_);
  }

  absl::Status Start();
  /// Nobody wants them any more.
  void Close() {
    closed_ = true;
    fn_ = nullptr;
  }

  ExportLease& lease() { return *lease_; }
  const HandOffFirst& first() const { return first_; }
  const absl::Status& status() const { return status_; }
  std::vector<ExportedPage> TakeReady() { return std::exchange(ready_, {}); }
  const HandOffLast* last() const { return settled() ? lease_->last() : nullptr; }
  absl::Span<const ExportedPage> last_pages() const { return last_pages_; }
  void OnReady(absl::AnyInvocable<void()> fn) {
    fn_ = std::move(fn);
    told_last_ = false;
    Tell();
  }

 private:
  // A page on its way. Workers read and write its copy, `checksum` and `refused`; the rest is as it was made.
  struct Copy {
    uint32_t number = 0;
    PageRef to;
    uint8_t* bytes = nullptr;
    uint64_t size = 0;
    bool raw = false;       // travels so
    int open_tokens = 0;    // > 0: of an open page
    uint64_t checksum = 0;  // 0: not known yet
    bool refused = false;   // bytes that no page may have
  };
  using Copies = std::vector<Copy>;

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
  absl::Status TakeLast(Copies* copies, std::vector<PageCopy>* bytes);
  void Add(uint32_t number, const HandOffPage& page, const ExportedPage& from, bool raw, Copies* copies,
           std::vector<PageCopy>* bytes);
  void Move(Copies copies, std::vector<PageCopy> bytes);
  void CountMoving(absl::Span<const Copy> copies, int sign);
  void OnMoved(Copies copies, bool moved);
  void LookAt(Copy& copy) const;
  void Land(absl::Span<const Copy> copies);

  PageStoreImpl* const store_;
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<Cache> from_, to_;  // shared: see Block
  std::unique_ptr<ExportLease> lease_;
  HandOffFirst first_;
  std::vector<Block*> blocks_;  // of the copies, each with this as its holder
  std::vector<ExportedPage> ready_, last_pages_;
  size_t on_their_way_ = 0;  // moves
  bool took_last_ = false, told_last_ = false, closed_ = false;
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
  Reservation slots(to_->tier->pool);
  KV_RETURN_IF_ERROR(store_->Reserve(*to_, wanted, &slots));
  for (uint32_t i = 0; i < blocks; ++i) {
    blocks_.push_back(store_->NewBlock(to_, i));
    store_->hand_off_blocks.insert(blocks_.back());
    for (uint32_t layer = 0; layer < layers; ++layer) {
      PageChange reserved;
      if (encoded[size_t{layer} * blocks + i]) {
        reserved.encoded = slots.TakeEncoded(*to_, layer);
      } else {
        reserved.raw = slots.TakeRaw();
      }
      store_->Apply({blocks_.back(), layer}, PageEvent::kReserve, reserved);
    }
  }
  lease_->OnReady([this] { Go(); });  // the lease is this object's
  return absl::OkStatus();
}

void HostCopies::Add(uint32_t number, const HandOffPage& page, const ExportedPage& from, bool raw, Copies* copies,
                     std::vector<PageCopy>* bytes) {
  Copy copy;
  copy.number = number;
  copy.to = {blocks_[page.block], page.layer};
  copy.bytes = store_->Data(*to_, raw ? copy.to.page().raw : copy.to.page().encoded);
  copy.size = page.bytes;
  copy.raw = raw;
  copy.open_tokens = page.block == full_blocks() ? open_tokens() : 0;
  copy.checksum = from.checksum;
  bytes->push_back({const_cast<uint8_t*>(from.bytes.data()), copy.bytes, MovedBytes(page.bytes)});
  copies->push_back(copy);
}

void HostCopies::Go() {
  if (closed_ || !status_.ok()) return;
  Copies copies;
  std::vector<PageCopy> bytes;
  for (const ExportedPage& page : lease_->TakeReady()) {
    const HandOffPage& of = first_.pages[page.page];
    Add(page.page, of, page, to_->keeps_raw(of.block, of.layer), &copies, &bytes);
  }
  if (lease_->last() != nullptr && !std::exchange(took_last_, true)) {
    if (absl::Status status = TakeLast(&copies, &bytes); !status.ok()) Fail(std::move(status));
  }
  if (!copies.empty() && status_.ok()) Move(std::move(copies), std::move(bytes));
  Tell();
}

// What the codec declined needs slots of another size.
absl::Status HostCopies::TakeLast(Copies* copies, std::vector<PageCopy>* bytes) {
  const HandOffLast& last = *lease_->last();
  Reservation slots(to_->tier->pool);
  KV_RETURN_IF_ERROR(store_->Reserve(*to_, {.raw = last.withdrawn.size()}, &slots));
  for (const uint32_t number : last.withdrawn) {
    const PageRef ref{blocks_[first_.pages[number].block], first_.pages[number].layer};
    store_->Apply(ref, PageEvent::kFree, {});
    store_->Apply(ref, PageEvent::kReserve, {slots.TakeRaw(), PageId()});
  }
  for (size_t i = 0; i < last.pages.size(); ++i) {
    const ExportedPage& from = lease_->last_pages()[i];
    last_pages_.push_back({from.page, {}, 0});
    Add(from.page, last.pages[i], from, /*raw=*/true, copies, bytes);
  }
  return absl::OkStatus();
}

void HostCopies::Move(Copies copies, std::vector<PageCopy> bytes) {
  PageMover* const mover = from_->tier->mover;
  if (mover == nullptr) return Fail(absl::UnavailableError("the GPU has failed: it moves no pages any more"));
  ++on_their_way_;
  CountMoving(copies, +1);
  // Pages of one size go in one launch.
  std::stable_sort(bytes.begin(), bytes.end(), [](const PageCopy& a, const PageCopy& b) { return a.bytes < b.bytes; });
  mover->Move(PageDirection::kDemote, std::move(bytes),
              [self = shared_from_this(), copies = std::move(copies)](bool moved) mutable {
                if (!self->alive_.expired()) self->OnMoved(std::move(copies), moved);
              });
}

void HostCopies::CountMoving(absl::Span<const Copy> copies, int sign) {
  uint64_t bytes = 0;
  for (const Copy& copy : copies) bytes += copy.size;
  store_->metrics()->moving_bytes.Increment(sign * static_cast<double>(bytes));
}

void HostCopies::OnMoved(Copies copies, bool moved) {
  if (!moved) from_->tier->mover = nullptr;  // the GPU has failed: nothing moves any more
  if (!moved || closed_) {
    --on_their_way_;
    CountMoving(copies, -1);
    Fail(absl::UnavailableError("the GPU has failed: it moves no pages any more"));
    return Tell();
  }
  // Shared by the tasks, each of which has some of them.
  const auto shared = std::make_shared<Copies>(std::move(copies));
  std::vector<absl::AnyInvocable<void()>> tasks;
  for (size_t at = 0; at < shared->size(); at += kPagesPerTask) {
    tasks.push_back([self = shared_from_this(), shared, at] {
      for (size_t i = at; i < std::min(at + kPagesPerTask, shared->size()); ++i) self->LookAt((*shared)[i]);
    });
  }
  to_->tier->executor->Run(std::move(tasks), [self = shared_from_this(), shared] {
    if (!self->alive_.expired()) self->Land(*shared);
  });
}

// On a worker.
void HostCopies::LookAt(Copy& copy) const {
  // The rest of an open page is what the slot held before.
  if (copy.open_tokens > 0) ZeroRawTail(to_->layout(), copy.bytes, copy.open_tokens);
  if (copy.raw || to_->identity()) {
    NonFinite where;
    copy.refused = FindNonFinite(to_->layout(), copy.bytes, 0, to_->page_tokens(), &where);
  } else {
    copy.refused = !to_->codec->Validate(static_cast<int>(copy.to.layer), {copy.bytes, copy.size}).ok();
  }
  const uint64_t checksum = Checksum(copy.bytes, copy.size);
  copy.refused |= copy.checksum != 0 && copy.checksum != checksum;
  copy.checksum = checksum;
}

void HostCopies::Land(absl::Span<const Copy> copies) {
  --on_their_way_;
  CountMoving(copies, -1);
  for (const Copy& copy : copies) {
    if (copy.refused) {
      Fail(absl::DataLossError(absl::StrCat("page ", copy.to.block->index, " of layer ", copy.to.layer,
                                            " was not copied to the host: its bytes are none that a page may have")));
      break;
    }
    const Page& page = copy.to.page();
    if (copy.open_tokens > 0) {
      store_->Apply(copy.to, PageEvent::kReceivedOpen, {page.raw, page.encoded});
    } else {
      store_->Apply(copy.to, PageEvent::kReceivedCopy, {page.raw, page.encoded, copy.raw, copy.checksum});
    }
    const ExportedPage there{copy.number, {copy.bytes, copy.size}, copy.checksum};
    if (copy.number < first_.size()) {
      ready_.push_back(there);
    } else {
      last_pages_[copy.number - first_.size()] = there;
    }
  }
  Tell();
}

class HostExportLease final : public ExportLease {
 public:
  explicit HostExportLease(std::shared_ptr<HostCopies> copies) : copies_(std::move(copies)) {}
  ~HostExportLease() override { copies_->Close(); }

  const HandOffFirst& first() const override { return copies_->first(); }
  absl::Status status() const override { return copies_->status(); }
  std::vector<ExportedPage> TakeReady() override { return copies_->TakeReady(); }
  void OnReady(absl::AnyInvocable<void()> fn) override { copies_->OnReady(std::move(fn)); }
  absl::Status Finish() override { return copies_->lease().Finish(); }
  bool finished() const override { return copies_->lease().finished(); }
  const HandOffLast* last() const override { return copies_->last(); }
  absl::Span<const ExportedPage> last_pages() const override { return copies_->last_pages(); }
  absl::Span<const ExportedOpenPage> open_pages() const override { return {}; }

 private:
  const std::shared_ptr<HostCopies> copies_;  // shared: see there
};

}  // namespace

absl::StatusOr<std::unique_ptr<ExportLease>> PageStoreImpl::ExportByHost(std::unique_ptr<ExportLease> lease,
                                                                         const std::shared_ptr<Cache>& from) {
  if (from->tier->mover == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(from->config.device),
                      "a GPU that moves pages");
  }
  KV_RETURN_IF_ERROR(from->tier->mover->status());
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> to, TwinOn(*from, CacheConfig::kHost));
  auto copies = std::make_shared<HostCopies>(this, std::move(lease), from, std::move(to));
  KV_RETURN_IF_ERROR(copies->Start());
  return std::make_unique<HostExportLease>(std::move(copies));
}

}  // namespace kvmanager
