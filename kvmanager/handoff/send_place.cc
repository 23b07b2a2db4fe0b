#include "kvmanager/handoff/send_place.h"

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {

absl::StatusOr<SendPlace> SendPlace::Take(ActiveSends* active, std::string payer, const std::string& peer) {
  const uint64_t own = active->of_payers.Of(payer);
  if (own >= limits::kTenantOutgoingMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("hand-offs being sent", kOfTenant),
                      absl::StrCat(own), absl::StrCat("below ", limits::kTenantOutgoingMax));
  }
  SendPlace place(active, std::move(payer));
  if (!peer.empty()) KV_RETURN_IF_ERROR(place.GoTo(peer));
  return place;
}

SendPlace::SendPlace(ActiveSends* active, std::string payer) : active_(active), payer_(std::move(payer)) {
  active_->of_payers.Add(payer_);
}

SendPlace::SendPlace(SendPlace&& other) noexcept
    : active_(std::exchange(other.active_, nullptr)), payer_(std::move(other.payer_)), peer_(std::move(other.peer_)) {}

SendPlace::~SendPlace() {
  if (active_ == nullptr) return;
  active_->of_payers.Remove(payer_);
  if (!peer_.empty()) active_->to_peers.Remove(std::pair(payer_, peer_));
}

absl::Status SendPlace::GoTo(const std::string& peer) {
  const uint64_t there = active_->to_peers.Of(std::pair(payer_, peer));
  if (there >= limits::kTenantToPeerMax) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("hand-offs being sent to ", peer, kOfTenant),
                      absl::StrCat(there), absl::StrCat("below ", limits::kTenantToPeerMax));
  }
  KV_CHECK(peer_.empty());
  active_->to_peers.Add(std::pair(payer_, peer));
  peer_ = peer;
  return absl::OkStatus();
}

}  // namespace kvmanager
