// Tickets for received sequences: 32 random bytes, known to a hand-off's sender from acceptance on, good for one claim
// within Options::hand_off_lease_ms of the time when the sequence has all of its tokens. A received sequence is visible
// to nobody but the holder of its ticket; of one that failed, the ticket says why for as long.
//
// Owned by the HandOffDesk. The loop's thread.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/rpc/context.h"

namespace kvmanager {

class Tickets {
 public:
  static constexpr size_t kTicketBytes = 32;
  static constexpr size_t kFailedMax = 1024;  // that still say why

  struct Claimed {
    SequenceId sequence = 0;
    uint64_t tokens = 0;
    std::string blob;
  };

  explicit Tickets(DaemonContext* daemon) : daemon_(daemon) {}
  Tickets(const Tickets&) = delete;
  Tickets& operator=(const Tickets&) = delete;

  // For whoever receives. What a ticket names is given back to the store if it is not claimed.

  /// A new one, for a sequence of `tokens` tokens that is still to come. Returns its name.
  std::string Make(CacheId cache, uint64_t tokens);
  /// The engine's blob came with it.
  void SetBlob(absl::string_view name, std::string blob);
  /// Its sequence can be claimed from now on, and the lease begins. A sequence whose ticket is gone is given back.
  void Show(absl::string_view name, SequenceId sequence);
  /// Its hand-off ended early.
  void Fail(absl::string_view name, const absl::Status& why);
  /// Gives back every sequence that waits, and logs how many. Before the event loop ends.
  void DropAll();

  // For whoever claims.

  /// Once the ticket's sequence can be claimed. Errors: NOT_FOUND (no such ticket, or it expired), FAILED_PRECONDITION
  /// (it is of another cache; the ticket stays good), UNAVAILABLE (its hand-off ended early).
  kj::Promise<absl::Status> WhenShown(absl::string_view name, CacheId cache);
  /// The sequence that waits for this ticket, for a look. Errors: WhenShown's; FAILED_PRECONDITION before it is shown.
  absl::StatusOr<SequenceId> Find(absl::string_view name, CacheId cache) const;
  /// While its sequence is copied nobody else may: FAILED_PRECONDITION if somebody does. Claim and EndClaim end it.
  absl::Status BeginClaim(absl::string_view name);
  void EndClaim(absl::string_view name);
  /// Takes over a received sequence, once. It is of `cache`, or of one of equal digest in another memory. Errors:
  /// Find's.
  absl::StatusOr<Claimed> Claim(absl::string_view name, CacheId cache);

  /// Sequences that wait to be claimed, those included that are being received.
  size_t size() const { return tickets_.size(); }

 private:
  struct Ticket {
    CacheId cache = 0;
    SequenceId sequence = 0;  // 0: not shown yet
    uint64_t tokens = 0;
    std::string blob;
    bool being_claimed = false;
    std::vector<kj::Own<kj::PromiseFulfiller<absl::Status>>> claims;  // that wait until it is shown
    kj::Promise<void> expiry = nullptr;                               // once it is
  };
  struct Failed {
    absl::Status why;
    kj::Promise<void> expiry = nullptr;
  };

  absl::Status CheckCache(const Ticket& ticket, CacheId cache) const;
  kj::Promise<void> AfterLease(absl::AnyInvocable<void()> fn);
  void Expire(const std::string& name);
  void SetGauge();

  DaemonContext* const daemon_;
  absl::flat_hash_map<std::string, std::unique_ptr<Ticket>> tickets_;
  absl::flat_hash_map<std::string, std::unique_ptr<Failed>> failed_;
};

}  // namespace kvmanager
