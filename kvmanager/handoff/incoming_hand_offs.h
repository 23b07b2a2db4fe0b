// Hand-offs that this daemon receives: offers that wait for room, and sequences that arrive.
//
// This is the central header of the room handoff/: sequences that go to other daemons and come from them. The room
// knows GPUs, the store and the transport, and the schema of manifests. It does not know who asks for a hand-off:
// clients and their connections are rpc/'s.
//
//   receiving   incoming_hand_offs.h, offered.h, offer_check.h, offer_queue.h, tickets.h, gpu_landing.h,
//               recomputer.h and projection_set.h (KVPR)
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

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "codecs/registry.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/handoff/drain_switch.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/handoff/hand_off_metrics.h"
#include "kvmanager/handoff/offer_queue.h"
#include "kvmanager/handoff/offered.h"
#include "kvmanager/handoff/recomputer.h"
#include "kvmanager/handoff/tickets.h"
#include "kvmanager/store/store_metrics.h"
#include "transport/transport.h"

namespace kvmanager {

class IncomingHandOffs final : public HandOffReceiver {
 public:
  static constexpr int64_t kRoomMsMax = 3600000;  // an offer that may wait longer waits so long
  // Between looks for room, however often some is given back; and so many times as long as the last one took.
  static constexpr int64_t kRoomRetryMs = 5, kRoomRetryTimes = 20;
  static constexpr size_t kValidateAtOnce = 16;  // pages of one task on a worker

  /// What it uses. Everything outlives it.
  struct Parts {
    PageStore* store = nullptr;
    const StoreMetrics* store_metrics = nullptr;
    const CodecRegistry* registry = nullptr;
    WorkerPool* workers = nullptr;
    WorkerPool* background = nullptr;             // for what takes long in one piece
    const CodecWorkers* codec_workers = nullptr;  // where codecs that wait are made; nullptr: there are none
    MessageQueue* queue = nullptr;
    const Clock* clock = nullptr;
    Recomputer* recomputer = nullptr;
    const DrainSwitch* drain = nullptr;
    HandOffMetrics* metrics = nullptr;
    Gpus gpus;
    const PeerCopier* copier = nullptr;  // of pages of other daemons' GPUs; nullptr: none are taken
    uint64_t host_pool_bytes = 0;
    int64_t lease_ms = 0;                             // how long a received sequence waits to be claimed
    std::vector<std::string> peer_tenants = {"any"};  // whose sequences peers may bring; "any" alone: whose ever
  };

  explicit IncomingHandOffs(const Parts& parts) : parts_(parts), tickets_(parts.store, parts.metrics, parts.lease_ms) {}
  ~IncomingHandOffs() noexcept override {}

  /// Timers run on `loop` from now on; nullptr: there are none.
  void SetLoop(EventLoop* loop) {
    loop_ = loop;
    tickets_.SetLoop(loop);
  }

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

  absl::Status CheckDrain() const;
  absl::Status CheckTenant(const std::string& tenant) const;
  void Consider(std::shared_ptr<Offered> offered);
  void ConsiderGpu(std::shared_ptr<Offered> offered);
  /// Compares the bytes of what it shares with this daemon, before the store would; then tries to accept it, or does
  /// soon where it waits.
  void Verify(std::shared_ptr<Offered> offered, std::shared_ptr<BlockCheck> check);
  // Answers it, or has it wait for room.
  void TryAccept(std::shared_ptr<Offered> offered);
  absl::StatusOr<Accepted> Accept(Offered& offered);
  void Answer(Offered& offered, absl::StatusOr<Accepted> accepted);
  void AwaitRoom();
  void RetrySoon();
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

  const Parts parts_;
  EventLoop* loop_ = nullptr;
  Tickets tickets_;
  absl::flat_hash_map<SequenceId, std::vector<kj::Own<kj::PromiseFulfiller<void>>>> arriving_;  // who waits for it
  OfferQueue<Offered> waiting_;
  bool retry_due_ = false;
  int64_t retry_took_ns_ = 0;  // the last
  kj::Promise<void> retry_ = nullptr;
};

}  // namespace kvmanager
