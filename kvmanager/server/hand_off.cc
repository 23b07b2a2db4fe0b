#include "kvmanager/server/hand_off.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/server/limits.h"
#include "kvmanager/server/manifest.h"

namespace kvmanager {

// A sequence being received. Targets are read on the transport's thread; the import itself belongs to the loop's, and
// is sent back there wherever this is destroyed.
class HandOffDesk::Incoming final : public IncomingHandOff {
 public:
  Incoming(MessageQueue* queue, std::shared_ptr<std::atomic<size_t>> receiving, std::unique_ptr<ImportLease> import,
           size_t pages, std::string peer, std::string blob, uint64_t tokens)
      : peer(std::move(peer)),
        blob(std::move(blob)),
        tokens(tokens),
        queue_(queue),
        receiving_(std::move(receiving)),
        import_(std::move(import)) {
    receiving_->fetch_add(1, std::memory_order_relaxed);
    targets_.reserve(pages);
    for (size_t i = 0; i < pages; ++i) targets_.push_back(import_->target(i));
  }
  ~Incoming() override {
    receiving_->fetch_sub(1, std::memory_order_relaxed);
    if (import_ != nullptr) queue_->Post([import = std::move(import_)]() mutable { import.reset(); });
  }
  absl::Span<uint8_t> target(size_t page) override { return targets_[page]; }

  std::unique_ptr<ImportLease> TakeImport() { return std::move(import_); }

  const std::string peer;
  std::string blob;
  const uint64_t tokens;

 private:
  MessageQueue* const queue_;
  const std::shared_ptr<std::atomic<size_t>> receiving_;
  std::unique_ptr<ImportLease> import_;
  std::vector<absl::Span<uint8_t>> targets_;
};

// What a peer offers, until it is answered. Shared by the messages and the work that carry it on, one after the other.
struct HandOffDesk::Offered {
  std::string peer;
  Manifest manifest;
  absl::StatusOr<std::shared_ptr<const Codec>> codec = std::shared_ptr<const Codec>();
  OfferReply reply;
};

void HandOffDesk::Offer(std::string peer, std::string manifest, std::vector<uint64_t> page_bytes,
                        std::vector<uint64_t> page_checksums, OfferReply reply) {
  daemon_->queue->Post([this, peer = std::move(peer), manifest = std::move(manifest),
                        page_bytes = std::move(page_bytes), page_checksums = std::move(page_checksums),
                        reply = std::move(reply)]() mutable {
    auto offered = std::make_shared<Offered>();
    offered->peer = std::move(peer);
    offered->reply = std::move(reply);
    if (absl::Status may = MayReceive(); !may.ok()) return Answer(*offered, std::move(may));
    absl::StatusOr<Manifest> parsed = ParseManifest(manifest, page_bytes, page_checksums);
    if (!parsed.ok()) return Answer(*offered, parsed.status());
    offered->manifest = *std::move(parsed);
    Consider(std::move(offered));
  });
}

// A codec may read a large artifact, and work on it: on a worker.
void HandOffDesk::Consider(std::shared_ptr<Offered> offered) {
  daemon_->workers->Post(WorkerPool::Priority::kEncode, [this, queue = daemon_->queue, registry = daemon_->registry,
                                                         offered = std::move(offered)]() mutable {
    offered->codec = PageStore::MakeCodec(*registry, offered->manifest.content.config);
    queue->Post([this, offered = std::move(offered)] { Answer(*offered, Accept(*offered)); });
  });
}

void HandOffDesk::Answer(Offered& offered, absl::StatusOr<std::unique_ptr<IncomingHandOff>> incoming) {
  if (!incoming.ok()) {
    daemon_->metrics->hand_offs_refused.Increment();
    spdlog::warn("hand-off from {} refused: {}", offered.peer, incoming.status().ToString());
  }
  offered.reply(std::move(incoming));
}

absl::Status HandOffDesk::MayReceive() const {
  if (daemon_->draining) return absl::UnavailableError("this daemon is draining: it receives no hand-offs");
  if (tickets_.size() >= limits::kTicketsMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "received sequences that wait to be claimed",
                      absl::StrCat(tickets_.size()), absl::StrCat("below ", limits::kTicketsMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<IncomingHandOff>> HandOffDesk::Accept(Offered& offered) {
  KV_RETURN_IF_ERROR(MayReceive());
  KV_RETURN_IF_ERROR(offered.codec.status());
  Manifest& manifest = offered.manifest;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<ImportLease> import,
                      daemon_->store->Import(manifest.content, *std::move(offered.codec)));
  return std::make_unique<Incoming>(daemon_->queue, receiving_, std::move(import), manifest.content.pages.size(),
                                    offered.peer, std::move(manifest.blob), manifest.content.tokens);
}

void HandOffDesk::Complete(std::unique_ptr<IncomingHandOff> hand_off, CompleteReply reply) {
  daemon_->queue->Post([this, hand_off = std::move(hand_off), reply = std::move(reply)]() mutable {
    Incoming& incoming = static_cast<Incoming&>(*hand_off);
    auto ticket = Keep(incoming);
    if (ticket.ok()) {
      daemon_->metrics->hand_offs_received.Increment();
      spdlog::info("hand-off from {}: {} tokens wait to be claimed", incoming.peer, incoming.tokens);
    } else {
      daemon_->metrics->hand_offs_refused.Increment();
      spdlog::warn("hand-off from {} refused after its pages came: {}", incoming.peer, ticket.status().ToString());
    }
    reply(std::move(ticket));
  });
}

absl::StatusOr<std::string> HandOffDesk::Keep(Incoming& incoming) {
  const std::unique_ptr<ImportLease> import = incoming.TakeImport();
  std::string ticket(kTicketBytes, '\0');
  KV_CHECK(getrandom(ticket.data(), ticket.size(), 0) == static_cast<ssize_t>(ticket.size()));
  auto waiting = std::make_unique<Waiting>();
  KV_ASSIGN_OR_RETURN(waiting->sequence, import->Commit());
  const absl::StatusOr<SequenceInfo> info = daemon_->store->DescribeSequence(waiting->sequence);
  KV_CHECK(info.ok());
  waiting->cache = info->cache;
  waiting->tokens = info->tokens;
  waiting->blob = std::move(incoming.blob);
  waiting->expiry = daemon_->loop->timer()
                        .afterDelay(daemon_->options->hand_off_lease_ms * kj::MILLISECONDS)
                        .then([this, ticket] { Expire(ticket); })
                        .eagerlyEvaluate(nullptr);
  tickets_.emplace(ticket, std::move(waiting));
  daemon_->metrics->tickets.Set(double(tickets_.size()));
  return ticket;
}

void HandOffDesk::Abort(std::unique_ptr<IncomingHandOff> hand_off, absl::Status why) {
  daemon_->queue->Post([this, hand_off = std::move(hand_off), why = std::move(why)]() mutable {
    Incoming& incoming = static_cast<Incoming&>(*hand_off);
    daemon_->metrics->hand_offs_aborted.Increment();
    spdlog::warn("hand-off from {} ended early, its pages were given back: {}", incoming.peer, why.ToString());
    incoming.TakeImport().reset();
  });
}

absl::StatusOr<SequenceId> HandOffDesk::Find(absl::string_view ticket, CacheId cache) const {
  const auto found = tickets_.find(ticket);
  if (found == tickets_.end()) {
    return FieldError(absl::StatusCode::kNotFound, "ticket", absl::StrCat(ticket.size(), " bytes, unknown"),
                      "one that a hand-off gave, not yet claimed and not expired");
  }
  const Waiting& waiting = *found->second;
  if (waiting.cache != cache && !daemon_->store->IsTwin(cache, waiting.sequence)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "ticket", absl::StrCat("of cache ", waiting.cache),
                      absl::StrCat("of cache ", cache, ", whose digest differs"));
  }
  return waiting.sequence;
}

absl::Status HandOffDesk::BeginClaim(absl::string_view ticket) {
  Waiting& waiting = *tickets_.at(ticket);
  if (std::exchange(waiting.being_claimed, true)) {
    return absl::FailedPreconditionError("this ticket is being claimed by another call");
  }
  return absl::OkStatus();
}

void HandOffDesk::EndClaim(absl::string_view ticket) {
  const auto found = tickets_.find(ticket);
  if (found != tickets_.end()) found->second->being_claimed = false;
}

absl::StatusOr<HandOffDesk::Claimed> HandOffDesk::Claim(absl::string_view ticket, CacheId cache) {
  KV_RETURN_IF_ERROR(Find(ticket, cache).status());
  const auto found = tickets_.find(ticket);
  Waiting& waiting = *found->second;
  Claimed claimed = {waiting.sequence, waiting.tokens, std::move(waiting.blob)};
  tickets_.erase(found);
  daemon_->metrics->tickets.Set(double(tickets_.size()));
  daemon_->metrics->hand_offs_claimed.Increment();
  return claimed;
}

void HandOffDesk::Expire(const std::string& ticket) {
  const auto found = tickets_.find(ticket);
  if (found == tickets_.end()) return;
  spdlog::warn("a received sequence of {} tokens was not claimed in {} ms and is given back", found->second->tokens,
               daemon_->options->hand_off_lease_ms);
  daemon_->store->Drop(found->second->sequence);
  found->second->expiry.detach([](kj::Exception&&) {});  // it runs now: it cannot be destroyed here
  tickets_.erase(found);
  daemon_->metrics->tickets.Set(double(tickets_.size()));
  daemon_->metrics->hand_offs_expired.Increment();
}

void HandOffDesk::DropAll() {
  if (!tickets_.empty()) spdlog::warn("{} received sequences were not claimed, and are lost", tickets_.size());
  for (auto& [ticket, waiting] : tickets_) daemon_->store->Drop(waiting->sequence);
  tickets_.clear();
  daemon_->metrics->tickets.Set(0);
}

namespace {

// One sequence being sent. Shared by the promise that waits and by the transport's completion, whichever lives longer;
// destroyed on the loop's thread.
class Sending final : public std::enable_shared_from_this<Sending> {
 public:
  Sending(DaemonContext& daemon, std::unique_ptr<ExportLease> lease, std::string peer, std::string blob,
          int64_t timeout_ms, kj::Own<kj::PromiseFulfiller<absl::StatusOr<SendResult>>> fulfiller)
      : daemon_(daemon),
        lease_(std::move(lease)),
        peer_(std::move(peer)),
        blob_(std::move(blob)),
        timeout_ms_(timeout_ms),
        fulfiller_(kj::mv(fulfiller)) {
    ++daemon_.sends_active;
  }
  ~Sending() { --daemon_.sends_active; }

  void Begin() {
    lease_->OnReady([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->Send();
    });
  }

  // Nobody waits any more.
  void Abandon() {
    abandoned_ = true;
    if (transfer_.has_value() && !finished_) daemon_.transport->Cancel(*transfer_);
  }

 private:
  void Send() {
    if (abandoned_) return;
    const HandOffContent& content = lease_->content();
    SendRequest request;
    request.peer = peer_;
    request.manifest = WriteManifest(content, blob_);
    if (request.manifest.size() > SendRequest::kManifestBytesMax || content.pages.size() > SendRequest::kPagesMax) {
      finished_ = true;
      fulfiller_->fulfill(
          InvalidField("sequence", absl::StrCat(content.pages.size(), " pages long"),
                       absl::StrCat("at most ", SendRequest::kPagesMax, " pages long to be handed off")));
      return;
    }
    request.pages.reserve(content.pages.size());
    for (size_t i = 0; i < content.pages.size(); ++i) {
      request.pages.push_back({lease_->bytes(i), content.pages[i].checksum});
    }
    request.timeout_ms = std::min(timeout_ms_, SendRequest::kStallMsDefault);
    transfer_ = daemon_.transport->Send(std::move(request), [queue = daemon_.queue, self = shared_from_this()](
                                                                absl::StatusOr<SendResult> result) mutable {
      queue->Post([self = std::move(self), result = std::move(result)]() mutable { self->Finish(std::move(result)); });
    });
  }

  void Finish(absl::StatusOr<SendResult> result) {
    finished_ = true;
    lease_.reset();
    if (result.ok()) {
      daemon_.metrics->hand_offs_sent.Increment();
      spdlog::info("hand-off to {}: {} pages, {} bytes, {} pages skipped, {:.3f} s", peer_, result->pages_sent,
                   result->bytes_sent, result->pages_skipped, result->seconds);
    } else {
      daemon_.metrics->hand_offs_send_failed.Increment();
      spdlog::warn("hand-off to {} failed: {}", peer_, result.status().ToString());
    }
    fulfiller_->fulfill(std::move(result));
  }

  DaemonContext& daemon_;
  std::unique_ptr<ExportLease> lease_;
  const std::string peer_;
  const std::string blob_;
  const int64_t timeout_ms_;
  kj::Own<kj::PromiseFulfiller<absl::StatusOr<SendResult>>> fulfiller_;
  absl::optional<uint64_t> transfer_;
  bool finished_ = false;
  bool abandoned_ = false;
};

struct AbandonOnDrop {
  explicit AbandonOnDrop(std::shared_ptr<Sending> s) : sending(std::move(s)) {}
  ~AbandonOnDrop() { sending->Abandon(); }
  std::shared_ptr<Sending> sending;
};

}  // namespace

kj::Promise<absl::StatusOr<SendResult>> SendSequence(DaemonContext& daemon, SequenceId sequence, std::string peer,
                                                     std::string blob, int64_t timeout_ms) {
  absl::StatusOr<std::unique_ptr<ExportLease>> lease = daemon.store->Export(sequence);
  if (!lease.ok()) return absl::StatusOr<SendResult>(lease.status());
  auto waiting = kj::newPromiseAndFulfiller<absl::StatusOr<SendResult>>();
  auto sending = std::make_shared<Sending>(daemon, *std::move(lease), std::move(peer), std::move(blob), timeout_ms,
                                           kj::mv(waiting.fulfiller));
  sending->Begin();
  auto deadline = daemon.loop->timer().afterDelay(timeout_ms * kj::MILLISECONDS).then([timeout_ms] {
    return absl::StatusOr<SendResult>(
        absl::DeadlineExceededError(absl::StrCat("the hand-off did not end within ", timeout_ms, " ms")));
  });
  return waiting.promise.exclusiveJoin(kj::mv(deadline)).attach(kj::heap<AbandonOnDrop>(std::move(sending)));
}

}  // namespace kvmanager
