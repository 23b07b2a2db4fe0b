// Speaks TLS with a peer on behalf of everything that uses a plain socket: bytes go between the peer's TCP connection
// and one end of a pair of Unix sockets, whose other end is used as if it were the connection. So connections that read
// and write on workers, wait for sockets, or hand them on need no second way; each byte is copied once more on either
// side.
//
//   user <-- plain --> [near end | relay | TLS] <-- TCP --> peer
//
//   state       means                                 next, and on what
//   kShaking    the handshake; nothing is passed on   kCarrying: it succeeded; kRefusing: not; kClosed: kAuthMs
//   kRefusing   the peer that connected reads why     kClosed: it closed, or kAuthMs
//   kCarrying   bytes go both ways                    kClosed: both ended, TLS broke, or kLingerMs without use
//   kClosed     nothing is open                       -
//
// An end of one side is passed on behind its bytes: the user's as close_notify, the peer's as the end of the near end.
// A broken TLS connection is such an end, too: frames have their own lengths and checks. A worker does one turn at a
// time, and alone touches TLS and buffers during it. No more than two buffers and two sockets' worth of bytes are on
// their way.
//
// Owned by Loop::relays and by the handlers of its pending operations; the transport's thread, but for Work.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "kvmanager/base/tls.h"
#include "transport/tcp/loop.h"

namespace kvmanager::tcp {

class TlsRelay : public std::enable_shared_from_this<TlsRelay> {
 public:
  static constexpr size_t kBufferBytes = 64 << 10;  // each way
  static constexpr size_t kTurnBytes = 1 << 20;     // then other work of the pool
  static constexpr int64_t kLingerMs = 3000;        // above what the user lingers for after it has ended its side
  static constexpr int64_t kStopMs = 200;

  /// status: OK: the socket is the user's end. Else, as TlsLink::failure; DEADLINE_EXCEEDED.
  using Done = absl::AnyInvocable<void(absl::Status status, Socket socket)>;

  /// name: of the peer that was dialled; empty: it dialled.
  TlsRelay(Loop& loop, Socket tcp, std::shared_ptr<const TlsContext> context, const std::string& name, Done done);
  void Start();
  /// Before Done: it is not called any more.
  void Cancel();
  /// The transport ends: soon, what is on its way included as far as it goes at once.
  void EndSoon();
  /// Why TLS broke after the handshake: a peer refuses a certificate so. OK: it did not, so far.
  const absl::Status& failure() const { return failure_; }

 private:
  enum class State { kShaking, kRefusing, kCarrying, kClosed };
  struct Buffer {
    std::unique_ptr<uint8_t[]> bytes;  // nullptr while empty
    size_t begin = 0, end = 0;
    bool empty() const { return begin == end; }
  };
  enum Wait { kNearRead, kNearWrite, kTcpRead, kTcpWrite, kWaits };

  void Turn();
  /// On a worker.
  void Work();
  bool ToPeer();
  bool ToUser();
  void OnWorked();
  void WaitFor(Wait what);
  void OnShaken();
  void Refuse();
  void Drain();
  void SetTimer(int64_t ms);
  void Close(absl::Status why);

  Loop& loop_;
  Socket tcp_, near_;
  Timer timer_;
  const bool dialled_;
  State state_ = State::kShaking;
  Done done_;  // empty once called
  absl::Status failure_;
  uint64_t timers_ = 0;  // set so far: only the newest counts
  bool working_ = false, again_ = false, lingering_ = false, stopping_ = false;
  std::array<bool, kWaits> waiting_ = {};
  std::array<uint8_t, 256> away_;  // what is read in kRefusing
  size_t drained_ = 0;

  // A worker's during a turn.
  std::unique_ptr<TlsLink> link_;  // goes before tcp_
  TlsLink::Step step_ = TlsLink::Step::kWantRead;
  Buffer to_peer_, to_user_;
  bool user_ended_ = false, peer_ended_ = false;  // nothing more is read of it
  bool told_peer_ = false, told_user_ = false;    // and all that was, is written to the other
  bool broken_ = false;                           // TLS is
  bool more_ = false;                             // the turn ended before what there was to do
  uint64_t moved_to_peer_ = 0;                    // in the turn
};

}  // namespace kvmanager::tcp
