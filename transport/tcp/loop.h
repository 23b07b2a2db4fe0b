// What the connections of one transport share, and the way onto its thread. Loop is owned by the Engine and touched by
// the transport's thread alone, but for `peers` and `metrics`, which lock themselves. Gate outlives it: receivers'
// replies hold it.
#pragma once

#include <boost/asio.hpp>
#include <chrono>
#include <memory>
#include <unordered_map>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/mutex.h"
#include "transport/tcp/peer_book.h"
#include "transport/tcp/rate_limit.h"
#include "transport/tcp/tcp_transport.h"

namespace kvmanager::tcp {

namespace asio = boost::asio;
using ErrorCode = boost::system::error_code;
using SteadyTime = std::chrono::steady_clock::time_point;
using Executor = asio::io_context::executor_type;
using Socket = asio::basic_stream_socket<asio::ip::tcp, Executor>;
using Acceptor = asio::basic_socket_acceptor<asio::ip::tcp, Executor>;
using Resolver = asio::ip::basic_resolver<asio::ip::tcp, Executor>;
using Timer =
    asio::basic_waitable_timer<std::chrono::steady_clock, asio::wait_traits<std::chrono::steady_clock>, Executor>;

class Incoming;
class Outgoing;
struct Loop;

/// Posts onto the transport's thread until it has ended. The one shared_ptr-owned object between the transport and its
/// receivers: a reply may be called after the transport is gone.
class Gate {
 public:
  explicit Gate(Loop* loop) : loop_(loop) {}
  /// False, and `task` destroyed on this thread, once the transport has ended.
  bool Post(absl::AnyInvocable<void(Loop&)> task);
  void Close();

 private:
  Mutex mutex_;
  Loop* loop_ ABSL_GUARDED_BY(mutex_);
};

struct Loop {
  explicit Loop(TcpTransport::Options o)
      : options(std::move(o)),
        metrics(*options.metrics),
        rate(options.send_bytes_per_s),
        gate(std::make_shared<Gate>(this)) {}

  // Declared first, destroyed last: sockets and timers refer to it.
  asio::io_context io{1};
  const TcpTransport::Options options;
  TransportMetrics& metrics;
  PeerBook peers;
  RateLimit rate;
  std::shared_ptr<Gate> gate;
  // A connection stays here until it is closed; handlers of its pending operations share it, hence shared_ptr.
  std::unordered_map<uint64_t, std::shared_ptr<Outgoing>> outgoing;
  std::unordered_map<uint64_t, std::shared_ptr<Incoming>> incoming;
  bool stopping = false;
  size_t incoming_open = 0;         // of `incoming`, those not yet ended
  uint64_t offer_buffer_bytes = 0;  // held by `incoming`
};

/// Bytes of the kernel's socket buffers, where its limits allow so much; elsewhere its own tuning does better than a
/// cut request.
inline constexpr int kSocketBufferBytes = 4 << 20;

/// Sets what every connection has: close-on-exec, no delay, keepalive, TCP_USER_TIMEOUT of `stall_ms`. Failures are
/// ignored: each only makes a dead peer or a slow link worse than need be.
void Tune(Socket& socket, int64_t stall_ms);
/// Buffers and close-on-exec; before connect or listen, so that the window is scaled for them.
void TuneEarly(int fd);

inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvmanager::tcp
