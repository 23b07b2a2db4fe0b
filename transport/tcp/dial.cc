#include "transport/tcp/dial.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/host_port.h"

namespace kvmanager::tcp {

Dial::Dial(Loop& loop, Address to, int64_t stall_ms, Done done)
    : loop_(loop),
      to_(std::move(to)),
      stall_ms_(stall_ms),
      deadline_(Now() + std::chrono::milliseconds(stall_ms)),
      done_(std::move(done)),
      resolver_(loop.io),
      timer_(loop.io),
      socket_(loop.io) {}

void Dial::Start(std::string first) {
  first_ = std::move(first);
  absl::StatusOr<HostPort> peer = HostPort();
  if (!to_.local) peer = ParseHostPort("peer", to_.peer, false);
  if (!peer.ok()) return Finish(std::move(peer).status());
  host_ = peer->host;
  timer_.expires_at(deadline_);
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (error || !self->done_) return;
    self->Finish(FieldError(absl::StatusCode::kDeadlineExceeded,
                            absl::StrCat("ms without an answer of peer ", self->to_.peer),
                            absl::StrCat(self->stall_ms_), absl::StrCat("below ", self->stall_ms_)));
  });
  if (to_.local) {
    endpoints_ = {LocalEndpoint(to_.peer)};
    return ConnectNext({});
  }
  ErrorCode not_numeric;
  const auto address = asio::ip::make_address(peer->host, not_numeric);
  if (!not_numeric) {
    endpoints_ = {asio::generic::stream_protocol::endpoint(asio::ip::tcp::endpoint(address, peer->port))};
    return ConnectNext({});
  }
  resolver_.async_resolve(peer->host, absl::StrCat(peer->port), asio::ip::resolver_base::numeric_service,
                          [self = shared_from_this()](const ErrorCode& error, Resolver::results_type results) {
                            if (!self->done_) return;
                            if (error) {
                              return self->Finish(absl::UnavailableError(
                                  absl::StrCat("peer ", self->to_.peer, ": resolving: ", error.message())));
                            }
                            for (const auto& entry : results) self->endpoints_.emplace_back(entry.endpoint());
                            self->ConnectNext(asio::error::host_not_found);
                          });
}

void Dial::ConnectNext(const ErrorCode& last_error) {
  if (endpoints_tried_ == endpoints_.size()) {
    return Finish(absl::UnavailableError(absl::StrCat("peer ", to_.peer, ": connecting: ", last_error.message())));
  }
  const asio::generic::stream_protocol::endpoint endpoint = endpoints_[endpoints_tried_++];
  ErrorCode error;
  socket_.close(error);
  socket_.open(endpoint.protocol(), error);
  if (error) return ConnectNext(error);
  TuneEarly(socket_.native_handle());
  socket_.async_connect(endpoint, [self = shared_from_this()](const ErrorCode& error) {
    if (!self->done_) return;
    if (error) return self->ConnectNext(error);
    if (Fails(Failpoint::kPeerConnect)) return self->ConnectNext(asio::error::connection_refused);
    // Who listens there is going to be given descriptors of this process's memory.
    if (self->to_.local && !IsOfOwnUser(self->socket_.native_handle())) {
      return self->ConnectNext(asio::error::access_denied);
    }
    self->OnConnected();
  });
}

void Dial::OnConnected() {
  // Of a local connection the kernel says who is there.
  if (to_.local) return SayHello(std::move(socket_));
  auto tls = loop_.options.tls == nullptr ? nullptr : loop_.options.tls->Get().peers_out;
  if (tls == nullptr) return ExchangeKeys(std::move(socket_));
  tls_ = std::make_shared<TlsRelay>(loop_, std::move(socket_), std::move(tls), host_,
                                    [self = shared_from_this()](const absl::Status& status, Socket socket) {
                                      if (status.ok()) return self->ExchangeKeys(std::move(socket));
                                      if (absl::IsUnauthenticated(status))
                                        CountAuthFailure(self->loop_, AuthRole::kDialer, self->to_.peer, status);
                                      self->Finish(self->OfPeer(status.code(), status));
                                    });
  const auto relay = tls_;
  relay->Start();
}

void Dial::ExchangeKeys(Socket socket) {
  if (loop_.options.peer_key.empty()) return SayHello(std::move(socket));
  auth_ = std::make_shared<PeerAuth>(loop_, std::move(socket), AuthRole::kDialer,
                                     [self = shared_from_this()](const absl::Status& status, Socket socket) {
                                       self->auth_ = nullptr;
                                       if (status.ok()) return self->SayHello(std::move(socket));
                                       if (absl::IsUnauthenticated(status)) {
                                         CountAuthFailure(self->loop_, AuthRole::kDialer, self->to_.peer, status);
                                       }
                                       self->Finish(self->OfPeer(status.code(), status));
                                     });
  const auto auth = auth_;
  auth->Start();
}

void Dial::SayHello(Socket socket) {
  handshake_ = std::make_shared<Handshake>(
      loop_, std::move(socket), stall_ms_, deadline_,
      [self = shared_from_this()](absl::Status status, Socket socket, HelloFrame theirs) {
        self->handshake_ = nullptr;
        if (status.ok()) return self->Finish(Connection{std::move(socket), theirs});
        // In TLS 1.3 a peer's refusal comes behind the handshake, in place of its hello.
        if (self->tls_ != nullptr && !self->tls_->failure().ok()) status = self->tls_->failure();
        const bool spoke =
            status.code() == absl::StatusCode::kInvalidArgument || status.code() == absl::StatusCode::kDataLoss;
        if (spoke) self->loop_.metrics.protocol_errors.Increment();
        if (absl::IsUnauthenticated(status)) {
          CountAuthFailure(self->loop_, AuthRole::kDialer, self->to_.peer, status);
        }
        self->Finish(self->OfPeer(spoke ? absl::StatusCode::kUnavailable : status.code(), status));
      });
  const auto handshake = handshake_;
  handshake->Start(first_);
}

absl::Status Dial::OfPeer(absl::StatusCode code, const absl::Status& why) const {
  const absl::string_view said(why.message().data(), why.message().size());
  return WithDetail(absl::Status(code, absl::StrCat("peer ", to_.peer, ": ", said)), DetailOf(why));
}

void Dial::Finish(absl::StatusOr<Connection> result) {
  Done done = std::exchange(done_, nullptr);
  const auto self = shared_from_this();
  Cancel();
  done(std::move(result));
}

void Dial::Cancel() {
  done_ = nullptr;
  ErrorCode ignored;
  socket_.close(ignored);
  resolver_.cancel();
  timer_.cancel();
  if (tls_ != nullptr) std::exchange(tls_, nullptr)->Cancel();
  if (auth_ != nullptr) std::exchange(auth_, nullptr)->Cancel();
  if (handshake_ != nullptr) std::exchange(handshake_, nullptr)->Cancel();
}

}  // namespace kvmanager::tcp
