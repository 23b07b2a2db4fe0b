#include "kvmanager/handoff/outgoing_hand_off.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/handoff/manifest.h"

namespace kvmanager {
namespace {

void AddSizes(absl::Span<const HandOffPage> pages, HandOffPart* part) {
  for (const HandOffPage& page : pages) part->page_bytes.push_back(page.bytes);
}

HandOffPart MakeHeader(const HandOffHeader& header) {
  HandOffPart part;
  part.manifest = WriteHandOffHeader(header);
  AddSizes(header.pages, &part);
  AddSizes(header.activations, &part);
  return part;
}

HandOffPart MakeTrailer(const HandOffTrailer& trailer, absl::string_view blob) {
  HandOffPart part;
  part.manifest = WriteHandOffTrailer(trailer, blob);
  AddSizes(trailer.pages, &part);
  part.withdrawn = trailer.withdrawn;
  return part;
}

static_assert(kHandOffPagesMax == HandOffPart::kPagesMax);

absl::Status NoGpuPages(const absl::Status& why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "gpu", std::string(why.message()), "pages that it can send");
}

}  // namespace

bool WantsKeptRawInTrailer(const absl::Status& status) {
  const std::string field = DetailOf(status).field;
  return absl::IsInvalidArgument(status) && absl::StartsWith(field, "pages[") && absl::EndsWith(field, "].bytes");
}

OutgoingHandOff::OutgoingHandOff(const Parts& parts, std::unique_ptr<ExportLease> lease, Target target, SendPlace place)
    : parts_(parts), lease_(std::move(lease)), target_(std::move(target)), place_(std::move(place)) {}

OutgoingHandOff::~OutgoingHandOff() = default;

kj::Promise<absl::StatusOr<kj::Own<CancelOnDrop>>> OutgoingHandOff::Begin(const Parts& parts,
                                                                          std::unique_ptr<ExportLease> lease,
                                                                          Target target, SendPlace place) {
  using Begun = absl::StatusOr<kj::Own<CancelOnDrop>>;
  auto made = std::make_shared<OutgoingHandOff>(parts, std::move(lease), std::move(target), std::move(place));
  if (absl::Status found = made->FindGpu(); !found.ok()) return Begun(std::move(found));
  const HandOffHeader* const header = &made->lease_->header();
  return made->Make(header->blocks.size() + header->size(), [header] { return MakeHeader(*header); })
      .then([made](HandOffPart part) -> Begun {
        KV_RETURN_IF_ERROR(made->Offer(std::move(part)));
        return kj::heap<CancelOnDrop>(made);
      });
}

kj::Promise<HandOffPart> OutgoingHandOff::Make(size_t pages, absl::AnyInvocable<HandOffPart()> make) {
  if (parts_.workers == nullptr || pages <= kPagesAtOnce) return make();
  // The lease comes back with what was made: it is destroyed on the loop's thread.
  struct Made {
    std::shared_ptr<ExportLease> lease;
    HandOffPart part;
  };
  const WorkerPool::Owner owner = WorkerPool::OwnerOf(target_.payer);
  WorkerPool* const workers = pages <= kPagesOfWorkers ? parts_.workers : parts_.background;
  return OnWorker<Made>(workers, &parts_.loop->queue(), owner,
                        [lease = lease_, make = std::move(make)]() mutable {
                          Made made;
                          made.part = make();
                          made.lease = std::move(lease);
                          return made;
                        })
      .then([](Made made) { return std::move(made.part); });
}

absl::Status OutgoingHandOff::FindGpu() {
  const HandOffHeader& header = lease_->header();
  if (header.config.device == CacheConfig::kHost) return absl::OkStatus();
  gpu_ = kvmanager::FindGpu(parts_.gpus, header.config.device);
  if (gpu_ == nullptr) return NoGpuPages(absl::UnavailableError("a GPU that sends nothing itself"));
  // What a GPU reads of another goes at the link's rate.
  if (!parts_.shares_gpu_memory) {
    return NoGpuPages(absl::UnavailableError("a daemon whose memory no other may read, or whose rate is limited"));
  }
  return absl::OkStatus();
}

absl::Status OutgoingHandOff::Offer(HandOffPart part) {
  const HandOffHeader& header = lease_->header();
  const uint64_t page_tokens = header.config.layout.page_tokens;
  const uint64_t pages = (header.tokens + page_tokens - 1) / page_tokens * header.config.layers + header.size();
  SendRequest request;
  request.peer = target_.peer;
  request.header = std::move(part);
  if (gpu_ != nullptr) {
    for (const PageSizes::Run& run : request.header.page_bytes.runs()) {
      if (run.bytes >= kPageHashBytesMin) continue;
      return NoGpuPages(InvalidField("page bytes", run.bytes, absl::StrCat("at least ", kPageHashBytesMin)));
    }
    request.header.gpu = gpu_->device()->info().uuid;
  }
  request.stall_ms = std::min(target_.timeout_ms, SendRequest::kStallMsDefault);
  request.room_ms = target_.room_ms;
  if (request.header.manifest.size() > HandOffPart::kManifestBytesMax || pages > HandOffPart::kPagesMax) {
    return InvalidField("sequence",
                        absl::StrCat(pages, " pages long, counting those twice that may travel in either form"),
                        absl::StrCat("at most ", HandOffPart::kPagesMax, " to be handed off"));
  }
  SendEvents events;
  MessageQueue* const queue = &parts_.loop->queue();
  events.accepted = [queue, weak = weak_from_this()](std::string ticket) {
    queue->Post([weak, ticket = std::move(ticket)]() mutable {
      if (const auto self = weak.lock()) self->OnAccepted(std::move(ticket));
    });
  };
  events.waiting = [queue, weak = weak_from_this()](absl::Status why) {
    queue->Post([weak, why = std::move(why)] {
      if (const auto self = weak.lock()) self->waits_because_ = std::string(why.message());
    });
  };
  events.done = [queue, self = shared_from_this()](absl::StatusOr<SendResult> result) mutable {
    queue->Post([self = std::move(self), result = std::move(result)]() mutable { self->OnDone(std::move(result)); });
  };
  begun_unix_ns_ = absl::ToUnixNanos(absl::Now());
  transfer_ = parts_.transport->Begin(std::move(request), std::move(events));
  lease_->OnReady([this] { Pump(); });  // the lease is this object's
  return absl::OkStatus();
}

uint32_t OutgoingHandOff::LayerOf(uint32_t page) const {
  const HandOffHeader& header = lease_->header();
  return page < header.size() ? header.page(page).layer : lease_->trailer()->pages[page - header.size()].layer;
}

void OutgoingHandOff::Post(absl::Span<const ExportedPage> pages, absl::Span<const ExportedOpenPage> open) {
  if (pages.empty()) return;
  if (gpu_ != nullptr) return PostFromGpu(pages, open);
  std::vector<SendPage> out;
  out.reserve(pages.size());
  for (const ExportedPage& page : pages) out.push_back({page.page, page.bytes, page.checksum, LayerOf(page.page)});
  parts_.transport->Post(*transfer_, std::move(out));
}

// A checksum that is known is what the page had when it was made: it is sent as it is, so that the receiver notices
// what changed since.
void OutgoingHandOff::PostFromGpu(absl::Span<const ExportedPage> pages, absl::Span<const ExportedOpenPage> open) {
  std::vector<SendPage> out;
  out.reserve(pages.size());
  DeviceSends::Work work;
  const DeviceSlab* slab = nullptr;  // most pages lie where the one before does
  for (const ExportedPage& page : pages) {
    if (slab == nullptr || page.bytes.data() < slab->data || page.bytes.data() >= slab->data + slab->bytes) {
      const auto found = gpu_->sends()->SlabOf(page.bytes.data());
      if (!found.ok()) return Fail(NoGpuPages(found.status()));
      slab = found->get();
      if (std::find(slabs_.begin(), slabs_.end(), *found) == slabs_.end()) slabs_.push_back(*found);
    }
    out.push_back({page.page, page.bytes, page.checksum, LayerOf(page.page), slab});
    work.pages.push_back({page.bytes.data(), static_cast<uint32_t>(page.bytes.size())});
  }
  const PageLayout& layout = lease_->header().config.layout;
  const auto token_bytes = static_cast<uint32_t>(layout.head_dim * sizeof(uint16_t));
  work.shape.rows = 2 * static_cast<uint32_t>(layout.kv_heads);
  work.shape.row_bytes = static_cast<uint32_t>(layout.page_tokens) * token_bytes;
  work.shape.kept_bytes = static_cast<uint32_t>(lease_->header().tokens % layout.page_tokens) * token_bytes;
  for (const ExportedOpenPage& page : open) work.open.push_back({page.from, page.to});
  gpu_->sends()->Prepare(std::move(work), [self = shared_from_this(), lease = lease_, out = std::move(out)](
                                              absl::StatusOr<std::vector<uint64_t>> checksums) mutable {
    if (self->ended_.has_value()) return;
    if (!checksums.ok()) return self->Fail(NoGpuPages(checksums.status()));
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i].checksum == 0) out[i].checksum = (*checksums)[i];
    }
    self->parts_.transport->Post(*self->transfer_, std::move(out));
  });
}

void OutgoingHandOff::Fail(absl::Status why) {
  failed_ = std::move(why);
  Cancel();
}

void OutgoingHandOff::Pump() {
  if (ended_.has_value() || cancelled_ || pumping_) return;
  if (absl::Status status = lease_->status(); !status.ok()) return Fail(std::move(status));
  const std::vector<ExportedPage> ready = lease_->TakeReady(kPagesAtOnce);
  Post(ready);
  if (ready.size() == kPagesAtOnce) return PumpLater();
  if (cancelled_ || lease_->trailer() == nullptr || blob_ == nullptr) return;
  if (!std::exchange(makes_last_, true)) SayLast();
  if (said_last_) PostLast();
}

void OutgoingHandOff::PumpLater() {
  pumping_ = true;
  parts_.turns->Post(target_.payer, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    self->pumping_ = false;
    self->Pump();
  });
}

void OutgoingHandOff::SayLast() {
  const auto say = [this](HandOffPart trailer) {
    if (ended_.has_value() || cancelled_) return;
    said_last_ = true;
    parts_.transport->Finish(*transfer_, std::move(trailer));
  };
  const HandOffTrailer* const trailer = lease_->trailer();
  const size_t pages = trailer->blocks.size() + trailer->pages.size() + trailer->withdrawn.size();
  const auto make = [trailer, blob = blob_] { return MakeTrailer(*trailer, *blob); };
  if (parts_.workers == nullptr || pages <= kPagesAtOnce) return say(make());
  making_last_ = Make(pages, make)
                     .then([this, say](HandOffPart trailer) {
                       say(std::move(trailer));
                       Pump();
                     })
                     .eagerlyEvaluate(nullptr);
}

void OutgoingHandOff::PostLast() {
  const absl::Span<const ExportedPage> pages = lease_->trailer_pages();
  const bool first = posted_last_ == 0;
  const absl::Span<const ExportedPage> piece = pages.subspan(posted_last_, kPagesAtOnce);
  posted_last_ += piece.size();
  Post(piece, first ? lease_->open_pages() : absl::Span<const ExportedOpenPage>());
  if (posted_last_ < pages.size()) PumpLater();
}

void OutgoingHandOff::OnAccepted(std::string ticket) {
  ticket_ = std::move(ticket);
  if (accepted_.get() != nullptr) accepted_->fulfill(absl::StatusOr<std::string>(ticket_));
}

void OutgoingHandOff::OnDone(absl::StatusOr<SendResult> result) {
  if (!result.ok() && !failed_.ok()) result = failed_;
  lease_->OnReady(nullptr);  // a worker may still have it
  lease_.reset();
  slabs_.clear();
  ended_ = result.status();
  if (result.ok()) {
    parts_.metrics->sent.Increment();
    spdlog::info("hand-off to {}: {} pages, {} bytes, {} pages skipped, {} bytes sent again, {:.3f} s", target_.peer,
                 result->pages_sent, result->bytes_sent, result->pages_skipped, result->bytes_resent, result->seconds);
  } else {
    // What is sent again, by way of the host or with kept raw pages in the trailer, has not failed.
    const bool again = WantsHostPages(result.status()) || WantsKeptRawInTrailer(result.status());
    if (!again) parts_.metrics->send_failed.Increment();
    spdlog::log(again ? spdlog::level::info : spdlog::level::warn, "hand-off to {} failed: {}", target_.peer,
                result.status().ToString());
  }
  if (accepted_.get() != nullptr && !result.ok()) accepted_->fulfill(absl::StatusOr<std::string>(result.status()));
  if (finished_.get() == nullptr) return;
  if (!result.ok()) return finished_->fulfill(absl::StatusOr<SentHandOff>(result.status()));
  finished_->fulfill(
      absl::StatusOr<SentHandOff>(SentHandOff{ticket_, target_.peer, *std::move(result), begun_unix_ns_}));
}

template <typename T>
kj::Promise<absl::StatusOr<T>> OutgoingHandOff::WithDeadline(kj::Promise<absl::StatusOr<T>> promise, int64_t ms) {
  auto deadline = parts_.loop->timer().afterDelay(ms * kj::MILLISECONDS).then([self = shared_from_this(), ms] {
    const std::string because =
        self->ticket_.empty() && !self->waits_because_.empty() ? absl::StrCat(": ", self->waits_because_) : "";
    return absl::StatusOr<T>(
        absl::DeadlineExceededError(absl::StrCat("the hand-off did not get there within ", ms, " ms", because)));
  });
  return promise.exclusiveJoin(kj::mv(deadline));
}

kj::Promise<absl::StatusOr<std::string>> OutgoingHandOff::Accepted() {
  if (ended_.has_value() && !ended_->ok()) return absl::StatusOr<std::string>(*ended_);
  if (!ticket_.empty()) return absl::StatusOr<std::string>(ticket_);
  auto waiting = kj::newPromiseAndFulfiller<absl::StatusOr<std::string>>();
  accepted_ = kj::mv(waiting.fulfiller);
  return WithDeadline(kj::mv(waiting.promise), target_.timeout_ms + target_.room_ms);
}

kj::Promise<absl::StatusOr<SentHandOff>> OutgoingHandOff::Finish(SharedBlob blob, int64_t room_ms) {
  using Result = absl::StatusOr<SentHandOff>;
  if (ended_.has_value() && !ended_->ok()) return Result(*ended_);
  if (blob_ != nullptr) return Result(absl::FailedPreconditionError("this hand-off was finished before"));
  // One-shot hand-offs begin with a lease that is finished.
  if (!lease_->finished()) {
    if (absl::Status status = lease_->Finish(); !status.ok()) return Result(std::move(status));
  }
  blob_ = std::move(blob);
  auto waiting = kj::newPromiseAndFulfiller<Result>();
  finished_ = kj::mv(waiting.fulfiller);
  Pump();
  return WithDeadline(kj::mv(waiting.promise), target_.timeout_ms + room_ms);
}

void OutgoingHandOff::Cancel() {
  cancelled_ = true;
  if (transfer_.has_value() && !ended_.has_value()) parts_.transport->Cancel(*transfer_);
}

}  // namespace kvmanager
