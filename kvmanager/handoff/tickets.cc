#include "kvmanager/handoff/tickets.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {

absl::Status Tickets::CheckRoom(absl::string_view payer) const {
  const char* const kWhat = "received sequences that wait to be claimed";
  const uint64_t own = of_payers_.Of(payer);
  if (own >= limits::kTenantTicketsMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat(kWhat, kOfTenant), absl::StrCat(own),
                      absl::StrCat("below ", limits::kTenantTicketsMax));
  }
  if (tickets_.size() >= limits::kTicketsMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, kWhat, absl::StrCat(tickets_.size()),
                      absl::StrCat("below ", limits::kTicketsMax));
  }
  return absl::OkStatus();
}

std::string Tickets::Make(CacheId cache, absl::string_view payer, uint64_t tokens) {
  std::string name(kTicketBytes, '\0');
  KV_CHECK(getrandom(name.data(), name.size(), 0) == static_cast<ssize_t>(name.size()));
  auto ticket = std::make_unique<Ticket>();
  ticket->cache = cache;
  ticket->payer = std::string(payer);
  ticket->tokens = tokens;
  tickets_.emplace(name, std::move(ticket));
  of_payers_.Add(payer);
  SetGauge();
  return name;
}

absl::Status Tickets::SetBlob(absl::string_view name, std::string blob) {
  const auto found = tickets_.find(name);
  if (found == tickets_.end()) return absl::OkStatus();
  Ticket& ticket = *found->second;
  const struct {
    const char* whose;
    uint64_t others, max;
  } bounds[] = {{"of this tenant", blob_bytes_.Of(ticket.payer) - ticket.blob.size(), limits::kTenantBlobBytesMax},
                {"of all tenants", blob_bytes_.all() - ticket.blob.size(), limits::kBlobBytesWaitingMax}};
  for (const auto& [whose, others, max] : bounds) {
    if (others + blob.size() <= max) continue;
    return FieldError(absl::StatusCode::kResourceExhausted, "blob", absl::StrCat(blob.size(), " bytes"),
                      absl::StrCat("at most ", max, " bytes with the ", others, " of other sequences ", whose,
                                   " that wait to be claimed; claim them, or send less"));
  }
  blob_bytes_.Remove(ticket.payer, ticket.blob.size());
  ticket.blob = std::move(blob);
  blob_bytes_.Add(ticket.payer, ticket.blob.size());
  return absl::OkStatus();
}

std::unique_ptr<Tickets::Ticket> Tickets::Take(const std::string& name) {
  auto ticket = std::move(tickets_.extract(name).mapped());
  of_payers_.Remove(ticket->payer);
  blob_bytes_.Remove(ticket->payer, ticket->blob.size());
  SetGauge();
  return ticket;
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
  const std::unique_ptr<Ticket> ticket = Take(found->first);
  if (ticket->sequence != 0) store_.Drop(ticket->sequence);
  const absl::Status status =
      absl::UnavailableError(absl::StrCat("the hand-off of this sequence ended early: ", why.message()));
  for (auto& claim : ticket->claims) claim->fulfill(absl::Status(status));
  if (failed_.size() >= kFailedMax || failed_of_.Of(ticket->payer) >= kFailedMax / 2) return;
  auto failed = std::make_unique<Failed>();
  failed->why = status;
  failed->payer = ticket->payer;
  failed_of_.Add(failed->payer);
  failed->expiry = AfterLease([this, name = std::string(name)] {
    const auto it = failed_.find(name);
    it->second->expiry.detach([](kj::Exception&&) {});  // it runs now
    failed_of_.Remove(it->second->payer);
    failed_.erase(it);
  });
  failed_.emplace(name, std::move(failed));
}

void Tickets::DropAll() {
  if (!tickets_.empty()) spdlog::warn("{} received sequences were not claimed, and are lost", tickets_.size());
  while (!tickets_.empty()) {
    const std::unique_ptr<Ticket> ticket = Take(tickets_.begin()->first);
    if (ticket->sequence != 0) store_.Drop(ticket->sequence);
  }
  failed_.clear();
  failed_of_ = {};
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
  const std::unique_ptr<Ticket> ticket = Take(std::string(name));
  metrics_.claimed.Increment();
  return Claimed{ticket->sequence, ticket->tokens, std::move(ticket->blob)};
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
  const std::unique_ptr<Ticket> ticket = Take(name);
  store_.Drop(ticket->sequence);
  ticket->expiry.detach([](kj::Exception&&) {});  // it runs now: it cannot be destroyed here
  metrics_.expired.Increment();
}

void Tickets::SetGauge() { metrics_.tickets.Set(double(tickets_.size())); }

}  // namespace kvmanager
