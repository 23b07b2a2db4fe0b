#include "client/connection.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "absl/strings/str_cat.h"
#include "client/host_slabs.h"
#include "client/tls_dial.h"

namespace kvmanager::client {
namespace {

constexpr int64_t kBackOffMsMin = 1;
constexpr int64_t kBackOffMsMax = 250;
constexpr uint kFdsPerMessage = 1;

/// Also checks that the handles of an earlier process cannot be taken for this thread's.
thread_local std::weak_ptr<ThreadLoop> loop_of_this_thread;

int64_t MsUntil(std::chrono::steady_clock::time_point until) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
}

}  // namespace

absl::StatusOr<std::shared_ptr<ThreadLoop>> ThreadLoop::OfThisThread() {
  if (auto loop = loop_of_this_thread.lock()) {
    if (loop->forks == ForkCount()) return loop;
    // A child that begins anew on the thread that forked: the inherited loop is disowned and leaked.
    loop->scope.reset();
    new std::shared_ptr<ThreadLoop>(loop);
    loop_of_this_thread.reset();
  }
  try {
    auto loop = std::make_shared<ThreadLoop>();  // shared by the connections of this thread
    loop_of_this_thread = loop;
    return loop;
  } catch (const kj::Exception& e) {
    return absl::FailedPreconditionError(
        absl::StrCat("this thread already runs a KJ event loop; connect from a thread of its own (",
                     absl::string_view(e.getDescription().cStr()), ")"));
  }
}

/// One connected socket and the RPC system on it. Members in the order of what depends on what.
struct Connection::Link {
  Link(ThreadLoop& loop, GuardedFd connected, GuardedFd write_side, std::unique_ptr<TlsLink> with, uint fds_per_message)
      : fd(std::move(connected)),
        write_fd(std::move(write_side)),
        tls(std::move(with)),
        stream(loop.port, fd.get(), write_fd.get(), nullptr, tls.get()),
        network(stream, fds_per_message, capnp::rpc::twoparty::Side::CLIENT, Limits()),
        rpc(capnp::makeRpcClient(network)),
        daemon(Bootstrap()),
        lost(network.onDisconnect()
                 .then([this] { is_lost = true; }, [this](kj::Exception&&) { is_lost = true; })
                 .eagerlyEvaluate(nullptr)) {}

  static capnp::ReaderOptions Limits() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 2 * kMessageBytesMax / sizeof(capnp::word);
    return options;
  }
  api::Daemon::Client Bootstrap() {
    capnp::MallocMessageBuilder message(4);
    auto vat = message.initRoot<capnp::rpc::twoparty::VatId>();
    vat.setSide(capnp::rpc::twoparty::Side::SERVER);
    return rpc.bootstrap(vat).castAs<api::Daemon>();
  }

  /// Ends the connection even if a duplicate of the socket is open.
  struct ShutDown {
    ~ShutDown() { ::shutdown(fd, SHUT_RDWR); }
    const int fd;
  };

  bool is_lost = false;
  GuardedFd fd, write_fd;
  const ShutDown shut_down{fd.get()};  // behind what the RPC system still says
  const std::unique_ptr<TlsLink> tls;  // nullptr: plain
  SocketStream stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> rpc;
  api::Daemon::Client daemon;
  std::optional<api::Admin::Client> admin;
  kj::Promise<void> lost;
};

Connection::Connection(Address address, const Client::Options& options, std::shared_ptr<ThreadLoop> loop)
    : address_(std::move(address)), options_(options), loop_(std::move(loop)) {}

Connection::~Connection() {
  slabs_.reset();  // unmapped before the socket is closed: then the daemon sees that this process is done with them
  if (forked()) {  // invariant 2
    (void)link_.release();
    new std::shared_ptr<ThreadLoop>(std::move(loop_));
    return;
  }
  KV_CHECK(thread_ == std::this_thread::get_id());
  try {
    link_.reset();
  } catch (...) {  // KJ destructors may throw; the descriptors are closed all the same
  }
}

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(Address address, const Client::Options& options) {
  KV_ASSIGN_OR_RETURN(auto loop, ThreadLoop::OfThisThread());
  std::shared_ptr<Connection> connection(new Connection(std::move(address), options, std::move(loop)));
  KV_RETURN_IF_ERROR(
      connection->Dial(std::chrono::steady_clock::now() + std::chrono::milliseconds(options.connect_ms)));
  return connection;
}

absl::Status Connection::Reconnect() {
  if (forked() || thread_ != std::this_thread::get_id()) return Usable();
  if (Connected()) return absl::OkStatus();
  return Dial(std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.connect_ms));
}

absl::Status Connection::Dial(std::chrono::steady_clock::time_point until) {
  slabs_ = std::make_shared<HostSlabs>();  // shared with the leases of the link
  try {
    link_.reset();
  } catch (...) {
  }
  ++generation_;  // even if this fails, what was before is void
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<const TlsContext> context, MakeTlsContext(address_, options_));
  for (int64_t pause_ms = kBackOffMsMin;; pause_ms = std::min(2 * pause_ms, kBackOffMsMax)) {
    absl::Status status;
    int64_t hello_ms = options_.hello_ms;
    auto fd = client::Dial(address_, std::max<int64_t>(MsUntil(until), 1));
    absl::StatusOr<std::unique_ptr<TlsLink>> tls = nullptr;
    if (fd.ok() && context != nullptr) {
      tls = ShakeHands(context, address_, options_, fd->get(), std::max<int64_t>(MsUntil(until), 1));
    }
    if (!tls.ok()) {
      status = tls.status();
      if (!absl::IsUnavailable(status)) return status;
    } else if (fd.ok()) {
      try {
        GuardedFd write_fd = Guarded([&fd] { return ::fcntl(fd->get(), F_DUPFD_CLOEXEC, 0); });
        if (!write_fd.valid())
          return absl::ResourceExhaustedError(absl::StrCat("duplicating a socket: ", std::strerror(errno)));
        link_ = std::make_unique<Link>(*loop_, *std::move(fd), std::move(write_fd), *std::move(tls),
                                       address_.is_unix ? kFdsPerMessage : 0);
        if (hello_ms == 0) hello_ms = std::max<int64_t>(MsUntil(until), 1);
        status = Hello(hello_ms);
      } catch (...) {
        status = FromException(Caught());
      }
      if (status.ok()) return status;
      // In TLS 1.3 a daemon's refusal comes behind the handshake, in place of its answer.
      if (link_ != nullptr && link_->tls != nullptr && !link_->tls->failure().ok()) {
        status = TlsFailure(address_, link_->tls->failure());
      } else if (link_ != nullptr && link_->stream.other_speaks_tls()) {
        status = SpeaksTls(address_);
      }
      try {
        link_.reset();
      } catch (...) {
      }
      if (absl::IsDeadlineExceeded(status)) {
        return absl::UnavailableError(absl::StrCat("connected to ", address_.text, ", but it did not answer within ",
                                                   hello_ms, " ms; is it a kvmanagerd?"));
      }
      if (!absl::IsUnavailable(status)) return status;
    } else {
      status = fd.status();
    }
    if (MsUntil(until) <= pause_ms) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
  }
}

absl::Status Connection::Hello(int64_t deadline_ms) {
  auto request = link_->daemon.helloRequest();
  auto hello = request.initRequest();
  hello.setApiMajor(api::API_MAJOR);
  hello.setApiMinor(api::API_MINOR);
  hello.setClient(ToKj(options_.name));
  hello.setPid(uint32_t(::getpid()));
  if (!options_.token.empty()) hello.setToken(ToKj(options_.token));
  auto promise = WithDeadline<absl::Status>(request.send().then([this](auto&& response) -> absl::Status {
    const auto reply = response.getReply();
    KV_RETURN_IF_ERROR(FromWire(reply.getStatus()));
    if (reply.getApiMajor() != api::API_MAJOR) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "api_major", absl::StrCat(reply.getApiMajor()),
                        absl::StrCat(api::API_MAJOR, ": install client and daemon of one major version"));
    }
    bool tokens = false;
    admin_elsewhere_ = maps_blocks_ = false;
    for (const auto feature : reply.getFeatures()) {
      tokens |= feature == "tokens";
      admin_elsewhere_ |= feature == "admin-socket";
      maps_blocks_ |= feature == "map-blocks";
    }
    if (!tokens && !options_.token.empty()) {
      return absl::UnimplementedError("the daemon is of an earlier version and knows no tokens; connect without one");
    }
    boot_epoch_ = reply.getBootEpoch();
    peer_address_ = ToString(reply.getPeerAddress());
    message_bytes_max_ = kMessageBytesMax;
    if (reply.getMessageBytesMax() > 0) message_bytes_max_ = std::min(reply.getMessageBytesMax(), kMessageBytesMax);
    return absl::OkStatus();
  }),
                                            deadline_ms);
  return Await(promise);
}

absl::Status Connection::Usable(uint64_t generation) const {
  if (forked()) {
    return absl::FailedPreconditionError(
        "this process was forked from the client's; it must connect a client of its own");
  }
  if (thread_ != std::this_thread::get_id()) {
    return absl::FailedPreconditionError(
        "called on another thread than the one that connected; use a client per thread");
  }
  if (generation != generation_) {
    return absl::FailedPreconditionError(
        "this handle is of an earlier connection, whose leases are gone; open and create again");
  }
  if (link_ == nullptr || link_->is_lost) return Lost();
  return absl::OkStatus();
}

absl::Status Connection::Lost() const {
  return absl::UnavailableError(
      absl::StrCat("the connection to ", address_.text, " is lost, and its leases with it; Reconnect()"));
}

api::Daemon::Client& Connection::daemon() { return link_->daemon; }

api::Admin::Client& Connection::admin() {
  if (!link_->admin.has_value()) link_->admin.emplace(link_->daemon.adminRequest().send().getAdmin());
  return *link_->admin;
}

GuardedFd Connection::DuplicateSocket() const {
  return Guarded([this] { return ::fcntl(link_->fd.get(), F_DUPFD_CLOEXEC, 0); });
}

bool Connection::Connected() {
  if (!Usable().ok()) return false;
  Pump();
  return !link_->is_lost;
}

void Connection::Pump() noexcept {
  try {
    loop_->scope->poll();
  } catch (...) {  // what failed is known to whoever waits for it
  }
}

kj::Exception Connection::Caught() {
  try {
    throw;
  } catch (const kj::Exception& e) {
    return kj::cp(e);
  } catch (const std::exception& e) {
    return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(e.what()));
  }
}

absl::Status Connection::FromException(const kj::Exception& e) {
  Pump();  // lets the end of the connection be seen before it is asked about
  if (e.getType() == kj::Exception::Type::DISCONNECTED || link_ == nullptr || link_->is_lost) {
    if (link_ != nullptr) link_->is_lost = true;
    return Lost();
  }
  const std::string text(e.getDescription().begin(), e.getDescription().size());
  switch (e.getType()) {
    case kj::Exception::Type::OVERLOADED:
      return absl::ResourceExhaustedError(text);
    case kj::Exception::Type::UNIMPLEMENTED:
      return absl::UnimplementedError(absl::StrCat("the daemon does not have this call: ", text));
    default:
      return absl::InternalError(text);
  }
}

}  // namespace kvmanager::client
