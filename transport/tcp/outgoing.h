// One hand-off that is being sent: the messages of its control connection, its data connections, and the pages that
// wait, are on their way or have arrived. Owned by Loop::outgoing and by the handlers of its pending operations. The
// transport's thread only.
//
//   state       means                                          next, and on what
//   kOffering   the receiver's ACCEPT is awaited               kSending: ACCEPT came
//   kSending    pages go as they are posted, LAST once known   kFinished: DONE
//   any         an error, a refusal, nothing heard, Stop       kFinished
//
// A connection that breaks changes no state: the control connection and each data connection are made again, first at
// once, then after growing pauses, until nothing was heard for the stall time. There is no second try before the first
// connection.
//
// Invariants:
// 1. Finish makes every transition into kFinished and closes everything. It calls `done` when the kernel no longer
// sends
//    straight from pages (drain.h): nothing reads pages' bytes after `done`.
// 2. One data connection at a time sends a page. The page is queued again only after JOINED of that connection has said
//    that the page did not arrive.
// 3. unacked_bytes_ are the bytes of pages in kSent.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "transport/tcp/dial.h"
#include "transport/tcp/frame_link.h"
#include "transport/tcp/loop.h"
#include "transport/tcp/outgoing_data_connection.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class Outgoing : public std::enable_shared_from_this<Outgoing> {
 public:
  static constexpr uint64_t kBytesPerConnection = 8 << 20;       // a smaller hand-off needs no second connection
  static constexpr uint64_t kFrameBytesTarget = 2 << 20;         // a frame of several pages is not longer
  static constexpr uint64_t kDeviceFrameBytesTarget = 32 << 20;  // of a GPU's: a launch is worth so much
  static constexpr int64_t kRedialMsMin = 10, kRedialMsMax = 320;
  static constexpr int kJoinsRefusedMax = 3;     // JOINs of one connection that the receiver may call wrong
  static constexpr uint64_t kUnackedShare = 20;  // a connection that breaks costs at most this part of the hand-off
  static constexpr int64_t kTicksPerStall = 8;
  static constexpr int64_t kTickMsMax = 250;

  Outgoing(Loop& loop, uint64_t id, SendRequest request, SendEvents events);
  void Start();
  void Post(std::vector<SendPage> pages);
  void FinishParts(HandOffPart trailer);
  void Stop(absl::Status why);

  // For its data connections:
  const Dial::Address& data_address() const { return data_address_; }
  const Token& token() const { return token_; }
  int64_t stall_ms() const { return stall_ms_; }
  /// Data connections say where pages are, and the receiver reads the pages through UCX.
  bool by_ucx() const { return by_ucx_; }
  bool of_gpu() const { return of_gpu_; }
  /// What to send next, in one frame; the pages count as sent by `connection`. False: nothing now.
  bool TakeFrame(uint32_t connection, std::vector<SendPage>* pages);
  /// The receiver was told where they lie. They count as sent when it says that they have arrived.
  void OnNamed(const std::vector<SendPage>& pages);
  void OnPayload(uint64_t bytes, PageWay way);
  void OnPagesWritten(uint64_t pages);
  void OnConnectionJoined(uint32_t connection, const JoinedFrame& joined);
  /// UNAVAILABLE, DATA_LOSS, DEADLINE_EXCEEDED: it is made again; anything else ends the hand-off.
  void OnConnectionBroken(uint32_t connection, absl::Status why);
  /// A data connection was closed while the kernel may still send pages through its socket.
  void DrainConnection(Socket socket, ZeroCopy zero_copy);

 private:
  enum class State { kOffering, kSending, kFinished };
  enum class PageState : uint8_t { kUnposted, kQueued, kSent, kArrived, kSkipped, kWithdrawn };
  struct Page {  // small, as the lists are: hand-offs have hundreds of thousands, and made before the first can go
    uint32_t size = 0;
    uint8_t connection = 0;  // of kSent
    PageState state = PageState::kUnposted;
    bool sent_before = false;
    bool named = false;  // kSent: the receiver was told where it lies, and copies it
  };
  struct Posted {  // what Post said of a page; not initialised before
    Posted() {}    // NOLINT(modernize-use-equals-default): then resizing would write zeros
    const uint8_t* bytes;
    const DeviceSlab* slab;
    uint64_t checksum;
    uint32_t group;
  };
  static_assert(HandOffPart::kPageBytesMax <= UINT32_MAX && kConnectionsMax <= UINT8_MAX);
  struct ConnectionSlot {
    std::shared_ptr<OutgoingDataConnection> connection;  // nullptr while broken
    bool joined_before = false;
    int64_t redial_ms = 0;  // the next pause
    SteadyTime redial_at;
    int refused = 0;
  };

  absl::Status CheckRequest() const;
  void AddPages(const HandOffPart& part, std::vector<Posted>* posted);
  Posted& posted(uint32_t page) {
    return page < first_pages_ ? first_posted_[page] : last_posted_[page - first_pages_];
  }
  absl::Status CheckTotal(const HandOffPart& part);
  /// now: seconds since Begin, as SetArrived's.
  absl::Status TakePosted(const SendPage& page, double now);
  /// The offer went. What was said of its pages before waited for that, so that the receiver makes its list of them
  /// while this one does.
  void MakePages();
  void TakeEarlyPost();
  void TakePosts(const std::vector<SendPage>& pages);
  void DialControl();
  void OnControl(Dial::Connection connection);
  void OnFrame(Frame frame);
  absl::Status OnAccept(AcceptFrame accept);
  absl::Status OnExtended(const ExtendedFrame& extended);
  absl::Status OnGot(const GotFrame& got);
  absl::Status OnJoined(const JoinedFrame& joined);
  absl::Status OnDone();
  void OnError(const absl::Status& status);
  void OnLinkBroken(absl::Status why);
  void UseTcpConnections();
  void SayLast();
  void SetArrived(uint32_t page, double now);
  void CountNamed();
  void Skip(uint32_t page);
  void OpenConnections();
  void Pump();
  bool HasWork() const { return unacked_bytes_ > 0 || queued_pages_ > 0; }
  void CountSending();  // after what may have changed HasWork
  void ScheduleRedial(const absl::Status& why);
  void Tick();
  /// Bytes that may be on their way at once: what a connection that breaks may cost is a share of the hand-off.
  uint64_t UnackedMax() const;
  void CloseConnections();
  void FinishProtocol(const absl::Status& why);
  void Finish(absl::StatusOr<SendResult> result);
  void TellDone();

  Loop& loop_;
  const uint64_t id_;
  SendRequest request_;
  SendEvents events_;
  const bool of_gpu_;  // asked for each page
  const int64_t stall_ms_;
  int64_t peer_stall_ms_;
  Token token_;
  State state_ = State::kOffering;
  bool counted_ = false;  // in the active gauge and the peer book
  bool refused_ = false;
  Timer timer_;
  const SteadyTime begun_ = Now();
  SteadyTime started_ = Now();  // the offer went
  SteadyTime heard_ = Now();
  SteadyTime progress_ = Now();               // a page's bytes were taken, or there was nothing to send
  absl::optional<SteadyTime> sending_since_;  // there have been pages to send, or on their way

  std::shared_ptr<Dial> dial_;
  std::shared_ptr<FrameLink> link_;  // nullptr while broken
  bool connected_before_ = false;
  bool offer_again_ = false;  // the receiver never had it
  bool joining_ = false;      // JOINED is awaited: whether the receiver has LAST is not known
  int64_t redial_ms_ = 0;
  SteadyTime redial_at_;
  absl::Status broken_by_;  // why the control connection broke last

  std::vector<Page> pages_;
  std::vector<Posted> first_posted_, last_posted_;  // of the parts' pages
  size_t first_pages_ = 0;
  bool pages_made_ = false;
  std::deque<std::vector<SendPage>> early_posts_;  // until they are taken; whoever posts has each page once
  absl::optional<HandOffPart> early_trailer_;
  absl::optional<HandOffPart> trailer_;
  bool extended_ = false;
  std::deque<uint32_t> first_queue_, last_queue_;  // those in kQueued, and some that are no longer
  uint64_t queued_pages_ = 0;
  uint64_t window_ = 1;
  uint64_t unacked_bytes_ = 0;
  uint64_t uncounted_bytes_ = 0, uncounted_pages_ = 0;  // that the receiver copied, since CountNamed
  uint64_t pages_to_go_ = 0;                            // neither arrived, nor skipped, nor withdrawn
  uint64_t total_bytes_ = 0;
  uint64_t wanted_bytes_ = 0;   // of total_bytes_: neither skipped nor withdrawn
  uint64_t copied_bytes_ = 0;   // of result_.bytes_sent
  Dial::Address data_address_;  // the peer, or its Unix socket
  uint32_t peer_features_ = 0;
  bool by_ucx_ = false;
  PageWay named_way_ = PageWay::kCopy;  // of pages in `named`
  uint32_t connections_allowed_ = 1;
  std::vector<ConnectionSlot> connections_;
  SendResult result_;
  size_t draining_ = 0;  // closed data connections whose pages the kernel may still send
  absl::optional<absl::StatusOr<SendResult>> ended_;
};

}  // namespace kvmanager::tcp
