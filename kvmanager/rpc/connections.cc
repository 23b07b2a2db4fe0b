#include "kvmanager/rpc/connections.h"

#include <capnp/rpc-twoparty.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize-async.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/api/socket_stream.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/socket_peer.h"

namespace kvmanager {
namespace {

constexpr int64_t kAcceptRetryMs = 100;  // when the process has no descriptor left
constexpr int64_t kAbortGraceMs = 200;   // to tell a client what was wrong with its bytes
constexpr uint32_t kFdsPerMessageMax = 1;
constexpr int kFdsPerConnection = 3;
// Of replies, written to one connection before others' turn: 0.1 ms. A step of another waits for about ten of these.
constexpr size_t kWriteTurnBytes = 64 << 10;
constexpr int kAcceptsInARow = 4;  // half a millisecond of the loop; then whatever else is to be done
constexpr int64_t kAcceptPauseMs = 2;

using Segments = kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>;

// Tells the loop that a message came, the connection that its bytes were malformed, and its share of memory which
// messages were sent. Where the client sends faster than it is served, others have their turn behind kMessagesInARow:
// the loop looks at sockets, and at what workers have done, only once nothing is ready.
class WatchedStream final : public capnp::MessageStream {
 public:
  WatchedStream(SocketStream& inner, MessageQueue* queue, TakingTurns* turns,
                absl::AnyInvocable<void(capnp::MessageReader*)> on_message, SessionMessages& messages,
                absl::AnyInvocable<void(Segments)> on_sent, absl::AnyInvocable<void(const kj::Exception&)> on_error)
      : inner_(inner),
        queue_(queue),
        turns_(turns),
        on_message_(std::move(on_message)),
        messages_(messages),
        on_sent_(std::move(on_sent)),
        on_error_(std::move(on_error)) {}

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> tryReadMessage(kj::ArrayPtr<kj::AutoCloseFd> fd_space,
                                                                    capnp::ReaderOptions options,
                                                                    kj::ArrayPtr<capnp::word> scratch) override {
    if (messages_.reading_held()) {
      return messages_.WhenReadingGoesOn().then(
          [this, fd_space, options, scratch] { return tryReadMessage(fd_space, options, scratch); });
    }
    if (inner_.waits() != waits_) {
      waits_ = inner_.waits();
      in_a_row_ = 0;
    }
    if (in_a_row_++ < kMessagesInARow) return Read(fd_space, options, scratch);
    in_a_row_ = 1;
    auto turn = kj::newPromiseAndFulfiller<void>();
    queue_->Post([fulfiller = kj::mv(turn.fulfiller)]() mutable { fulfiller->fulfill(); });
    return turn.promise.then([this, fd_space, options, scratch] { return Read(fd_space, options, scratch); });
  }
  kj::Promise<void> writeMessage(kj::ArrayPtr<const int> fds, Segments segments) override {
    uint64_t bytes = 0;
    for (const auto& segment : segments) bytes += segment.asBytes().size();
    if (bytes < MessageRoom::kOwnBytes && !messages_.replies().counts_unsent())
      return inner_.writeMessage(fds, segments);
    return inner_.writeMessage(fds, segments).then([this, segments] { on_sent_(segments); });
  }
  kj::Promise<void> writeMessages(kj::ArrayPtr<kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>>> messages) override {
    return inner_.writeMessages(messages);
  }
  kj::Maybe<int> getSendBufferSize() override { return inner_.getSendBufferSize(); }
  kj::Promise<void> end() override { return inner_.end(); }

 private:
  static constexpr int kMessagesInARow = 4;  // a call, and what ends those before it

  kj::Promise<kj::Maybe<capnp::MessageReaderAndFds>> Read(kj::ArrayPtr<kj::AutoCloseFd> fd_space,
                                                          capnp::ReaderOptions options,
                                                          kj::ArrayPtr<capnp::word> scratch) {
    using Message = kj::Maybe<capnp::MessageReaderAndFds>;
    return inner_.tryReadMessage(fd_space, options, scratch)
        .then(
            [this](Message&& message) -> kj::Promise<Message> {
              KJ_IF_MAYBE (came, message) {
                on_message_(came->reader.get());
              } else {
                on_message_(nullptr);
              }
              if (message != nullptr) return kj::mv(message);
              // Thousands of connections may end at once, and what each leaves is taken apart when this is known.
              return turns_->Next().then([]() -> Message { return nullptr; });
            },
            [this](kj::Exception&& exception) -> kj::Promise<Message> {
              if (exception.getType() != kj::Exception::Type::DISCONNECTED) on_error_(exception);
              kj::throwFatalException(kj::mv(exception));
            });
  }

  SocketStream& inner_;
  MessageQueue* const queue_;
  TakingTurns* const turns_;
  uint64_t waits_ = 0;  // of inner_, when it was last looked at
  int in_a_row_ = 0;    // messages read since
  absl::AnyInvocable<void(capnp::MessageReader*)> on_message_;
  SessionMessages& messages_;
  absl::AnyInvocable<void(Segments)> on_sent_;
  absl::AnyInvocable<void(const kj::Exception&)> on_error_;
};

void TuneTcp(int fd) {
  const auto set = [fd](int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof value); };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, limits::kTcpDeadS / 3);
  set(IPPROTO_TCP, TCP_KEEPINTVL, limits::kTcpDeadS / 3);
  set(IPPROTO_TCP, TCP_KEEPCNT, 2);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, limits::kTcpDeadS * 1000);
}

// A descriptor of this number or above is left to administrators.
int FdsForOthers() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > rlim_t{INT_MAX}) return INT_MAX;
  const rlim_t reserve = std::min<rlim_t>(kFdsPerConnection * limits::kAdminConnectionsMax, limit.rlim_cur / 4);
  return static_cast<int>(limit.rlim_cur - reserve);
}

capnp::ReaderOptions Limits() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = limits::kMessageBytesMax / sizeof(capnp::word);
  return options;
}

}  // namespace

class Connections::Connection {
 public:
  Connection(const Parts& parts, uint64_t id, uint64_t origin, kj::AutoCloseFd fd, std::unique_ptr<TlsLink> tls,
             const Proof& proof, const ucred& peer, ConnectionEndLog* log)
      : parts_(parts),
        log_(log),
        id_(id),
        origin_(origin),
        admin_(proof.admin),
        fd_(kj::mv(fd)),
        write_fd_(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0)),
        peer_(DescribePeer(fd_.get(), proof.unix_socket)),
        tls_(std::move(tls)),
        ending_(kj::newPromiseAndFulfiller<void>()),
        session_(std::make_shared<Session>(*parts.session, proof, static_cast<uint32_t>(peer.pid),
                                           [this](EndReason reason, const std::string& why) { End(reason, why); })),
        stream_(parts.loop->port(), fd_.get(), write_fd_.get(), session_->messages().requests(), tls_.get(),
                kWriteTurnBytes),
        watched_(
            stream_, &parts.loop->queue(), parts.daemon->cache.sequence.long_calls,
            [this](capnp::MessageReader* message) { OnMessage(message); }, session_->messages(),
            [this](Segments segments) {
              session_->messages().replies().NoteSent(segments, network_.getCurrentQueueSize());
            },
            [this](const kj::Exception& exception) { OnMalformed(exception); }),
        network_(watched_, proof.unix_socket ? kFdsPerMessageMax : 0, capnp::rpc::twoparty::Side::SERVER, Limits()),
        rpc_(capnp::makeRpcServer(network_, MakeDaemonService(session_, *parts.daemon))) {
    rpc_.setFlowLimit(limits::kCallsInFlightBytesMax / sizeof(capnp::word));
    hello_ = parts.loop->timer()
                 .afterDelay(limits::kHelloMs * kj::MILLISECONDS)
                 .then([this] { SaidNoHello(); })
                 .eagerlyEvaluate(nullptr);
    if (proof.unix_socket) {
      pidfd_ = kj::AutoCloseFd(PeerPidFd(fd_.get()));
      if (pidfd_.get() >= 0) {
        death_ = kj::heap<kj::UnixEventPort::FdObserver>(parts.loop->port(), pidfd_.get(),
                                                         kj::UnixEventPort::FdObserver::OBSERVE_READ);
      }
    }
  }

  ~Connection() {
    session_->Detach();
    parts_.metrics->ended(reason_).Increment();
    spdlog::debug("connection {} of \"{}\" ended: {}", id_, session_->name(), EndReasonName(reason_));
  }

  /// Resolves when the connection is to be removed.
  kj::Promise<void> WhenOver() {
    kj::Promise<void> over = network_.onDisconnect().exclusiveJoin(kj::mv(ending_.promise));
    KJ_IF_MAYBE (death, death_) {
      over = over.exclusiveJoin((*death)->whenBecomesReadable().then([this] { reason_ = EndReason::kProcessDied; }));
    }
    return over;
  }

  void set_reason(EndReason reason) { reason_ = reason; }
  uint32_t pid() const { return session_->pid(); }
  bool unix_socket() const { return session_->proof().unix_socket; }
  uint64_t origin() const { return origin_; }
  /// Whether it may make room for another.
  bool says_nothing() const { return !session_->handshake_done() && !ending_soon_; }
  void EndNow(EndReason reason) {
    ending_soon_ = true;
    reason_ = reason;
    ending_.fulfiller->fulfill();
  }
  bool admin() const { return admin_; }

 private:
  /// message: nullptr: there are no more.
  void OnMessage(capnp::MessageReader* message) {
    parts_.loop->NoteActivity();
    if (message != nullptr) CountCall(*message);
    const uint64_t unsent = network_.getCurrentQueueSize();
    MessageShare& replies = session_->messages().replies();
    replies.NoteUnsent(unsent);
    // A message of the queue finds no call between its end and its reply.
    if (unsent == 0 && replies.lends() && !looks_soon_) {
      looks_soon_ = true;
      parts_.loop->queue().Post([this, alive = std::weak_ptr<const bool>(alive_)] {
        if (alive.expired()) return;
        looks_soon_ = false;
        if (network_.getCurrentQueueSize() == 0) session_->messages().replies().DropUnsent();
      });
    }
    if (unsent > limits::kReplyMemoryBytesMax + limits::kUnsentBytesMax) {
      End(EndReason::kUnread, absl::StrCat("more than ", limits::kReplyMemoryBytesMax + limits::kUnsentBytesMax,
                                           " bytes of replies wait to be read"));
    }
    // What it still sends is not looked at.
    if (ending_soon_) kj::throwFatalException(KJ_EXCEPTION(DISCONNECTED, "this connection ends"));
  }

  // What is no message of Cap'n Proto's RPC ends the connection where it is read.
  void CountCall(capnp::MessageReader& message) {
    auto which = capnp::rpc::Message::UNIMPLEMENTED;
    (void)kj::runCatchingExceptions([&] { which = message.getRoot<capnp::rpc::Message>().which(); });
    const bool begins = which == capnp::rpc::Message::CALL || which == capnp::rpc::Message::BOOTSTRAP;
    if (begins && ++unfinished_ > limits::kUnfinishedCallsMax) {
      End(EndReason::kUnread,
          absl::StrCat("more than ", limits::kUnfinishedCallsMax, " calls that it has not finished"));
    }
    if (which == capnp::rpc::Message::FINISH && unfinished_ > 0) --unfinished_;
  }

  // It is silent, or no client of kvmanager.
  void SaidNoHello() {
    if (session_->handshake_done()) return;
    End(EndReason::kNoHello,
        absl::StrCat("it did not say hello, with which a client begins, within ", limits::kHelloMs / 1000, " s"));
  }

  void OnMalformed(const kj::Exception& exception) {
    parts_.session->calls->NoteMalformed();
    End(EndReason::kFraming, absl::StrCat("malformed message: ", exception.getDescription().cStr()));
  }

  void End(EndReason reason, const std::string& why) {
    if (ending_soon_) return;
    ending_soon_ = true;
    reason_ = reason;
    log_->Note(id_, session_->name(), peer_, reason, why);
    grace_ = parts_.loop->timer()
                 .afterDelay(kAbortGraceMs * kj::MILLISECONDS)
                 .then([this] { ending_.fulfiller->fulfill(); })
                 .eagerlyEvaluate(nullptr);
  }

  const Parts& parts_;
  ConnectionEndLog* const log_;
  const uint64_t id_, origin_;
  const bool admin_;
  kj::AutoCloseFd fd_, write_fd_;
  const std::string peer_;              // for the log: a socket that was reset does not say it
  const std::unique_ptr<TlsLink> tls_;  // nullptr: plain
  kj::PromiseFulfillerPair<void> ending_;
  EndReason reason_ = EndReason::kClosed;
  size_t unfinished_ = 0;  // calls whose answers are kept here
  bool ending_soon_ = false;
  bool looks_soon_ = false;  // whether something is to be sent
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
  // Shared with the capabilities and running calls of this connection.
  const std::shared_ptr<Session> session_;
  SocketStream stream_;
  WatchedStream watched_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc_;
  kj::AutoCloseFd pidfd_;
  kj::Maybe<kj::Own<kj::UnixEventPort::FdObserver>> death_;
  kj::Promise<void> hello_ = nullptr;
  kj::Promise<void> grace_ = nullptr;
};

struct Connections::Listener {
  Listener(kj::UnixEventPort& port, const ListenSocket& s)
      : socket(s), observer(port, s.fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ) {}
  const ListenSocket& socket;
  kj::UnixEventPort::FdObserver observer;
};

Connections::Connections(const Parts& parts, const std::vector<std::unique_ptr<ListenSocket>>& sockets)
    : parts_(parts),
      end_log_(&parts_.loop->timer()),
      handshakes_({parts.loop, parts.daemon->workers, parts.daemon->queue, parts.metrics}),
      tasks_(std::make_unique<kj::TaskSet>(static_cast<kj::TaskSet::ErrorHandler&>(*this))) {
  for (const auto& socket : sockets) {
    listeners_.push_back(std::make_unique<Listener>(parts_.loop->port(), *socket));
    tasks_->add(AcceptFrom(*listeners_.back()));
  }
}

Connections::~Connections() {
  for (auto& [id, connection] : connections_) connection->set_reason(EndReason::kShutdown);
  tasks_.reset();
  connections_.clear();
  parts_.metrics->open.Set(0);
}

kj::Promise<void> Connections::AcceptFrom(Listener& listener) {
  if (parts_.session->requests->closed()) return kj::NEVER_DONE;
  for (int accepted = 0;; ++accepted) {
    if (accepted == kAcceptsInARow) {
      return parts_.loop->timer().afterDelay(kAcceptPauseMs * kj::MILLISECONDS).then([this, &listener] {
        return AcceptFrom(listener);
      });
    }
    const bool fails = Fails(Failpoint::kAccept);
    const int fd = fails ? -1 : accept4(listener.socket.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fails) errno = EMFILE;
    if (fd >= 0) {
      Accept(fd, listener.socket);
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) {
      return listener.observer.whenBecomesReadable().then([this, &listener] { return AcceptFrom(listener); });
    }
    spdlog::error("accepting on {}: {}", listener.socket.address(), std::strerror(errno));
    return parts_.loop->timer().afterDelay(kAcceptRetryMs * kj::MILLISECONDS).then([this, &listener] {
      return AcceptFrom(listener);
    });
  }
}

const char* Connections::WhyRefused(int fd, const ListenSocket& socket, const ucred& peer, uint64_t origin) {
  if (socket.admin()) {
    if (peer.uid != 0 && peer.uid != geteuid()) return "only the daemon's user and root administer";
    return admin_connections_ < limits::kAdminConnectionsMax ? nullptr : "as many administer as may";
  }
  if (of_process_.Of(static_cast<uint32_t>(peer.pid)) >= limits::kConnectionsOfProcessMax)
    return "its process has as many as one may have";
  const bool origin_full = socket.unix_socket() ? of_user_.Of(origin) >= limits::kConnectionsOfUserMax
                                                : of_host_.Of(origin) >= limits::kConnectionsOfHostMax;
  const bool tcp_full = !socket.unix_socket() && tcp_connections_ >= limits::kTcpConnectionsMax;
  const bool full = connections_.size() - admin_connections_ >= limits::kConnectionsMax || fd >= FdsForOthers();
  if (!origin_full && !tcp_full && !full) return nullptr;
  for (const auto& [id, connection] : connections_) {
    if (connection->admin() || !connection->says_nothing() || (tcp_full && connection->unix_socket())) continue;
    if (origin_full && connection->origin() != origin) continue;
    connection->EndNow(EndReason::kNoHello);
    return nullptr;
  }
  return origin_full ? "its user, or its host, has as many as one may have" : "as many are open as may be";
}

void Connections::Accept(int fd, const ListenSocket& socket) {
  if (socket.unix_socket()) return Add(kj::AutoCloseFd(fd), nullptr, socket);
  TuneTcp(fd);
  auto context = parts_.tls == nullptr ? nullptr : parts_.tls->Get().clients;
  if (context == nullptr) return Add(kj::AutoCloseFd(fd), nullptr, socket);
  handshakes_.Start(fd, std::move(context), [this, &socket](kj::AutoCloseFd of, std::unique_ptr<TlsLink> tls) {
    Add(kj::mv(of), std::move(tls), socket);
  });
}

void Connections::Add(kj::AutoCloseFd fd, std::unique_ptr<TlsLink> tls, const ListenSocket& socket) {
  const bool unix_socket = socket.unix_socket();
  const ucred peer = unix_socket ? PeerOf(fd.get()) : ucred{0, uid_t(-1), gid_t(-1)};
  const uint64_t origin = OriginOf(fd.get(), peer, unix_socket);
  if (const char* const why = WhyRefused(fd.get(), socket, peer, origin); why != nullptr) {
    parts_.metrics->refused.Increment();
    spdlog::debug("a connection of process {} is refused: {}", peer.pid, why);
    tls.reset();  // before its descriptor
    return;
  }
  Proof proof;
  if (unix_socket) proof.uid = peer.uid;
  if (tls != nullptr && !tls->peer_name().empty()) proof.certificate = tls->peer_name();
  proof.admin = socket.admin();
  proof.unix_socket = unix_socket;
  (unix_socket ? parts_.metrics->accepted_unix : parts_.metrics->accepted_tcp).Increment();
  const uint64_t id = next_id_++;
  auto connection =
      std::make_unique<Connection>(parts_, id, origin, kj::mv(fd), std::move(tls), proof, peer, &end_log_);
  tasks_->add(connection->WhenOver().then([this, id] { End(id); }, [this, id](kj::Exception&&) { End(id); }));
  CountIn(*connection);
  connections_.emplace(id, std::move(connection));
  parts_.metrics->open.Set(double(connections_.size() - admin_connections_));
}

void Connections::CountIn(const Connection& connection) {
  if (connection.admin()) {
    ++admin_connections_;
  } else if (connection.unix_socket()) {
    if (connection.pid() != 0) of_process_.Add(connection.pid());
    of_user_.Add(connection.origin());
  } else {
    ++tcp_connections_;
    of_host_.Add(connection.origin());
  }
}

void Connections::CountOut(const Connection& connection) {
  if (connection.admin()) {
    --admin_connections_;
  } else if (connection.unix_socket()) {
    if (connection.pid() != 0) of_process_.Remove(connection.pid());
    of_user_.Remove(connection.origin());
  } else {
    --tcp_connections_;
    of_host_.Remove(connection.origin());
  }
}

void Connections::End(uint64_t id) {
  ended_.push_back(id);
  if (ended_.size() == 1) tasks_->add(RemoveEnded());
}

// A process that ends may leave thousands.
kj::Promise<void> Connections::RemoveEnded() {
  return parts_.daemon->cache.sequence.long_calls->Next().then([this]() -> kj::Promise<void> {
    for (const Turn turn(TakingTurns::kLength); !ended_.empty() && !turn.over(); ended_.pop_front()) {
      Remove(ended_.front());
    }
    return ended_.empty() ? kj::Promise<void>(kj::READY_NOW) : RemoveEnded();
  });
}

void Connections::Remove(uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const LoopTurn turn(parts_.session->calls->turns(), "connectionEnd");
  const std::unique_ptr<Connection> connection = std::move(found->second);
  connections_.erase(found);
  CountOut(*connection);
  parts_.metrics->open.Set(double(connections_.size() - admin_connections_));
}

Connections::Use Connections::use() const {
  return {.engines = connections_.size() - admin_connections_,
          .tcp = tcp_connections_,
          .admin = admin_connections_,
          .handshakes = handshakes_.size(),
          .of_process = of_process_.most(),
          .of_user = of_user_.most(),
          .of_host = of_host_.most()};
}

void Connections::taskFailed(kj::Exception&& exception) {
  spdlog::error("event loop: {}", exception.getDescription().cStr());
}

}  // namespace kvmanager
