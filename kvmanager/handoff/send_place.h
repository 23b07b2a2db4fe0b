// Places of hand-offs that are sent: a payer has so many, and so many of them to one peer. A hand-off has its place
// before anything of it is listed, until the transport has done with it. The loop's thread.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/owner_counts.h"

namespace kvmanager {

/// Hand-offs under way.
struct ActiveSends {
  OwnerCounts<std::string> of_payers;
  OwnerCounts<std::pair<std::string, std::string>> to_peers;  // by payer and peer
};

class SendPlace {
 public:
  /// peer: empty: not known yet. active: outlives it. Errors: RESOURCE_EXHAUSTED (limits::kTenantOutgoingMax,
  /// kTenantToPeerMax).
  static absl::StatusOr<SendPlace> Take(ActiveSends* active, std::string payer, const std::string& peer);
  ~SendPlace();
  SendPlace(SendPlace&& other) noexcept;
  SendPlace& operator=(SendPlace&&) = delete;

  /// Its peer is known now. Errors: RESOURCE_EXHAUSTED (limits::kTenantToPeerMax).
  absl::Status GoTo(const std::string& peer);

 private:
  SendPlace(ActiveSends* active, std::string payer);

  ActiveSends* active_;  // nullptr: moved from
  std::string payer_;
  std::string peer_;  // empty: none
};

}  // namespace kvmanager
