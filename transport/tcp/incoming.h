// One hand-off that is being received: the messages of its control connection, and the pages that its data connections
// have brought. Owned by Loop::incoming, under its token, and by the handlers of its pending operations. The
// transport's thread only.
//
// clang-format off
//   state        means                                                 next, and on what
//   kOffered     waits for the receiver's answer                       kReceiving: accepted, targets of the right sizes
//   kReceiving   pages and LAST come                                   kCompleting: LAST and every wanted page are here
//   kCompleting  waits for the receiver's confirmation                 kEnded: DONE
//   any          refused, an error, CANCEL, nothing heard              kEnded: ERROR
//   kReceiving   idle, and others want what it holds                   kEnded: ERROR
//   kEnded       kept for stall_ms, so that a sender whose connection broke learns how the hand-off ended
// clang-format on
//
// A connection that breaks changes no state: it is made again, or nothing is heard for stall_ms.
//
// Invariants:
// 1. End makes every transition into kEnded. It passes the hand-off to Abort unless the hand-off was completed. Abort
// is
//    called only after every GPU copy that a closed data connection started has ended (AwaitGpu); a data connection
//    that is made again waits for those copies too.
// 2. Only data connections write pages; one of them at a time writes a page, while the page is kComing. End closes the
//    data connections before it calls Abort; all run on one thread, so a cancelled read writes nothing more.
// 3. A page that has arrived is never written again.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "transport/tcp/frame_link.h"
#include "transport/tcp/incoming_data_connection.h"
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
  void AddConnection(uint32_t connection, std::shared_ptr<FrameLink> link);
  /// Ends it with `why`; `tell`: the peer still listens. `why` is moved to the receiver, not shared with it:
  /// ThreadSanitizer does not see the reference count in Debian's absl::Status.
  void End(absl::Status why, bool tell);
  /// How long nothing of it has come while it could: PINGs are no progress. Zero unless it is kReceiving.
  SteadyTime::duration idle() const;
  /// Ends it because it is idle and somebody else wants its place or its memory.
  void EndIdle();
  /// Ends it and forgets it: the transport ends.
  void Stop();

  void OnWaiting(const absl::Status& why);
  void OnOfferReply(absl::StatusOr<HandOffReceiver::Accepted> reply);
  void OnExtendReply(absl::Status status);
  void OnCompleteReply(absl::Status status);

  /// Accepted, or waiting for room, and not yet arrived.
  uint64_t bytes_to_come() const { return state_ == State::kEnded ? 0 : bytes_wanted_ - bytes_arrived_; }
  /// The sender's, without its port.
  const std::string& host() const { return host_; }
  bool ended() const { return state_ == State::kEnded; }
  /// Of the GPU that its targets are on; -1: they are in the host's memory.
  int device() const { return device_; }

  // For its data connections:
  const Token& token() const { return token_; }
  /// The target of a page that a data connection announces. INVALID_ARGUMENT if the page may not come now.
  absl::StatusOr<absl::Span<uint8_t>> BeginPage(uint32_t page);
  /// A data connection ended before it had brought all bytes of the page, or it brought wrong bytes.
  void DropPage(uint32_t page) { pages_[page] = PageState::kWanted; }
  /// A data connection closes while a GPU still copies `job`; the pages of `job` are dropped when the copy has ended.
  /// False: the copy has ended already.
  bool AwaitGpu(const std::shared_ptr<CopyJob>& job);
  /// Its bytes match its checksum.
  void OnPage(uint32_t page);
  /// After a few OnPage: tells the receiver and the sender, unless a few are not worth it yet. `all`: they are.
  void Confirm(bool all);
  void OnPayload(size_t bytes, PageWay way);
  /// DATA_LOSS: a page or frame arrived changed, and the sender will make the
  /// connection again; INVALID_ARGUMENT ends the hand-off; UNAVAILABLE: the connection broke.
  void OnConnectionBroken(uint32_t connection, absl::Status why, bool bad_page);

 private:
  enum class State { kOffered, kReceiving, kCompleting, kEnded };
  enum class PageState : uint8_t { kUnwanted, kWanted, kComing, kArrived, kWithdrawn };

  void Attach(std::shared_ptr<FrameLink> link);
  void OnFrame(Frame frame);
  void OnTrailer(TrailerFrame trailer);
  void OnLinkBroken(absl::Status why);
  /// Which pages of a part are wanted; the parts in their order.
  PageBitmap TakePart(const PageSizes& part);
  std::string EncodedJoined() const;
  absl::Status CheckTotal(const HandOffPart& part);
  absl::Status CheckGpu() const;
  uint64_t window() const { return of_gpu_ ? loop_.window() * kDeviceWindows : loop_.window(); }
  std::string EncodedAccept() const;
  void SetWaitsForRoom(bool waits);
  void CompleteIfAll();
  void Tick();
  void CloseConnections();
  void StartConnection(uint32_t connection, Socket socket);
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
  SteadyTime progress_ = Now();      // it was accepted; bytes of pages or LAST came
  bool waits_for_room_ = false;      // counted in loop.waiting_for_room
  std::shared_ptr<FrameLink> link_;  // nullptr while broken
  std::map<uint32_t, std::shared_ptr<IncomingDataConnection>> connections_;

  std::shared_ptr<IncomingHandOff> hand_off_;
  const std::shared_ptr<std::atomic<bool>> gone_ = std::make_shared<std::atomic<bool>>(false);  // while it is offered
  std::string ticket_;
  HostId offered_host_ = {};               // the sender's
  bool of_gpu_ = false;                    // its pages are a GPU's
  int device_ = -1;                        // once accepted: where its targets are
  PageSizes page_bytes_;                   // of the parts that are known
  PageSizes trailer_bytes_;                // of the trailer alone
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
  std::vector<std::shared_ptr<CopyJob>> gpu_jobs_;  // of closed connections
  std::map<uint32_t, Socket> made_again_;           // connections that wait for gpu_jobs_
  absl::optional<Ending> ending_;                   // until GiveBack
  absl::Status ended_with_;
  bool refused_ = false;

  std::vector<uint32_t> got_;  // arrived, and not yet confirmed
  uint64_t got_bytes_ = 0;
  SteadyTime confirmed_ = Now();  // the last of those
};

}  // namespace kvmanager::tcp
