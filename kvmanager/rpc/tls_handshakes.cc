#include "kvmanager/rpc/tls_handshakes.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/socket_peer.h"

namespace kvmanager {
namespace {

constexpr int64_t kLogEveryNs = 1000000000;
constexpr int64_t kDrainMs = 200;  // for a client to read why it is refused
constexpr size_t kDrainBytesMax = 256 << 10;

}  // namespace

class TlsHandshakes::Handshake {
 public:
  // Shared with the worker that takes a step, which may be later than the end of the handshake.
  struct Socket {
    kj::AutoCloseFd fd;
    std::unique_ptr<TlsLink> tls;  // goes before fd
  };

  Handshake(const Parts& parts, int fd, std::shared_ptr<const TlsContext> context, Done done)
      : parts_(parts),
        socket_(std::make_shared<Socket>()),
        readable_(parts.loop->port(), fd, kj::UnixEventPort::FdObserver::OBSERVE_READ),
        evicted_(kj::newPromiseAndFulfiller<void>()),
        peer_(PeerAddress(fd)),
        done_(std::move(done)) {
    socket_->fd = kj::AutoCloseFd(fd);
    socket_->tls = std::make_unique<TlsLink>(std::move(context), fd);
  }

  const std::string& peer() const { return peer_; }
  void Evict() { evicted_.fulfiller->fulfill(); }

  /// OK: it succeeded. Else the client has read why, or had time to.
  kj::Promise<absl::Status> Run() {
    const auto other = [](kj::Promise<void> when, absl::string_view why) {
      return when.then([why] { return absl::Status(absl::StatusCode::kDeadlineExceeded, why); });
    };
    return GoOn()
        .exclusiveJoin(other(parts_.loop->timer().afterDelay(limits::kTlsHandshakeMs * kj::MILLISECONDS),
                             "it did not end in time"))
        .exclusiveJoin(other(kj::mv(evicted_.promise), "another connection needed its place"));
  }

  /// Once its promises are gone.
  static void HandOver(std::unique_ptr<Handshake> handshake) {
    const std::shared_ptr<Socket> socket = handshake->socket_;
    Done done = std::move(handshake->done_);
    handshake.reset();  // a descriptor is watched once
    done(kj::mv(socket->fd), std::move(socket->tls));
  }

 private:
  kj::Promise<absl::Status> GoOn() {
    // Before the worker reads: what comes when it has is an edge that would not come again.
    auto readable = readable_.whenBecomesReadable();
    return OnWorker<TlsLink::Step>(parts_.workers, parts_.queue, WorkerPool::kDaemon,
                                   [socket = socket_] { return socket->tls->Handshake(); })
        .then([this, readable = kj::mv(readable)](TlsLink::Step step) mutable -> kj::Promise<absl::Status> {
          if (step == TlsLink::Step::kDone) return absl::OkStatus();
          if (step == TlsLink::Step::kWantRead) return readable.then([this] { return GoOn(); });
          absl::Status why = socket_->tls->failure();
          if (why.ok()) why = absl::UnavailableError("the client reads nothing");  // kWantWrite
          return Drain().then([why = std::move(why)] { return why; });
        });
  }

  // Closing a socket with unread bytes would reset the connection, and destroy the alert on its way.
  kj::Promise<void> Drain() {
    ::shutdown(socket_->fd.get(), SHUT_WR);
    return ReadAway().exclusiveJoin(parts_.loop->timer().afterDelay(kDrainMs * kj::MILLISECONDS));
  }

  kj::Promise<void> ReadAway() {
    char some[4096];
    while (drained_ < kDrainBytesMax) {
      const ssize_t n = ::recv(socket_->fd.get(), some, sizeof some, MSG_DONTWAIT);
      if (n < 0 && errno == EAGAIN) return readable_.whenBecomesReadable().then([this] { return ReadAway(); });
      if (n == 0 || (n < 0 && errno != EINTR)) break;
      if (n > 0) drained_ += size_t(n);
    }
    return kj::READY_NOW;
  }

  const Parts& parts_;
  const std::shared_ptr<Socket> socket_;
  kj::UnixEventPort::FdObserver readable_;
  kj::PromiseFulfillerPair<void> evicted_;
  const std::string peer_;
  Done done_;
  size_t drained_ = 0;
};

TlsHandshakes::TlsHandshakes(const Parts& parts)
    : parts_(parts), tasks_(std::make_unique<kj::TaskSet>(static_cast<kj::TaskSet::ErrorHandler&>(*this))) {}

TlsHandshakes::~TlsHandshakes() { tasks_.reset(); }

void TlsHandshakes::Start(int fd, std::shared_ptr<const TlsContext> context, Done done) {
  if (handshakes_.size() >= limits::kTlsHandshakesMax) handshakes_.begin()->second->Evict();
  const uint64_t id = next_id_++;
  auto& handshake = *(handshakes_[id] = std::make_unique<Handshake>(parts_, fd, std::move(context), std::move(done)));
  tasks_->add(handshake.Run().then([this, id](const absl::Status& status) {
    // What it waited for is gone before this is called.
    std::unique_ptr<Handshake> ended = std::move(handshakes_.extract(id).mapped());
    if (status.ok()) return Handshake::HandOver(std::move(ended));
    parts_.metrics->ended(EndReason::kTls).Increment();
    Log(ended->peer(), status);
  }));
}

void TlsHandshakes::Log(const std::string& peer, const absl::Status& why) {
  const int64_t now_ns = SteadyClock().NowNs();
  if (now_ns - logged_ns_ < kLogEveryNs) {
    ++unlogged_;
    return;
  }
  logged_ns_ = now_ns;
  const uint64_t others = std::exchange(unlogged_, 0);
  spdlog::warn("the TLS handshake with a client at {} failed: {}{}{}", peer, std::string(why.message()),
               absl::IsFailedPrecondition(why) ? "; clients of this address connect to tls:HOST:PORT" : "",
               others == 0 ? std::string() : absl::StrCat(" (and ", others, " others since the last)"));
}

void TlsHandshakes::taskFailed(kj::Exception&& exception) {
  spdlog::error("TLS handshake: {}", exception.getDescription().cStr());
}

}  // namespace kvmanager
