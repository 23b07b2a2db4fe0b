#include "kvmanager/handoff/tickets.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {

std::string Tickets::Make(CacheId cache, uint64_t tokens) {
  std::string name(kTicketBytes, '\0');
  KV_CHECK(getrandom(name.data(), name.size(), 0) == static_cast<ssize_t>(name.size()));
  auto ticket = std::make_unique<Ticket>();
  ticket->cache = cache;
  ticket->tokens = tokens;
  tickets_.emplace(name, std::move(ticket));
  SetGauge();
  return name;
}

absl::Status Tickets::SetBlob(absl::string_view name, std::string blob) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) return absl::OkStatus();
  Ticket& ticket = *found->second;
  const uint64_t others = blob_bytes_ - ticket.blob_bytes.bytes;
  if (others + blob.size() > limits::kBlobBytesWaitingMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, "blob", absl::StrCat(blob.size(), " bytes"),
                      absl::StrCat("at most ", limits::kBlobBytesWaitingMax, " bytes with the ", others,
                                   " of other sequences that wait to be claimed; claim them, or send less"));
  }
  blob_bytes_ = others + blob.size();
  ticket.blob_bytes.sum = &blob_bytes_;
  ticket.blob_bytes.bytes = blob.size();
  ticket.blob = std::move(blob);
  return absl::OkStatus();
}

void Tickets::Show(absl::string_view name, SequenceId sequence) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) return store_.Drop(sequence);
  Ticket& ticket = *found->second;
  ticket.sequence = sequence;
  ticket.expiry = AfterLease([this, name = std::string(name)] { Expire(name); });
  for (auto& claim : std::exchange(ticket.claims, {})) claim->fulfill(absl::OkStatus());
}

void Tickets::Fail(absl::string_view name, const absl::Status& why) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) return;
  const std::unique_ptr<Ticket> ticket = std::move(found->second);
  tickets_.erase(found);
  SetGauge();
  if (ticket->sequence != 0) store_.Drop(ticket->sequence);
  const absl::Status status =
      absl::UnavailableError(absl::StrCat("the hand-off of this sequence ended early: ", why.message()));
  for (auto& claim : ticket->claims) claim->fulfill(absl::Status(status));
  if (failed_.size() >= kFailedMax) return;
  auto failed = std::make_unique<Failed>();
  failed->why = status;
  failed->expiry = AfterLease([this, name = std::string(name)] {
    const auto it = failed_.find(name);
    it->second->expiry.detach([](kj::Exception&&) {});  // it runs now
    failed_.erase(it);
  });
  failed_.emplace(name, std::move(failed));
}

void Tickets::DropAll() {
  if (!tickets_.empty()) spdlog::warn("{} received sequences were not claimed, and are lost", tickets_.size());
  for (auto& [name, ticket] : tickets_) {
    if (ticket->sequence != 0) store_.Drop(ticket->sequence);
  }
  tickets_.clear();
  failed_.clear();
  SetGauge();
}

absl::Status Tickets::CheckCache(const Ticket& ticket, CacheId cache) const {
  if (ticket.cache == cache) return absl::OkStatus();
  const auto theirs = store_.caches().Describe(ticket.cache), ours = store_.caches().Describe(cache);
  if (theirs.ok() && ours.ok() && theirs->digest == ours->digest) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "ticket", absl::StrCat("of cache ", ticket.cache),
                    absl::StrCat("of cache ", cache, ", whose digest differs"));
}

kj::Promise<absl::Status> Tickets::WhenShown(absl::string_view name, CacheId cache) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end() || found->second->sequence != 0) return Find(name, cache).status();
  Ticket& ticket = *found->second;
  if (absl::Status status = CheckCache(ticket, cache); !status.ok()) return status;
  auto waiting = kj::newPromiseAndFulfiller<absl::Status>();
  std::erase_if(ticket.claims, [](auto& each) { return !each->isWaiting(); });
  ticket.claims.push_back(kj::mv(waiting.fulfiller));
  return kj::mv(waiting.promise);
}

absl::StatusOr<SequenceId> Tickets::Find(absl::string_view name, CacheId cache) const {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) {
    if (const auto failed = failed_.find(name); failed != failed_.end()) return failed->second->why;
    return FieldError(absl::StatusCode::kNotFound, "ticket", absl::StrCat(name.size(), " bytes, unknown"),
                      "one that a hand-off gave, not yet claimed and not expired");
  }
  const Ticket& ticket = *found->second;
  KV_RETURN_IF_ERROR(CheckCache(ticket, cache));
  if (ticket.sequence == 0) return absl::FailedPreconditionError("the sequence of this ticket still arrives");
  return ticket.sequence;
}

absl::Status Tickets::BeginClaim(absl::string_view name) {
  Ticket& ticket = *tickets_.at(name);
  if (std::exchange(ticket.being_claimed, true)) {
    return absl::FailedPreconditionError("this ticket is being claimed by another call");
  }
  return absl::OkStatus();
}

void Tickets::EndClaim(absl::string_view name) {
  const auto found = tickets_.find(name);
  if (found != tickets_.end()) found->second->being_claimed = false;
}

absl::StatusOr<Tickets::Claimed> Tickets::Claim(absl::string_view name, CacheId cache) {
  KV_RETURN_IF_ERROR(Find(name, cache).status());
  const auto found = tickets_.find(name);
  Ticket& ticket = *found->second;
  Claimed claimed = {ticket.sequence, ticket.tokens, std::move(ticket.blob)};
  tickets_.erase(found);
  SetGauge();
  metrics_.claimed.Increment();
  return claimed;
}

kj::Promise<void> Tickets::AfterLease(absl::AnyInvocable<void()> fn) {
  return loop_->timer()
      .afterDelay(lease_ms_ * kj::MILLISECONDS)
      .then([fn = std::move(fn)]() mutable { fn(); })
      .eagerlyEvaluate(nullptr);
}

void Tickets::Expire(const std::string& name) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) return;
  spdlog::warn("a received sequence of {} tokens was not claimed in {} ms and is given back", found->second->tokens,
               lease_ms_);
  store_.Drop(found->second->sequence);
  found->second->expiry.detach([](kj::Exception&&) {});  // it runs now: it cannot be destroyed here
  tickets_.erase(found);
  SetGauge();
  metrics_.expired.Increment();
}

void Tickets::SetGauge() { metrics_.tickets.Set(double(tickets_.size())); }

}  // namespace kvmanager
