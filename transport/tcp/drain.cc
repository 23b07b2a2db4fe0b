#include "transport/tcp/drain.h"

#include <sys/socket.h>

#include <utility>

namespace kvmanager::tcp {

Drain::Drain(Loop& loop, Socket socket, ZeroCopy zero_copy, int64_t wait_ms, absl::AnyInvocable<void()> drained)
    : socket_(std::move(socket)),
      zero_copy_(std::move(zero_copy)),
      timer_(loop.io),
      deadline_(Now() + std::chrono::milliseconds(wait_ms)),
      drained_(std::move(drained)) {}

void Drain::Start(Loop& loop, Socket socket, ZeroCopy zero_copy, int64_t wait_ms, absl::AnyInvocable<void()> drained) {
  ErrorCode ignored;
  socket.cancel(ignored);
  // Not by closing it, after which nothing is said of what a device holds.
  const sockaddr none = {AF_UNSPEC, {}};
  (void)::connect(socket.native_handle(), &none, sizeof(none));
  std::make_shared<Drain>(loop, std::move(socket), std::move(zero_copy), wait_ms, std::move(drained))->Look();
}

void Drain::Look() {
  zero_copy_.Read(socket_.native_handle());
  if (zero_copy_.idle() || Now() >= deadline_) {
    zero_copy_.GiveUp();
    ErrorCode ignored;
    socket_.close(ignored);
    return drained_();
  }
  timer_.expires_after(std::chrono::milliseconds(look_ms_));
  look_ms_ = std::min(2 * look_ms_, kLookMsMax);
  timer_.async_wait([self = shared_from_this()](const ErrorCode&) { self->Look(); });
}

}  // namespace kvmanager::tcp
