#include "transport/tcp/io_thread.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "transport/device_copier.h"
#include "transport/tcp/dial.h"
#include "transport/tcp/host_port.h"
#include "transport/tcp/incoming.h"
#include "transport/tcp/local.h"
#include "transport/tcp/peer_auth.h"
#include "transport/tcp/pending_connection.h"
#include "transport/tcp/tls_relay.h"

namespace kvmanager::tcp {

IoThread::IoThread(TcpTransport::Options options)
    : loop_(std::move(options)),
      work_(loop_.io.get_executor()),
      acceptor_(loop_.io),
      local_acceptor_(loop_.io),
      accept_timer_(loop_.io),
      local_accept_timer_(loop_.io),
      sweep_timer_(loop_.io) {
  loop_.host = ThisHost();
  loop_.copiers = std::make_shared<WorkerPool>(loop_.options.copy_threads);
}

absl::Status IoThread::Listen() {
  if (loop_.options.listen.empty()) return absl::OkStatus();
  KV_ASSIGN_OR_RETURN(const HostPort where, ParseHostPort("peer-listen", loop_.options.listen, true));
  const auto failed = [&](const char* what, const ErrorCode& error) {
    return absl::UnavailableError(
        absl::StrCat("peer-listen ", loop_.options.listen, ": ", what, ": ", error.message()));
  };
  ErrorCode error;
  Resolver resolver(loop_.io);
  const auto resolved =
      resolver.resolve(where.host, absl::StrCat(where.port),
                       asio::ip::resolver_base::numeric_service | asio::ip::resolver_base::passive, error);
  if (error || resolved.empty()) return failed("resolving", error);
  asio::ip::tcp::endpoint endpoint = resolved.begin()->endpoint();
  if (const int fd = TakeListening(loop_.options.listen_fd, endpoint.protocol().family()); fd >= 0) {
    acceptor_.assign(endpoint.protocol(), fd, error);
    if (error) return failed("taking over", error);
  } else {
    acceptor_.open(endpoint.protocol(), error);
    if (error) return failed("opening a socket", error);
    TuneEarly(acceptor_.native_handle());
    acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    acceptor_.bind(endpoint, error);
    if (error) return failed("binding", error);
    acceptor_.listen(kBacklog, error);
    if (error) return failed("listening", error);
  }
  endpoint = acceptor_.local_endpoint(error);
  if (error) return failed("asking for the port", error);
  listen_address_ = FormatHostPort(where.host, endpoint.port());
  return loop_.options.local_connections ? ListenLocally() : absl::OkStatus();
}

absl::Status IoThread::ListenLocally() {
  std::string name = NewLocalName();
  ErrorCode error;
  local_acceptor_.open({}, error);
  if (!error) TuneEarly(local_acceptor_.native_handle());
  if (!error) local_acceptor_.bind(LocalEndpoint(name), error);
  if (!error) local_acceptor_.listen(kBacklog, error);
  if (error) return absl::UnavailableError(absl::StrCat("listening for local data connections: ", error.message()));
  loop_.local_name = std::move(name);
  loop_.regions = std::make_unique<RegionCache>(loop_.io, *loop_.copiers);
  return absl::OkStatus();
}

void IoThread::Run() {
  if (acceptor_.is_open()) Accept(acceptor_, accept_timer_);
  if (local_acceptor_.is_open()) Accept(local_acceptor_, local_accept_timer_);
  if (loop_.options.device_copier != nullptr) SweepSlabs();
  thread_ = std::thread([this] {
    loop_.io.run();
    // What was posted before the gate closed still runs: a late offer's hand-off is aborted, not forgotten.
    loop_.gate->Close();
    loop_.io.restart();
    loop_.io.run();
  });
}

void IoThread::Shutdown() {
  loop_.gate->Post([this](Loop& loop) {
    loop.stopping = true;
    ErrorCode ignored;
    acceptor_.close(ignored);
    local_acceptor_.close(ignored);
    accept_timer_.cancel();
    local_accept_timer_.cancel();
    sweep_timer_.cancel();
    if (loop.regions != nullptr) loop.regions->Close();
    const absl::Status why = absl::CancelledError("the transport is shutting down");
    while (!loop.outgoing.empty()) std::shared_ptr<Outgoing>(loop.outgoing.begin()->second)->Stop(why);
    while (!loop.incoming.empty()) std::shared_ptr<Incoming>(loop.incoming.begin()->second)->Stop();
    for (const auto& each : std::exchange(loop.authenticating, {})) {
      if (each.auth != nullptr) each.auth->Cancel();
    }
    while (!loop.pending_connections.empty())
      std::shared_ptr<PendingConnection>(*loop.pending_connections.begin())->Stop();
    while (!loop.probes.empty()) std::shared_ptr<Probe>(*loop.probes.begin())->Stop();
    while (!loop.lingering.empty()) std::shared_ptr<FrameLink>(*loop.lingering.begin())->Close();
    const auto relays = loop.relays;
    for (const auto& relay : relays) relay->EndSoon();
    work_.reset();
  });
  thread_.join();
}

uint64_t IoThread::Begin(SendRequest request, SendEvents events) {
  const uint64_t id = next_transfer_.fetch_add(1, std::memory_order_relaxed);
  const bool posted =
      loop_.gate->Post([id, request = std::move(request), events = std::move(events)](Loop& loop) mutable {
        const size_t sent = loop.outgoing.size() + loop.draining;
        if (sent >= loop.options.outgoing_max || loop.stopping) {
          loop.metrics.sent.transfers(TransferResult::kFailed).Increment();
          events.done(FieldError(absl::StatusCode::kResourceExhausted, "hand-offs being sent", absl::StrCat(sent + 1),
                                 absl::StrCat("at most ", loop.options.outgoing_max)));
          return;
        }
        auto transfer = std::make_shared<Outgoing>(loop, id, std::move(request), std::move(events));
        loop.outgoing.emplace(id, transfer);
        transfer->Start();
      });
  KV_CHECK(posted);
  return id;
}

void IoThread::With(uint64_t transfer, absl::AnyInvocable<void(Outgoing&)> call) {
  loop_.gate->Post([transfer, call = std::move(call)](Loop& loop) mutable {
    const auto found = loop.outgoing.find(transfer);
    if (found != loop.outgoing.end()) call(*std::shared_ptr<Outgoing>(found->second));
  });
}

void IoThread::Post(uint64_t transfer, std::vector<SendPage> pages) {
  With(transfer, [pages = std::move(pages)](Outgoing& outgoing) mutable { outgoing.Post(std::move(pages)); });
}

void IoThread::Finish(uint64_t transfer, HandOffPart trailer) {
  With(transfer,
       [trailer = std::move(trailer)](Outgoing& outgoing) mutable { outgoing.FinishParts(std::move(trailer)); });
}

void IoThread::Cancel(uint64_t transfer) {
  With(transfer, [](Outgoing& outgoing) { outgoing.Stop(absl::CancelledError("the hand-off was cancelled")); });
}

void IoThread::Ask(std::string peer, Probe::Done done) {
  loop_.gate->Post([peer = std::move(peer), done = std::move(done)](Loop& loop) mutable {
    if (loop.stopping) return done(absl::CancelledError("the transport is shutting down"));
    if (loop.probes.size() >= kProbesMax) {
      return done(FieldError(absl::StatusCode::kResourceExhausted, "peers being asked",
                             absl::StrCat(loop.probes.size() + 1), absl::StrCat("at most ", kProbesMax)));
    }
    auto probe = std::make_shared<Probe>(loop, std::move(peer), std::move(done));
    loop.probes.insert(probe);
    probe->Start();
  });
}

template <typename SomeAcceptor>
void IoThread::Accept(SomeAcceptor& acceptor, Timer& retry) {
  using Accepted = asio::basic_stream_socket<typename SomeAcceptor::protocol_type, Executor>;
  acceptor.async_accept([this, &acceptor, &retry](const ErrorCode& error, Accepted socket) {
    if (!acceptor.is_open()) return;
    if (!error) {
      std::string host = "local", peer = "local";
      if constexpr (std::is_same_v<SomeAcceptor, Acceptor>) {
        ErrorCode gone;
        const asio::ip::tcp::endpoint endpoint = socket.remote_endpoint(gone);
        host = gone ? "unknown" : endpoint.address().to_string(gone);
        peer = FormatHostPort(host, endpoint.port());
        auto tls = loop_.options.tls == nullptr ? nullptr : loop_.options.tls->Get().peers_in;
        if (loop_.options.peer_key.empty() && tls == nullptr) {
          OnAccepted(Socket(std::move(socket)), std::move(host), std::move(peer));
        } else {
          Authenticate(Socket(std::move(socket)), std::move(tls), std::move(host), std::move(peer));
        }
      } else if (IsOfOwnUser(socket.native_handle())) {
        OnAccepted(Socket(std::move(socket)), std::move(host), std::move(peer));
      }
      return Accept(acceptor, retry);
    }
    if (error == asio::error::connection_aborted) return Accept(acceptor, retry);
    retry.expires_after(std::chrono::milliseconds(kAcceptRetryMs));
    retry.async_wait([this, &acceptor, &retry](const ErrorCode& stopped) {
      if (!stopped && acceptor.is_open()) Accept(acceptor, retry);
    });
  });
}

void IoThread::SweepSlabs() {
  loop_.options.device_copier->Sweep();
  sweep_timer_.expires_after(std::chrono::milliseconds(kSweepMs));
  sweep_timer_.async_wait([this](const ErrorCode& stopped) {
    if (!stopped && !loop_.stopping) SweepSlabs();
  });
}

void IoThread::Authenticate(Socket socket, std::shared_ptr<const TlsContext> tls, std::string host, std::string peer) {
  const auto of_host = std::count_if(loop_.authenticating.begin(), loop_.authenticating.end(),
                                     [&](const auto& each) { return each.host == host; });
  if (loop_.authenticating.size() >= kAuthenticatingMax || of_host >= std::ptrdiff_t{kAuthenticatingOfHostMax}) {
    loop_.metrics.connections_refused.Increment();
    return;
  }
  const auto at = loop_.authenticating.insert(loop_.authenticating.end(), {std::move(host), nullptr, nullptr});
  if (tls == nullptr) return ExchangeKeys(at, std::move(socket), std::move(peer));
  at->tls = std::make_shared<TlsRelay>(loop_, std::move(socket), std::move(tls), "",
                                       [this, at, peer](const absl::Status& status, Socket proven) {
                                         at->tls = nullptr;
                                         if (status.ok()) return ExchangeKeys(at, std::move(proven), peer);
                                         loop_.authenticating.erase(at);
                                         CountAuthFailure(loop_, AuthRole::kAcceptor, peer, status);
                                       });
  const auto relay = at->tls;
  relay->Start();
}

void IoThread::ExchangeKeys(std::list<Loop::Authenticating>::iterator at, Socket socket, std::string peer) {
  auto done = [this, at, peer](const absl::Status& status, Socket proven) {
    std::string from = std::move(at->host);
    loop_.authenticating.erase(at);
    if (status.ok()) return OnAccepted(std::move(proven), std::move(from), peer);
    CountAuthFailure(loop_, AuthRole::kAcceptor, peer, status);
  };
  if (loop_.options.peer_key.empty()) return done(absl::OkStatus(), std::move(socket));
  at->auth = std::make_shared<PeerAuth>(loop_, std::move(socket), AuthRole::kAcceptor, std::move(done));
  at->auth->Start();
}

void IoThread::OnAccepted(Socket socket, std::string host, std::string peer) {
  if (loop_.pending_connections.size() >= loop_.options.pending_connections_max) {
    loop_.metrics.connections_refused.Increment();
    return;
  }
  auto pending_connection =
      std::make_shared<PendingConnection>(loop_, std::move(socket), std::move(host), std::move(peer));
  loop_.pending_connections.insert(pending_connection);
  pending_connection->Start();
}

}  // namespace kvmanager::tcp
