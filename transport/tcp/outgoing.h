// One hand-off being sent. Owned by Loop::outgoing and the handlers of its pending operations; the transport's thread
// alone.
//
//   state        means                                                next, and on what
//   kConnecting  resolving, connecting                                kHello: connected
//   kHello       our HELLO is written, then theirs read               kOffered: theirs is good
//   kOffered     OFFER being written, ANSWER awaited                  kSending: ANSWER
//   kSending     PAGEs being written                                  kEnding: the last wanted page written
//   kEnding      END being written, DONE awaited                      kFinished: DONE
//   any          ERROR, a broken connection, no progress, Stop        kFinished
//
// Invariants: 1. Finish makes every transition to kFinished, and calls `done` there, once. 2. After Finish the socket
// is closed, and no byte of the request's pages is read again. 3. From kOffered on exactly one read is pending, so that
// an ERROR is seen while pages are written; a failed write therefore waits for the read to tell why.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/tcp/host_port.h"
#include "transport/tcp/loop.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class Outgoing : public std::enable_shared_from_this<Outgoing> {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<SendResult>)>;
  static constexpr size_t kPagesPerWriteMax =
      32;  // a header and a payload each: the 64 buffers that Asio gives to one sendmsg
  static constexpr int64_t kRateWaitMs = 5;

  Outgoing(Loop& loop, uint64_t id, SendRequest request, Done done);
  /// REQUIRES: this is in loop.outgoing.
  void Start();
  /// Ends the transfer with `why`, telling the peer where that is possible at once.
  void Stop(absl::Status why);

 private:
  enum class State { kConnecting, kHello, kOffered, kSending, kEnding, kFinished };

  absl::Status CheckRequest();
  void ConnectNext(const ErrorCode& last_error);
  void OnConnected();
  void WriteControl(std::string bytes);
  void ContinueControl();
  void ReadHello();
  void ReadFrame();
  void ReadBody(const FrameHeader& header);
  void OnFrame(absl::StatusOr<Frame> frame);
  void OnAnswer(AnswerFrame answer);
  void OnDone(DoneFrame done);
  void WritePages();
  void OnPagesWritten(size_t bytes);
  void OnWriteError(const ErrorCode& error);
  void Touch() { deadline_ = std::chrono::steady_clock::now() + stall_; }
  void ArmTimer();
  void Finish(absl::StatusOr<SendResult> result, bool refused = false);
  void FinishBroken(absl::string_view what, const ErrorCode& error);
  void FinishProtocol(absl::Status why);

  Loop& loop_;
  const uint64_t id_;
  SendRequest request_;
  Done done_;
  State state_ = State::kConnecting;
  bool writing_ = false;  // a write is pending, or one failed
  bool counted_ = false;  // in the active gauge and the peer book

  std::vector<asio::ip::tcp::endpoint> endpoints_;
  size_t endpoints_tried_ = 0;
  Socket socket_;
  Resolver resolver_;
  Timer stall_timer_;
  Timer rate_timer_;
  std::chrono::milliseconds stall_;
  SteadyTime deadline_;
  SteadyTime started_;

  std::string control_;          // HELLO, OFFER or END under way
  size_t control_sent_ = 0;      // of it
  std::vector<uint8_t> in_;      // the frame being read
  std::vector<uint32_t> order_;  // wanted pages, ascending
  size_t next_ = 0;              // of order_: the page being sent
  size_t offset_ = 0;            // bytes of its frame, header included, that are sent
  uint64_t payload_bytes_ = 0;
  std::array<std::array<uint8_t, kHeaderBytes>, kPagesPerWriteMax> headers_;
  std::array<asio::const_buffer, 2 * kPagesPerWriteMax> buffers_;
};

}  // namespace kvmanager::tcp
