#include "kvmanager/server/hand_off_send.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kvmanager/base/status.h"
#include "kvmanager/server/manifest.h"

namespace kvmanager {
namespace {

HandOffPart MakePart(std::string manifest, absl::Span<const HandOffPage> pages) {
  HandOffPart part;
  part.manifest = std::move(manifest);
  part.page_bytes.reserve(pages.size());
  for (const HandOffPage& page : pages) part.page_bytes.push_back(page.bytes);
  return part;
}

}  // namespace

OutgoingHandOff::OutgoingHandOff(DaemonContext& daemon, std::unique_ptr<ExportLease> lease, Target target)
    : daemon_(daemon), lease_(std::move(lease)), target_(std::move(target)) {
  ++daemon_.sends_active;
}

OutgoingHandOff::~OutgoingHandOff() { --daemon_.sends_active; }

absl::StatusOr<std::shared_ptr<OutgoingHandOff>> OutgoingHandOff::Begin(DaemonContext& daemon,
                                                                        std::unique_ptr<ExportLease> lease,
                                                                        Target target) {
  auto made = std::make_shared<OutgoingHandOff>(daemon, std::move(lease), std::move(target));
  KV_RETURN_IF_ERROR(made->Offer());
  return made;
}

absl::Status OutgoingHandOff::Offer() {
  const HandOffFirst& first = lease_->first();
  const uint64_t page_tokens = first.config.layout.page_tokens;
  const uint64_t pages = (first.tokens + page_tokens - 1) / page_tokens * first.config.layers + first.pages.size();
  SendRequest request;
  request.peer = target_.peer;
  request.first = MakePart(WriteFirstManifest(first), first.pages);
  request.stall_ms = std::min(target_.timeout_ms, SendRequest::kStallMsDefault);
  request.room_ms = target_.room_ms;
  if (request.first.manifest.size() > HandOffPart::kManifestBytesMax || pages > HandOffPart::kPagesMax) {
    return InvalidField("sequence",
                        absl::StrCat(pages, " pages long, counting those twice that may travel in either form"),
                        absl::StrCat("at most ", HandOffPart::kPagesMax, " to be handed off"));
  }
  SendEvents events;
  MessageQueue* const queue = daemon_.queue;
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
  transfer_ = daemon_.transport->Begin(std::move(request), std::move(events));
  lease_->OnReady([this] { Pump(); });  // the lease is this object's
  return absl::OkStatus();
}

std::vector<SendPage> OutgoingHandOff::PagesOf(absl::Span<const ExportedPage> pages) const {
  const std::vector<HandOffPage>& first = lease_->first().pages;
  std::vector<SendPage> out;
  out.reserve(pages.size());
  for (const ExportedPage& page : pages) {
    const uint32_t layer =
        page.page < first.size() ? first[page.page].layer : lease_->last()->pages[page.page - first.size()].layer;
    out.push_back({page.page, page.bytes, page.checksum, layer});
  }
  return out;
}

void OutgoingHandOff::Pump() {
  if (ended_.has_value()) return;
  const std::vector<ExportedPage> ready = lease_->TakeReady();
  if (!ready.empty()) daemon_.transport->Post(*transfer_, PagesOf(ready));
  const HandOffLast* const last = lease_->last();
  if (last == nullptr || !blob_.has_value() || std::exchange(said_last_, true)) return;
  HandOffPart part = MakePart(WriteLastManifest(*last, *blob_), last->pages);
  part.withdrawn = last->withdrawn;
  daemon_.transport->Finish(*transfer_, std::move(part));
  if (!last->pages.empty()) daemon_.transport->Post(*transfer_, PagesOf(lease_->last_pages()));
}

void OutgoingHandOff::OnAccepted(std::string ticket) {
  ticket_ = std::move(ticket);
  if (accepted_.get() != nullptr) accepted_->fulfill(absl::StatusOr<std::string>(ticket_));
}

void OutgoingHandOff::OnDone(absl::StatusOr<SendResult> result) {
  lease_.reset();
  ended_ = result.status();
  if (result.ok()) {
    daemon_.metrics->hand_offs_sent.Increment();
    spdlog::info("hand-off to {}: {} pages, {} bytes, {} pages skipped, {} bytes sent again, {:.3f} s", target_.peer,
                 result->pages_sent, result->bytes_sent, result->pages_skipped, result->bytes_resent, result->seconds);
  } else {
    daemon_.metrics->hand_offs_send_failed.Increment();
    spdlog::warn("hand-off to {} failed: {}", target_.peer, result.status().ToString());
  }
  if (accepted_.get() != nullptr && !result.ok()) accepted_->fulfill(absl::StatusOr<std::string>(result.status()));
  if (finished_.get() == nullptr) return;
  if (!result.ok()) return finished_->fulfill(absl::StatusOr<SentHandOff>(result.status()));
  finished_->fulfill(
      absl::StatusOr<SentHandOff>(SentHandOff{ticket_, target_.peer, *std::move(result), begun_unix_ns_}));
}

template <typename T>
kj::Promise<absl::StatusOr<T>> OutgoingHandOff::WithDeadline(kj::Promise<absl::StatusOr<T>> promise, int64_t ms) {
  auto deadline = daemon_.loop->timer().afterDelay(ms * kj::MILLISECONDS).then([self = shared_from_this(), ms] {
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

kj::Promise<absl::StatusOr<SentHandOff>> OutgoingHandOff::Finish(std::string blob, int64_t room_ms) {
  using Result = absl::StatusOr<SentHandOff>;
  if (ended_.has_value() && !ended_->ok()) return Result(*ended_);
  if (blob_.has_value()) return Result(absl::FailedPreconditionError("this hand-off was finished before"));
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
  if (transfer_.has_value() && !ended_.has_value()) daemon_.transport->Cancel(*transfer_);
}

kj::Promise<absl::StatusOr<SentHandOff>> SendSequence(DaemonContext& daemon, SequenceId sequence,
                                                      OutgoingHandOff::Target target, std::string blob) {
  using Result = absl::StatusOr<SentHandOff>;
  auto lease = daemon.store->ExportWhole(sequence, target.goes_on);
  if (!lease.ok()) return Result(lease.status());
  const int64_t room_ms = target.room_ms;
  auto begun = OutgoingHandOff::Begin(daemon, *std::move(lease), std::move(target));
  if (!begun.ok()) return Result(begun.status());
  auto hand_off = kj::heap<CancelOnDrop>(*std::move(begun));
  auto sent = (*hand_off)->Finish(std::move(blob), room_ms);
  return sent.attach(kj::mv(hand_off));
}

}  // namespace kvmanager
