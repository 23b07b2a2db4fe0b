// Receiving hand-offs: offers that wait for room, sequences that arrive, and tickets for clients that claim them.
//
// HandOffDesk is owned by the Server and outlives the transport. Offer, Load and the methods of incoming hand-offs are
// called on the transport's thread; they only read metrics and post messages, to the loop and, for looking at what
// arrived, to workers; everything else is the loop's thread. A received sequence is visible to nobody but the holder of
// its ticket: 32 random bytes, known to the sender from acceptance on, good for one claim within
// Options::hand_off_lease_ms of the time when the sequence has all of its tokens.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/server/context.h"
#include "kvmanager/server/hand_off_gpu.h"
#include "transport/transport.h"

namespace kvmanager {

class HandOffDesk final : public HandOffReceiver {
 public:
  static constexpr size_t kTicketBytes = 32;
  static constexpr size_t kOffersWaitingMax = 64;    // for room; more are refused
  static constexpr int64_t kRoomMsMax = 3600000;     // an offer that may wait longer waits so long
  static constexpr int64_t kRoomRetryMs = 5;         // between looks for room, however often some is given back
  static constexpr size_t kFailedTicketsMax = 1024;  // that still say why, within the same lease
  static constexpr size_t kValidateAtOnce = 16;      // pages of one task on a worker

  struct Claimed {
    SequenceId sequence = 0;
    uint64_t tokens = 0;
    std::string blob;
  };

  explicit HandOffDesk(DaemonContext* daemon) : daemon_(daemon) {}
  ~HandOffDesk() noexcept override {}

  void Offer(std::string peer, HandOffPart first, int64_t room_ms, OfferReply reply) override;
  void OfferGone() override;
  ReceiverLoad Load() const override;

  /// Once the ticket's sequence can be claimed. Errors: NOT_FOUND (no such ticket, or it expired), FAILED_PRECONDITION
  /// (it is of another cache; the ticket stays good), UNAVAILABLE (its hand-off ended early).
  kj::Promise<absl::Status> WhenShown(absl::string_view ticket, CacheId cache);
  /// The sequence that waits for this ticket, for a look. Errors: WhenShown's; FAILED_PRECONDITION before it is shown.
  absl::StatusOr<SequenceId> Find(absl::string_view ticket, CacheId cache) const;
  /// While its sequence is copied nobody else may: FAILED_PRECONDITION if somebody does. Claim and EndClaim end it.
  absl::Status BeginClaim(absl::string_view ticket);
  void EndClaim(absl::string_view ticket);
  /// Takes over a received sequence, once. It is of `cache`, or of one of equal digest in another memory. Errors:
  /// Find's.
  absl::StatusOr<Claimed> Claim(absl::string_view ticket, CacheId cache);

  /// Whether pages of this sequence are still to come by a hand-off.
  bool arriving(SequenceId sequence) const { return arriving_.contains(sequence); }
  /// Once none are, for whatever reason.
  kj::Promise<void> WhenSettled(SequenceId sequence);

  /// Sequences that wait to be claimed, those included that are being received.
  size_t tickets() const { return tickets_.size(); }
  /// Gives back every sequence that waits, and logs how many. Before the event loop ends.
  void DropAll();

 private:
  class Incoming;
  struct Offered;
  struct Ticket {
    CacheId cache = 0;
    SequenceId sequence = 0;  // 0: not shown yet
    uint64_t tokens = 0;
    std::string blob;
    bool being_claimed = false;
    std::vector<kj::Own<kj::PromiseFulfiller<absl::Status>>> claims;  // that wait until it is shown
    kj::Promise<void> expiry = nullptr;                               // once it is
  };
  struct FailedTicket {
    absl::Status why;
    kj::Promise<void> expiry = nullptr;
  };

  absl::Status MayReceive() const;
  void Consider(std::shared_ptr<Offered> offered);
  void ConsiderGpu(std::shared_ptr<Offered> offered);
  // Whether it was answered; else it waits for room.
  void TryAccept(std::shared_ptr<Offered> offered);
  absl::StatusOr<Accepted> Accept(Offered& offered);
  void Answer(Offered& offered, absl::StatusOr<Accepted> accepted);
  void AwaitRoom();
  void ForgetGone();
  void RetryOffers();
  absl::Status CheckCache(const Ticket& ticket, CacheId cache) const;

  // Of one that is being received.
  absl::Status Extend(Incoming& incoming, const HandOffPart& part);
  void Landed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages);
  void PostEncodes(const Incoming& incoming);
  void Recomputed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages);
  void Complete(Incoming& incoming, absl::AnyInvocable<void(absl::Status)> reply);
  void Abort(Incoming& incoming, const absl::Status& why);
  void GoOn(Incoming& incoming);  // shows and commits what it can
  void Fail(Incoming& incoming, const absl::Status& why);
  void Settle(SequenceId sequence);
  kj::Promise<void> AfterLease(absl::AnyInvocable<void()> fn);
  void Expire(const std::string& ticket);
  void SetTicketGauge();

  DaemonContext* const daemon_;
  absl::flat_hash_map<std::string, std::unique_ptr<Ticket>> tickets_;
  absl::flat_hash_map<std::string, std::unique_ptr<FailedTicket>> failed_;
  absl::flat_hash_map<SequenceId, std::vector<kj::Own<kj::PromiseFulfiller<void>>>> arriving_;  // who waits for it
  std::deque<std::shared_ptr<Offered>> waiting_;  // for room, in the order of coming
  bool retry_due_ = false;
  kj::Promise<void> retry_ = nullptr;
};

}  // namespace kvmanager
