// Receiving hand-offs: offers that wait for room, and sequences that arrive.
//
// HandOffDesk is owned by the Server and outlives the transport. Offer, Load and the methods of incoming hand-offs are
// called on the transport's thread; they only read metrics and post messages, to the loop and, for looking at what
// arrived, to workers; everything else is the loop's thread. Clients claim what was received by its ticket (tickets.h).
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kvmanager/handoff/hand_off_gpu.h"
#include "kvmanager/handoff/tickets.h"
#include "kvmanager/rpc/context.h"
#include "transport/transport.h"

namespace kvmanager {

class HandOffDesk final : public HandOffReceiver {
 public:
  static constexpr size_t kOffersWaitingMax = 64;  // for room; more are refused
  static constexpr int64_t kRoomMsMax = 3600000;   // an offer that may wait longer waits so long
  static constexpr int64_t kRoomRetryMs = 5;       // between looks for room, however often some is given back
  static constexpr size_t kValidateAtOnce = 16;    // pages of one task on a worker

  explicit HandOffDesk(DaemonContext* daemon) : daemon_(daemon), tickets_(daemon) {}
  ~HandOffDesk() noexcept override {}

  void Offer(std::string peer, HandOffPart first, int64_t room_ms, OfferReply reply) override;
  void OfferGone() override;
  ReceiverLoad Load() const override;

  /// Of what was received, that included which is being received.
  Tickets& tickets() { return tickets_; }

  /// Whether pages of this sequence are still to come by a hand-off.
  bool arriving(SequenceId sequence) const { return arriving_.contains(sequence); }
  /// Once none are, for whatever reason.
  kj::Promise<void> WhenSettled(SequenceId sequence);

  /// Gives back every sequence that waits, and logs how many. Before the event loop ends.
  void DropAll();

 private:
  class Incoming;
  struct Offered;

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

  DaemonContext* const daemon_;
  Tickets tickets_;
  absl::flat_hash_map<SequenceId, std::vector<kj::Own<kj::PromiseFulfiller<void>>>> arriving_;  // who waits for it
  std::deque<std::shared_ptr<Offered>> waiting_;  // for room, in the order of coming
  bool retry_due_ = false;
  kj::Promise<void> retry_ = nullptr;
};

}  // namespace kvmanager
