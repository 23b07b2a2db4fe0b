// A hand-off that is being received: what its control connection says, and which pages its lanes have brought. Owned by
// Loop::incoming, under its token, and the handlers of its pending operations; the transport's thread alone.
//
// clang-format off
//   state        means                                                  next, and on what
//   kOffered     the receiver's answer awaited                          kReceiving: accepted, targets of the right sizes
//   kReceiving   pages and LAST come                                    kCompleting: LAST and every wanted page are here
//   kCompleting  the receiver's confirmation awaited                    kEnded: DONE
//   any          refused, an error, CANCEL, nothing heard               kEnded: ERROR
//   kEnded       kept for stall_ms, so that a sender whose connection broke learns how it ended
// clang-format on
//
// A connection that breaks changes no state: it is made again, or nothing is heard for stall_ms.
//
// Invariants: 1. End makes every transition into kEnded; the hand-off goes to Abort then, unless it was completed, or
// once no GPU writes any more what a closed lane had it copy (AwaitGpu), which a lane that is made again waits for too.
// 2. Pages are written by lanes alone, each by one at a time, while kComing; End closes the lanes before Abort, and on
// one thread a cancelled read writes nothing more. 3. A page that has arrived is never written again.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "transport/tcp/frame_link.h"
#include "transport/tcp/in_lane.h"
#include "transport/tcp/loop.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class Incoming : public std::enable_shared_from_this<Incoming> {
 public:
  static constexpr int64_t kTicksPerStall = 8;
  static constexpr int64_t kTickMsMax = 250;
  static constexpr uint64_t kGotsPerWindow = 8;   // at least so many confirmations for a window of pages
  static constexpr int64_t kGotsPerStall = 8;     // and, while pages arrive, in the time after which a sender gives up
  static constexpr size_t kEndedMax = 256;        // that are kept
  static constexpr uint64_t kDeviceWindows = 16;  // nothing waits in buffers where GPUs copy

  /// host, peer: the sender's address, without and with its port. peer_stall_ms: as its hello said.
  Incoming(Loop& loop, const Token& token, std::string host, std::string peer, int64_t peer_stall_ms);
  void Start(std::shared_ptr<FrameLink> link, OfferFrame offer);
  /// The sender's control connection, made again.
  void Resume(std::shared_ptr<FrameLink> link);
  void AddLane(uint32_t lane, std::shared_ptr<FrameLink> link);
  /// Ends it with `why`; `tell`: the peer still listens. `why` is moved to the receiver, not shared with it:
  /// ThreadSanitizer does not see the reference count in Debian's absl::Status.
  void End(absl::Status why, bool tell);
  /// Ends it and forgets it: the transport ends.
  void Stop();

  void OnWaiting(const absl::Status& why);
  void OnOfferReply(absl::StatusOr<HandOffReceiver::Accepted> reply);
  void OnExtendReply(absl::Status status);
  void OnCompleteReply(absl::Status status);

  /// Accepted, or waiting for room, and not yet arrived.
  uint64_t bytes_to_come() const { return state_ == State::kEnded ? 0 : bytes_wanted_ - bytes_arrived_; }
  /// Of the GPU that its targets are on; -1: they are in the host's memory.
  int device() const { return device_; }

  // For its lanes.
  const Token& token() const { return token_; }
  /// The target of a page that a lane announces. INVALID_ARGUMENT if it may not come now.
  absl::StatusOr<absl::Span<uint8_t>> BeginPage(uint32_t page);
  /// A lane ended before that page had all its bytes, or with wrong ones.
  void DropPage(uint32_t page) { pages_[page] = PageState::kWanted; }
  /// A lane closes that has a GPU copy `job`, whose pages are dropped once it has ended. False: it has.
  bool AwaitGpu(const std::shared_ptr<CopyJob>& job);
  /// Its bytes match its checksum.
  void OnPage(uint32_t page);
  /// After a few OnPage: tells the receiver and the sender, unless a few are not worth it yet. `all`: they are.
  void Confirm(bool all);
  void OnPayload(size_t bytes, PageWay way);
  /// DATA_LOSS: a page or frame arrived changed, and the sender will make the lane again; INVALID_ARGUMENT ends the
  /// hand-off; UNAVAILABLE: the connection broke.
  void OnLaneBroken(uint32_t lane, absl::Status why, bool bad_page);

 private:
  enum class State { kOffered, kReceiving, kCompleting, kEnded };
  enum class PageState : uint8_t { kUnwanted, kWanted, kComing, kArrived, kWithdrawn };

  void Attach(std::shared_ptr<FrameLink> link);
  void OnFrame(Frame frame);
  void OnLast(LastFrame last);
  void OnLinkBroken(absl::Status why);
  /// Which pages of a part are wanted; the parts in their order.
  PageBitmap TakePart(const PageSizes& part);
  std::string EncodedJoined() const;
  absl::Status CheckTotal(const HandOffPart& part);
  absl::Status CheckGpu() const;
  uint64_t window() const { return of_gpu_ ? loop_.window() * kDeviceWindows : loop_.window(); }
  std::string EncodedAccept() const;
  void CompleteIfAll();
  void Tick();
  void CloseLanes();
  void StartLane(uint32_t lane, Socket socket);
  void OnGpuEnded(const std::shared_ptr<CopyJob>& job);
  /// What End does once nobody writes to targets.
  void GiveBack();
  void Count(const absl::Status& status);

  Loop& loop_;
  const Token token_;
  const std::string host_, peer_;
  const int64_t peer_stall_ms_;
  State state_ = State::kOffered;
  Timer timer_;
  SteadyTime started_ = Now();
  SteadyTime heard_ = Now();
  std::shared_ptr<FrameLink> link_;  // nullptr while broken
  std::map<uint32_t, std::shared_ptr<InLane>> lanes_;

  std::shared_ptr<IncomingHandOff> hand_off_;
  const std::shared_ptr<std::atomic<bool>> gone_ = std::make_shared<std::atomic<bool>>(false);  // while it is offered
  std::string ticket_;
  HostId offered_host_ = {};               // the sender's
  bool of_gpu_ = false;                    // its pages are a GPU's
  int device_ = -1;                        // once accepted: where its targets are
  PageSizes page_bytes_;                   // of the parts that are known
  PageSizes last_bytes_;                   // of the last alone
  std::vector<PageState> pages_;           // as many, once accepted
  PageBitmap wanted_first_, wanted_last_;  // as answered
  size_t first_pages_ = 0;
  bool last_known_ = false;
  bool extended_ = false;
  uint64_t bytes_wanted_ = 0, bytes_arrived_ = 0;
  uint64_t pages_to_come_ = 0;
  uint64_t payload_bytes_ = 0, copied_bytes_ = 0;
  int bad_pages_ = 0;
  struct Ending {
    absl::Status why;
    bool tell = false, offered = false;
    std::string said;  // to the sender
  };
  std::vector<std::shared_ptr<CopyJob>> gpu_jobs_;  // of closed lanes
  std::map<uint32_t, Socket> made_again_;           // lanes that wait for them
  absl::optional<Ending> ending_;                   // until GiveBack
  absl::Status ended_with_;
  bool refused_ = false;

  std::vector<uint32_t> got_;  // arrived, and not yet confirmed
  uint64_t got_bytes_ = 0;
  SteadyTime confirmed_ = Now();  // the last of those
};

}  // namespace kvmanager::tcp
