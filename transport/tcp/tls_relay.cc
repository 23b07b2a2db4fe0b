#include "transport/tcp/tls_relay.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/peer_key.h"

namespace kvmanager::tcp {

TlsRelay::TlsRelay(Loop& loop, Socket tcp, std::shared_ptr<const TlsContext> context, const std::string& name,
                   Done done)
    : loop_(loop),
      tcp_(std::move(tcp)),
      near_(loop.io),
      timer_(loop.io),
      dialled_(!name.empty()),
      done_(std::move(done)),
      link_(std::make_unique<TlsLink>(std::move(context), tcp_.native_handle(), name)) {}

void TlsRelay::Start() {
  loop_.relays.insert(shared_from_this());
  Tune(tcp_, kAuthMs);
  SetTimer(kAuthMs);
  Turn();
}

void TlsRelay::SetTimer(int64_t ms) {
  timer_.expires_after(std::chrono::milliseconds(ms));
  timer_.async_wait([self = shared_from_this(), set = ++timers_](const ErrorCode& error) {
    if (error || set != self->timers_ || self->state_ == State::kClosed) return;
    self->Close(self->failure_.ok() ? FieldError(absl::StatusCode::kDeadlineExceeded, "ms of the TLS handshake",
                                                 absl::StrCat(kAuthMs), absl::StrCat("below ", kAuthMs))
                                    : self->failure_);
  });
}

void TlsRelay::Turn() {
  if (working_) {
    again_ = true;
    return;
  }
  working_ = true;
  again_ = false;
  loop_.copiers->Post(WorkerPool::Priority::kEncode, [gate = loop_.gate, self = shared_from_this()]() mutable {
    self->Work();
    gate->Post([self = std::move(self)](Loop&) { self->OnWorked(); });
  });
}

void TlsRelay::Work() {
  more_ = false;
  moved_to_peer_ = 0;
  if (step_ != TlsLink::Step::kDone) {
    step_ = link_->Handshake();
    return;
  }
  if (!near_.is_open()) return;
  for (size_t moved = 0; moved < kTurnBytes; moved += kBufferBytes) {
    const bool out = ToPeer(), in = ToUser();
    if (!out && !in) return;
  }
  more_ = true;
}

// False: nothing moves now.
bool TlsRelay::ToPeer() {
  Buffer& buffer = to_peer_;
  if (buffer.empty() && !user_ended_) {
    if (buffer.bytes == nullptr) buffer.bytes.reset(new uint8_t[kBufferBytes]);
    ssize_t n;
    do {
      n = ::recv(near_.native_handle(), buffer.bytes.get(), kBufferBytes, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n == 0 || (n < 0 && errno != EAGAIN)) user_ended_ = true;
    buffer.begin = 0;
    buffer.end = n > 0 ? static_cast<size_t>(n) : 0;
  }
  bool moved = false;
  while (!buffer.empty() && !broken_) {
    const int64_t n = link_->Write(buffer.bytes.get() + buffer.begin, buffer.end - buffer.begin);
    if (n == -1) return moved;
    if (n == -2) {
      broken_ = true;
      break;
    }
    buffer.begin += static_cast<size_t>(n);
    moved_to_peer_ += static_cast<uint64_t>(n);
    moved = true;
  }
  buffer.begin = buffer.end = 0;  // or nobody is there to read it
  buffer.bytes.reset();
  if (user_ended_ && !std::exchange(told_peer_, true)) {
    link_->EndWriting();
    ::shutdown(tcp_.native_handle(), SHUT_WR);
  }
  return moved;
}

bool TlsRelay::ToUser() {
  Buffer& buffer = to_user_;
  if (buffer.empty() && !peer_ended_) {
    if (buffer.bytes == nullptr) buffer.bytes.reset(new uint8_t[kBufferBytes]);
    buffer.begin = buffer.end = 0;
    while (buffer.end < kBufferBytes && !peer_ended_) {
      const int64_t n = link_->Read(buffer.bytes.get() + buffer.end, kBufferBytes - buffer.end);
      if (n == -1) break;
      if (n == -2) broken_ = true;
      if (n <= 0) {
        peer_ended_ = true;
      } else {
        buffer.end += static_cast<size_t>(n);
      }
    }
  }
  bool moved = false;
  while (!buffer.empty()) {
    const ssize_t n = ::send(near_.native_handle(), buffer.bytes.get() + buffer.begin, buffer.end - buffer.begin,
                             MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return moved;
    if (n < 0) break;  // the user has closed: nobody is there to read it
    buffer.begin += static_cast<size_t>(n);
    moved = true;
  }
  buffer.begin = buffer.end = 0;
  buffer.bytes.reset();
  return moved;
}

void TlsRelay::OnWorked() {
  working_ = false;
  if (state_ == State::kClosed) return Close(failure_);
  if (state_ == State::kShaking) {
    if (step_ == TlsLink::Step::kDone) return OnShaken();
    if (step_ == TlsLink::Step::kFailed) return Refuse();
    return WaitFor(step_ == TlsLink::Step::kWantRead ? kTcpRead : kTcpWrite);
  }
  if (broken_ && failure_.ok()) failure_ = link_->failure();
  // Not before failure() says why.
  if (peer_ended_ && to_user_.empty() && !std::exchange(told_user_, true)) {
    ::shutdown(near_.native_handle(), SHUT_WR);
  }
  if (told_user_ && (told_peer_ || broken_)) return Close(failure_);
  if (stopping_ && told_peer_) return Close(failure_);
  // The user has ended its side, perhaps closed it: what is left of it goes as long as the peer takes some.
  if (user_ended_ && !stopping_ && (moved_to_peer_ > 0 || !std::exchange(lingering_, true))) SetTimer(kLingerMs);
  if (more_ || again_) return Turn();
  if (!told_peer_) WaitFor(to_peer_.empty() ? kNearRead : kTcpWrite);
  if (!told_user_) WaitFor(to_user_.empty() ? kTcpRead : kNearWrite);
}

void TlsRelay::WaitFor(Wait what) {
  if (std::exchange(waiting_[what], true)) return;
  Socket& socket = what == kNearRead || what == kNearWrite ? near_ : tcp_;
  socket.async_wait(what == kNearRead || what == kTcpRead ? Socket::wait_read : Socket::wait_write,
                    [self = shared_from_this(), what](const ErrorCode& error) {
                      self->waiting_[what] = false;
                      if (!error && self->state_ != State::kClosed) self->Turn();
                    });
}

void TlsRelay::OnShaken() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
    return Close(absl::ResourceExhaustedError("no descriptor is left for a pair of sockets"));
  }
  state_ = State::kCarrying;
  ++timers_;
  timer_.cancel();
  Tune(tcp_, loop_.options.stall_ms);
  const asio::generic::stream_protocol unix_stream(AF_UNIX, 0);
  Socket user(loop_.io);
  ErrorCode ignored;
  near_.assign(unix_stream, ends[0], ignored);
  user.assign(unix_stream, ends[1], ignored);
  for (const int end : ends) TuneEarly(end);
  Turn();
  std::exchange(done_, nullptr)(absl::OkStatus(), std::move(user));
}

// Closing a socket with unread bytes would reset the connection, and destroy the alert on its way.
void TlsRelay::Refuse() {
  failure_ = link_->failure();
  if (dialled_) return Close(failure_);
  state_ = State::kRefusing;
  ErrorCode ignored;
  tcp_.shutdown(Socket::shutdown_send, ignored);
  Drain();
}

void TlsRelay::Drain() {
  tcp_.async_read_some(asio::buffer(away_), [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
    if (self->state_ == State::kClosed) return;
    self->drained_ += bytes;
    if (!error && self->drained_ < kAuthDrainBytes) return self->Drain();
    self->Close(self->failure_);
  });
}

void TlsRelay::Close(absl::Status why) {
  const auto self = shared_from_this();
  state_ = State::kClosed;
  timer_.cancel();
  if (done_) std::exchange(done_, nullptr)(std::move(why), Socket(loop_.io));
  if (working_) return;  // then again
  link_.reset();
  ErrorCode ignored;
  tcp_.close(ignored);
  near_.close(ignored);
  loop_.relays.erase(self);
}

void TlsRelay::Cancel() {
  if (!done_) return;
  done_ = nullptr;
  Close(absl::CancelledError("cancelled"));
}

void TlsRelay::EndSoon() {
  if (state_ != State::kCarrying) {
    done_ = nullptr;
    return Close(absl::CancelledError("the transport is shutting down"));
  }
  stopping_ = true;
  SetTimer(kStopMs);
  Turn();
}

}  // namespace kvmanager::tcp
