#include "transport/tcp/peer_auth.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {
namespace {

constexpr std::chrono::seconds kLogEvery{1};

}  // namespace

PeerAuth::PeerAuth(Loop& loop, Socket socket, AuthRole role, Done done)
    : socket_(std::move(socket)),
      timer_(loop.io),
      role_(role),
      exchange_(loop.options.peer_key, role),
      done_(std::move(done)) {}

void PeerAuth::Start() {
  Tune(socket_, kAuthMs);
  timer_.expires_after(std::chrono::milliseconds(kAuthMs));
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (error || !self->done_) return;
    if (!self->refused_.ok()) return self->Finish(std::move(self->refused_));
    self->Finish(FieldError(absl::StatusCode::kDeadlineExceeded, "ms of the exchange of keys", absl::StrCat(kAuthMs),
                            absl::StrCat("below ", kAuthMs)));
  });
  out_ = exchange_.Begin();
  if (!out_.empty()) return Write();
  Read();
}

void PeerAuth::Write() {
  asio::async_write(socket_, asio::buffer(out_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (!self->done_) return;
    if (!self->refused_.ok()) {
      ErrorCode ignored;
      self->socket_.shutdown(Socket::shutdown_send, ignored);
      return self->Drain();
    }
    if (error) return self->Finish(absl::UnavailableError(absl::StrCat("exchanging keys: ", error.message())));
    if (self->exchange_.wants() == 0) return self->Finish(absl::OkStatus());
    self->Read();
  });
}

void PeerAuth::Read() {
  asio::async_read(socket_, asio::buffer(in_.data(), exchange_.wants()),
                   [self = shared_from_this()](const ErrorCode& error, size_t) {
                     if (!self->done_) return;
                     if (!error) return self->OnRead();
                     self->Finish(absl::UnavailableError(absl::StrCat("exchanging keys: ", error.message())));
                   });
}

void PeerAuth::OnRead() {
  absl::StatusOr<std::string> next = exchange_.Read(absl::MakeConstSpan(in_.data(), exchange_.wants()));
  if (!next.ok()) return Refuse(next.status());
  out_ = *std::move(next);
  if (!out_.empty()) return Write();
  if (exchange_.wants() == 0) return Finish(absl::OkStatus());
  Read();
}

void PeerAuth::Refuse(absl::Status why) {
  if (role_ == AuthRole::kDialer) return Finish(std::move(why));
  refused_ = std::move(why);
  out_ = EncodeRefusal();
  Write();
}

// Closing a socket with unread bytes would reset the connection, and destroy the refusal on its way.
void PeerAuth::Drain() {
  socket_.async_read_some(asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
    if (!self->done_) return;
    self->drained_ += bytes;
    if (!error && self->drained_ < kAuthDrainBytes) return self->Drain();
    self->Finish(std::move(self->refused_));
  });
}

void PeerAuth::Finish(absl::Status status) {
  const auto self = shared_from_this();
  timer_.cancel();
  ErrorCode ignored;
  if (!status.ok()) socket_.close(ignored);
  std::exchange(done_, nullptr)(std::move(status), std::move(socket_));
}

void PeerAuth::Cancel() {
  if (!done_) return;
  done_ = nullptr;
  timer_.cancel();
  ErrorCode ignored;
  socket_.close(ignored);
}

void CountAuthFailure(Loop& loop, AuthRole role, const std::string& peer, const absl::Status& why) {
  TransportMetrics::Direction& direction = role == AuthRole::kDialer ? loop.metrics.sent : loop.metrics.received;
  direction.authentication_failures.Increment();
  ++loop.auth_failures_unsaid;
  if (loop.auth_failure_said != SteadyTime() && Now() - loop.auth_failure_said < kLogEvery) return;
  loop.auth_failure_said = Now();
  const uint64_t others = std::exchange(loop.auth_failures_unsaid, 0) - 1;
  spdlog::warn("authentication of peer {} failed: {}{}", peer, std::string(why.message()),
               others == 0 ? std::string() : absl::StrCat(" (and of ", others, " other connections since the last)"));
}

}  // namespace kvmanager::tcp
