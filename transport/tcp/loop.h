// What the connections of one transport share, and the way onto its thread. Loop is owned by the IoThread and touched
// by the transport's thread alone, but for `peers` and `metrics`, which lock themselves. Gate outlives it: receivers'
// replies hold it.
#pragma once

#include <algorithm>
#include <boost/asio.hpp>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"
#include "transport/tcp/peer_book.h"
#include "transport/tcp/rate_limit.h"
#include "transport/tcp/region_cache.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

namespace asio = boost::asio;
using ErrorCode = boost::system::error_code;
using SteadyTime = std::chrono::steady_clock::time_point;
using Executor = asio::io_context::executor_type;
/// A TCP connection, or a connection of a Unix socket (local).
using Socket = asio::basic_stream_socket<asio::generic::stream_protocol, Executor>;
using Acceptor = asio::basic_socket_acceptor<asio::ip::tcp, Executor>;
using LocalAcceptor = asio::basic_socket_acceptor<asio::local::stream_protocol, Executor>;
using Resolver = asio::ip::basic_resolver<asio::ip::tcp, Executor>;
using Timer =
    asio::basic_waitable_timer<std::chrono::steady_clock, asio::wait_traits<std::chrono::steady_clock>, Executor>;

class FrameLink;
class Incoming;
class Outgoing;
class Probe;
class PeerAuth;
class PendingConnection;
class TlsRelay;
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

  /// How far a sender may be ahead of what has arrived here: the window of all, shared by those that send.
  uint64_t window() const { return std::max<uint64_t>(options.window_bytes / std::max<size_t>(receiving, 1), 1); }

  // Declared first, destroyed last: sockets and timers refer to it.
  asio::io_context io{1};
  const TcpTransport::Options options;
  TransportMetrics& metrics;
  PeerBook peers;
  RateLimit rate;
  std::shared_ptr<Gate> gate;
  // Move the bytes of data connections. Destroyed before io, since their last task may hold a data connection, and
  // after all regions, which they unmap. Shared with reads of remote memory, which may end after the transport; such
  // reads are abandoned.
  std::shared_ptr<WorkerPool> copiers;
  std::unique_ptr<RegionCache> regions;  // that local connections copy out of
  std::string local_name;                // of the Unix socket for local connections; empty: none
  HostId host = {};
  // What has sockets or timers stays here until they are closed, so that the end of the transport finds it. Handlers of
  // pending operations share it, hence shared_ptr.
  std::unordered_map<uint64_t, std::shared_ptr<Outgoing>> outgoing;
  std::map<Token, std::shared_ptr<Incoming>> incoming;  // those that have ended a while longer, for who asks again
  struct Authenticating {
    std::string host;
    std::shared_ptr<PeerAuth> auth;
    std::shared_ptr<TlsRelay> tls;  // before it
  };
  std::list<Authenticating> authenticating;  // accepted connections
  std::unordered_set<std::shared_ptr<PendingConnection>> pending_connections;
  std::unordered_set<std::shared_ptr<TlsRelay>> relays;
  std::unordered_set<std::shared_ptr<FrameLink>> lingering;
  std::unordered_set<std::shared_ptr<Probe>> probes;
  bool stopping = false;
  size_t draining = 0;              // hand-offs that have ended, whose pages the kernel may still send
  size_t incoming_open = 0;         // of `incoming`, those not yet ended
  size_t receiving = 0;             // of those, accepted by the receiver
  size_t waiting_for_room = 0;      // of those, not accepted because the receiver is full
  uint64_t frame_buffer_bytes = 0;  // of long frames that are being read
  SteadyTime auth_failure_said;     // the newest in the log
  uint64_t auth_failures_unsaid = 0;
};

/// Bytes of the kernel's socket buffers, where its limits allow so much; elsewhere its own tuning does better than a
/// cut request.
inline constexpr int kSocketBufferBytes = 4 << 20;

/// Sets what every connection has: close-on-exec, no delay, keepalive, TCP_USER_TIMEOUT of `stall_ms`. Failures are
/// ignored: each only makes a dead peer or a slow link worse than need be.
void Tune(Socket& socket, int64_t stall_ms);
/// Buffers and close-on-exec; before connect or listen, so that the window is scaled for them.
void TuneEarly(int fd);

inline SteadyTime Now() { return std::chrono::steady_clock::now(); }
inline int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Now().time_since_epoch()).count();
}
inline double SecondsSince(SteadyTime since) { return std::chrono::duration<double>(Now() - since).count(); }

}  // namespace kvmanager::tcp
