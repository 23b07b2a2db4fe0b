// Hand-offs that this daemon receives: offers, which may wait for room, until they are accepted.
//
// This is the central header of the room handoff/: sequences that go to other daemons and come from them. The room
// knows GPUs, the store and the transport, and the schema of manifests. It does not know who asks for a hand-off:
// clients and their connections are rpc/'s.
//
//   receiving   incoming_hand_offs.h (offers), offered.h, offer_queue.h, receptions.h (what arrives), parse_then.h,
//               tickets.h, gpu_landing.h, recomputer.h and projection_set.h (KVPR)
//   sending     outgoing_hand_offs.h (to one of several peers), outgoing_hand_off.h (one), peer_choice.h
//   both        manifest.h, config_wire.h, limits.h, hand_off_metrics.h, drain_switch.h
//   arrivals.h  sequences that come from another memory of this daemon
//
// Owned by the daemon's wiring; outlives the transport. Offer, Load and the methods of incoming hand-offs are
// called on the transport's thread; they only read metrics and post messages, to the loop and, for looking at what
// arrived, to workers; everything else is the loop's thread. Clients claim what was received by its ticket (tickets.h).
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/handoff/hand_off_turns.h"
#include "kvmanager/handoff/incoming_parts.h"
#include "kvmanager/handoff/offer_queue.h"
#include "kvmanager/handoff/offered.h"
#include "kvmanager/handoff/receptions.h"
#include "kvmanager/handoff/tickets.h"
#include "transport/transport.h"

namespace kvmanager {

class IncomingHandOffs final : public HandOffReceiver {
 public:
  static constexpr int64_t kRoomMsMax = 3600000;  // an offer that may wait longer waits so long
  // Between looks for room, however often some is given back; and so many times as long as the last one took.
  static constexpr int64_t kRoomRetryMs = 5, kRoomRetryTimes = 20;
  static constexpr int64_t kNoRoomRetryMs = 500;  // longer, if there is no more room than at the last look

  using Parts = IncomingParts;

  explicit IncomingHandOffs(const Parts& parts)
      : parts_(parts),
        tickets_(parts.store, parts.metrics, parts.lease_ms),
        turns_(parts.queue),
        receptions_(parts_, &tickets_, &turns_) {}
  ~IncomingHandOffs() noexcept override {}

  /// Timers run on `loop` from now on; nullptr: there are none.
  void SetLoop(EventLoop* loop) {
    loop_ = loop;
    tickets_.SetLoop(loop);
  }

  void Offer(std::string peer, HandOffPart header, int64_t room_ms, OfferReply reply) override;
  void OfferGone() override;
  ReceiverLoad Load() const override;

  /// Of what was received, that included which is being received.
  Tickets& tickets() { return tickets_; }

  /// Whether pages of this sequence are still to come by a hand-off.
  bool arriving(SequenceId sequence) const { return receptions_.arriving(sequence); }
  /// Once none are, for whatever reason.
  kj::Promise<void> WhenSettled(SequenceId sequence) { return receptions_.WhenSettled(sequence); }

  /// In which pieces of hand-offs are done, those that are sent too.
  HandOffTurns* turns() { return &turns_; }

  /// Gives back every sequence that waits, and logs how many. Before the event loop ends.
  void DropAll();

 private:
  absl::Status CheckDrain() const;
  absl::Status CheckTenant(const std::string& tenant) const;
  void Look(std::shared_ptr<Offered> offered, absl::StatusOr<HandOffHeader> header);
  void Consider(std::shared_ptr<Offered> offered);
  void ConsiderGpu(std::shared_ptr<Offered> offered);
  /// Makes room for it, in pieces, then accepts it. Or it is refused, or waits.
  void Try(std::shared_ptr<Offered> offered);
  void TrySoon(std::shared_ptr<Offered> offered);
  void TrySome(std::shared_ptr<Offered> offered);
  absl::Status BeginImport(Offered& offered);
  absl::StatusOr<Accepted> Accept(Offered& offered);
  void EndTry(const std::shared_ptr<Offered>& offered, absl::StatusOr<Accepted> accepted);
  void GiveUpImport(Offered& offered);
  void Wait(const std::shared_ptr<Offered>& offered, absl::Status full);
  void Answer(Offered& offered, absl::StatusOr<Accepted> accepted);
  void AwaitRoom();
  void NoteFree();
  void RetrySoon(bool changed);
  void ForgetGone();
  void RetryOffers();
  void RetryNext();

  const Parts parts_;
  EventLoop* loop_ = nullptr;
  Tickets tickets_;
  HandOffTurns turns_;
  Receptions receptions_;
  OfferQueue<Offered> waiting_;
  bool awaits_room_ = false;                          // the store will say when some comes
  bool retry_due_ = false, retry_late_ = false;       // some time later, as there is no more room than there was
  bool retrying_ = false;                             // those that wait are being tried
  bool retry_again_ = false, retry_changed_ = false;  // behind that, since more than room has changed
  uint64_t tried_free_bytes_ = 0;                     // room when that began
  std::vector<std::string> full_;                     // payers for whom there was no room in this round
  int64_t retry_took_ns_ = 0;                         // of the loop's time, the last round
  kj::Promise<void> retry_ = nullptr;
};

}  // namespace kvmanager
