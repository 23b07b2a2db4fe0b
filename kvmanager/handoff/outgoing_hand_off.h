// One hand-off to another daemon, perhaps of a sequence that still grows. The loop's thread, but for manifests of very
// many pages, which workers make. Pages are given to the transport in pieces, between which others are served.
#pragma once

#include <kj/async.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/handoff/hand_off_metrics.h"
#include "kvmanager/handoff/hand_off_turns.h"
#include "kvmanager/handoff/send_place.h"
#include "kvmanager/store/page_store.h"
#include "transport/transport.h"

namespace kvmanager {

/// What the engine sends along, up to a MiB. Shared by all who may have to send it again.
using SharedBlob = std::shared_ptr<const std::string>;

struct SentHandOff {
  std::string ticket;
  std::string peer;
  SendResult result;          // its groups: by layer
  int64_t begun_unix_ns = 0;  // when it was offered
};

/// Whether a peer refused pages of the header for their bytes, as earlier builds refuse sinks.
bool WantsKeptRawInTrailer(const absl::Status& status);

class CancelOnDrop;

/// One hand-off, from its offer to the receiver's confirmation. Shared by who waits for it and by the transport's
/// completions, whichever lives longer; pages stay pinned until the transport lets go.
class OutgoingHandOff final : public std::enable_shared_from_this<OutgoingHandOff> {
 public:
  /// What every hand-off uses. Everything outlives them.
  struct Parts {
    Transport* transport = nullptr;
    EventLoop* loop = nullptr;
    HandOffMetrics* metrics = nullptr;
    Gpus gpus;
    bool shares_gpu_memory = false;  // whether other daemons of this host may read GPUs' pages
    ActiveSends* active = nullptr;
    HandOffTurns* turns = nullptr;
    WorkerPool* workers = nullptr;     // nullptr: all is done on the loop's thread
    WorkerPool* background = nullptr;  // for what takes long in one piece; there is one if there are workers
  };
  struct Target {
    std::string peer;          // "HOST:PORT"
    int64_t room_ms = 0;       // how long a receiver that is full may let it wait
    int64_t timeout_ms = 0;    // 1..kHandOffTimeoutMsMax, of what is waited for, room_ms beside
    bool will_append = false;  // as Exports::Whole's
    std::string payer;         // whose it is (payer_name.h)
  };
  static constexpr size_t kPagesAtOnce = 1024;      // are given to the transport: some 0.1 ms
  static constexpr size_t kPagesOfWorkers = 16384;  // whose manifest takes a worker some 2 ms

  /// Offers it and sends its pages as the lease has them, those of a GPU out of its memory. Errors: INVALID_ARGUMENT
  /// for one that is too long; WantsHostPages.
  static kj::Promise<absl::StatusOr<kj::Own<CancelOnDrop>>> Begin(const Parts& parts,
                                                                  std::unique_ptr<ExportLease> lease, Target target,
                                                                  SendPlace place);
  OutgoingHandOff(const Parts& parts, std::unique_ptr<ExportLease> lease, Target target, SendPlace place);
  ~OutgoingHandOff();
  OutgoingHandOff(const OutgoingHandOff&) = delete;
  OutgoingHandOff& operator=(const OutgoingHandOff&) = delete;

  /// The ticket, once the receiver has room. At most once. Errors: Transport's; DEADLINE_EXCEEDED.
  kj::Promise<absl::StatusOr<std::string>> Accepted();
  /// The sequence is complete: sends the rest, with the engine's blob. Errors: ExportLease::Finish's, after which it
  /// goes on and may be asked again; Transport's; DEADLINE_EXCEEDED. room_ms: allowed beyond the timeout.
  kj::Promise<absl::StatusOr<SentHandOff>> Finish(SharedBlob blob, int64_t room_ms = 0);
  /// Nobody wants it any more. Nothing once it has ended.
  void Cancel();
  const std::string& peer() const { return target_.peer; }
  const std::string& ticket() const { return ticket_; }  // empty before it was accepted

 private:
  template <typename T>
  kj::Promise<absl::StatusOr<T>> WithDeadline(kj::Promise<absl::StatusOr<T>> promise, int64_t ms);
  // `make` reads only what does not change any more of the lease; a worker calls it where there are very many pages.
  kj::Promise<HandOffPart> Make(size_t pages, absl::AnyInvocable<HandOffPart()> make);
  absl::Status Offer(HandOffPart header);
  // Gives the transport a piece of what there is, and goes on with the next message.
  void Pump();
  void PumpLater();
  void SayLast();
  void PostLast();
  void OnAccepted(std::string ticket);
  void OnDone(absl::StatusOr<SendResult> result);
  uint32_t LayerOf(uint32_t page) const;
  absl::Status FindGpu();
  void Post(absl::Span<const ExportedPage> pages, absl::Span<const ExportedOpenPage> open = {});
  void PostFromGpu(absl::Span<const ExportedPage> pages, absl::Span<const ExportedOpenPage> open);
  void Fail(absl::Status why);

  const Parts& parts_;                  // OutgoingHandOffs'
  std::shared_ptr<ExportLease> lease_;  // nullptr once it has ended; a GPU that still works for it shares it
  const Target target_;
  const SendPlace place_;
  Gpu* gpu_ = nullptr;                                    // whose pages they are
  std::vector<std::shared_ptr<const DeviceSlab>> slabs_;  // in which they lie
  absl::Status failed_;                                   // why this ended it
  bool cancelled_ = false;                                // nothing more is offered
  std::optional<uint64_t> transfer_;
  int64_t begun_unix_ns_ = 0;
  std::string ticket_;    // empty before it was accepted
  SharedBlob blob_;       // once it is complete
  bool pumping_ = false;  // a message goes on
  bool makes_last_ = false, said_last_ = false;
  size_t posted_last_ = 0;  // of the trailer's pages
  kj::Promise<void> making_last_ = nullptr;
  std::optional<absl::Status> ended_;
  std::string waits_because_;  // the receiver is full
  kj::Own<kj::PromiseFulfiller<absl::StatusOr<std::string>>> accepted_;
  kj::Own<kj::PromiseFulfiller<absl::StatusOr<SentHandOff>>> finished_;
};

/// Cancels a hand-off, unless it has ended by then.
class CancelOnDrop {
 public:
  explicit CancelOnDrop(std::shared_ptr<OutgoingHandOff> hand_off) : hand_off_(std::move(hand_off)) {}
  ~CancelOnDrop() {
    if (hand_off_ != nullptr) hand_off_->Cancel();
  }
  CancelOnDrop(CancelOnDrop&&) = default;
  CancelOnDrop& operator=(CancelOnDrop&&) = delete;
  OutgoingHandOff& operator*() const { return *hand_off_; }
  OutgoingHandOff* operator->() const { return hand_off_.get(); }

 private:
  std::shared_ptr<OutgoingHandOff> hand_off_;
};

}  // namespace kvmanager
