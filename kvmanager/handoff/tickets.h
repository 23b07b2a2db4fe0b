// Tickets for received sequences: 32 random bytes that a hand-off's sender knows from acceptance on. A ticket is good
// for one claim, within lease_ms of the time when the sequence has all of its tokens. Only the holder of its ticket
// sees a received sequence. The ticket of one that failed says why, for as long.
//
// Owned by IncomingHandOffs. The loop's thread.
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
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/handoff/hand_off_metrics.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

class Tickets {
 public:
  static constexpr size_t kTicketBytes = 32;
  static constexpr size_t kFailedMax = 1024;  // that still say why, half of them of one payer

  struct Claimed {
    SequenceId sequence = 0;
    uint64_t tokens = 0;
    std::string blob;
  };

  /// store, metrics: outlive this.
  Tickets(PageStore* store, HandOffMetrics* metrics, int64_t lease_ms)
      : store_(*store), metrics_(*metrics), lease_ms_(lease_ms) {}
  Tickets(const Tickets&) = delete;
  Tickets& operator=(const Tickets&) = delete;

  /// Leases run on `loop`, from now on; nullptr: there is none.
  void SetLoop(EventLoop* loop) { loop_ = loop; }

  // For whoever receives. What a ticket names is given back to the store if it is not claimed.

  /// Whether there is room for one more of a payer (payer_name.h). Errors: RESOURCE_EXHAUSTED.
  absl::Status CheckRoom(absl::string_view payer) const;
  /// A new one, for a sequence of `tokens` tokens that is still to come. Returns its name.
  std::string Make(CacheId cache, absl::string_view payer, uint64_t tokens);
  /// The engine's blob came with it. Errors: RESOURCE_EXHAUSTED (limits::kBlobBytesWaitingMax, kTenantBlobBytesMax).
  absl::Status SetBlob(absl::string_view name, std::string blob);
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
  /// By payer.
  const OwnerCounts<std::string>& of_payers() const { return of_payers_; }
  const OwnerCounts<std::string>& blob_bytes() const { return blob_bytes_; }

 private:
  struct Ticket {
    CacheId cache = 0;
    std::string payer;
    SequenceId sequence = 0;  // 0: not shown yet
    uint64_t tokens = 0;
    std::string blob;
    bool being_claimed = false;
    std::vector<kj::Own<kj::PromiseFulfiller<absl::Status>>> claims;  // that wait until it is shown
    kj::Promise<void> expiry = nullptr;                               // once it is
  };
  struct Failed {
    absl::Status why;
    std::string payer;
    kj::Promise<void> expiry = nullptr;
  };

  absl::Status CheckCache(const Ticket& ticket, CacheId cache) const;
  kj::Promise<void> AfterLease(absl::AnyInvocable<void()> fn);
  void Expire(const std::string& name);
  /// It is no ticket any more.
  std::unique_ptr<Ticket> Take(const std::string& name);
  void SetGauge();

  PageStore& store_;
  HandOffMetrics& metrics_;
  const int64_t lease_ms_;
  EventLoop* loop_ = nullptr;
  absl::flat_hash_map<std::string, std::unique_ptr<Ticket>> tickets_;
  OwnerCounts<std::string> of_payers_, blob_bytes_;  // of tickets_, by payer
  absl::flat_hash_map<std::string, std::unique_ptr<Failed>> failed_;
  OwnerCounts<std::string> failed_of_;  // the same
};

}  // namespace kvmanager
