#include "kvmanager/handoff/outgoing_hand_off.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/handoff/limits.h"
#include "kvmanager/handoff/manifest.h"

namespace kvmanager {
namespace {

HandOffPart MakePart(std::string manifest, absl::Span<const HandOffPage> pages) {
  HandOffPart part;
  part.manifest = std::move(manifest);
  for (const HandOffPage& page : pages) part.page_bytes.push_back(page.bytes);
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

OutgoingHandOff::OutgoingHandOff(const Parts& parts, std::unique_ptr<ExportLease> lease, Target target)
    : parts_(parts), lease_(std::move(lease)), target_(std::move(target)) {
  parts_.active->of_payers.Add(target_.payer);
  parts_.active->to_peers.Add(std::pair(target_.payer, target_.peer));
}

OutgoingHandOff::~OutgoingHandOff() {
  parts_.active->of_payers.Remove(target_.payer);
  parts_.active->to_peers.Remove(std::pair(target_.payer, target_.peer));
}

absl::Status OutgoingHandOff::CheckRoom(const Parts& parts, const std::string& payer, const std::string& peer) {
  const uint64_t own = parts.active->of_payers.Of(payer);
  if (own >= limits::kTenantOutgoingMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("hand-offs being sent", kOfTenant),
                      absl::StrCat(own), absl::StrCat("below ", limits::kTenantOutgoingMax));
  }
  const uint64_t there = peer.empty() ? 0 : parts.active->to_peers.Of(std::pair(payer, peer));
  if (there >= limits::kTenantToPeerMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("hand-offs being sent to ", peer, kOfTenant),
                      absl::StrCat(there), absl::StrCat("below ", limits::kTenantToPeerMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<OutgoingHandOff>> OutgoingHandOff::Begin(const Parts& parts,
                                                                        std::unique_ptr<ExportLease> lease,
                                                                        Target target) {
  KV_RETURN_IF_ERROR(CheckRoom(parts, target.payer, target.peer));
  auto made = std::make_shared<OutgoingHandOff>(parts, std::move(lease), std::move(target));
  KV_RETURN_IF_ERROR(made->FindGpu());
  KV_RETURN_IF_ERROR(made->Offer());
  return made;
}

absl::Status OutgoingHandOff::FindGpu() {
  const HandOffHeader& first = lease_->first();
  if (first.config.device == CacheConfig::kHost) return absl::OkStatus();
  gpu_ = kvmanager::FindGpu(parts_.gpus, first.config.device);
  if (gpu_ == nullptr) return NoGpuPages(absl::UnavailableError("a GPU that sends nothing itself"));
  // What a GPU reads of another goes at the link's rate.
  if (!parts_.shares_gpu_memory) {
    return NoGpuPages(absl::UnavailableError("a daemon whose memory no other may read, or whose rate is limited"));
  }
  for (const HandOffPage& page : first.pages) {
    if (page.bytes >= kPageHashBytesMin) continue;
    return NoGpuPages(InvalidField("page bytes", page.bytes, absl::StrCat("at least ", kPageHashBytesMin)));
  }
  return absl::OkStatus();
}

absl::Status OutgoingHandOff::Offer() {
  const HandOffHeader& first = lease_->first();
  const uint64_t page_tokens = first.config.layout.page_tokens;
  const uint64_t pages = (first.tokens + page_tokens - 1) / page_tokens * first.config.layers + first.size();
  SendRequest request;
  request.peer = target_.peer;
  request.first = MakePart(WriteFirstManifest(first), first.pages);
  for (const HandOffPage& page : first.activations) request.first.page_bytes.push_back(page.bytes);
  if (gpu_ != nullptr) request.first.gpu = gpu_->device()->info().uuid;
  request.stall_ms = std::min(target_.timeout_ms, SendRequest::kStallMsDefault);
  request.room_ms = target_.room_ms;
  if (request.first.manifest.size() > HandOffPart::kManifestBytesMax || pages > HandOffPart::kPagesMax) {
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
  const HandOffHeader& first = lease_->first();
  return page < first.size() ? first.page(page).layer : lease_->last()->pages[page - first.size()].layer;
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
  const PageLayout& layout = lease_->first().config.layout;
  const auto token_bytes = static_cast<uint32_t>(layout.head_dim * sizeof(uint16_t));
  work.shape.rows = 2 * static_cast<uint32_t>(layout.kv_heads);
  work.shape.row_bytes = static_cast<uint32_t>(layout.page_tokens) * token_bytes;
  work.shape.kept_bytes = static_cast<uint32_t>(lease_->first().tokens % layout.page_tokens) * token_bytes;
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
  if (ended_.has_value() || cancelled_) return;
  if (absl::Status status = lease_->status(); !status.ok()) return Fail(std::move(status));
  Post(lease_->TakeReady());
  const HandOffTrailer* const last = lease_->last();
  if (cancelled_ || last == nullptr || blob_ == nullptr || std::exchange(said_last_, true)) return;
  HandOffPart part = MakePart(WriteLastManifest(*last, *blob_), last->pages);
  part.withdrawn = last->withdrawn;
  parts_.transport->Finish(*transfer_, std::move(part));
  Post(lease_->last_pages(), lease_->open_pages());
}

void OutgoingHandOff::OnAccepted(std::string ticket) {
  ticket_ = std::move(ticket);
  if (accepted_.get() != nullptr) accepted_->fulfill(absl::StatusOr<std::string>(ticket_));
}

void OutgoingHandOff::OnDone(absl::StatusOr<SendResult> result) {
  if (!result.ok() && !failed_.ok()) result = failed_;
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
