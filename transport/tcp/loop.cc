#include "transport/tcp/loop.h"

#include <fcntl.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <fstream>

namespace kvmanager::tcp {
namespace {

template <typename V>
void Set(int fd, int level, int name, V value) {
  (void)::setsockopt(fd, level, name, &value, sizeof(value));
}

int64_t KernelLimit(const char* path) {
  int64_t limit = 0;
  std::ifstream(path) >> limit;
  return limit;
}

}  // namespace

bool Gate::Post(absl::AnyInvocable<void(Loop&)> task) {
  MutexLock lock(mutex_);
  if (loop_ == nullptr) return false;
  asio::post(loop_->io, [loop = loop_, task = std::move(task)]() mutable { task(*loop); });
  return true;
}

void Gate::Close() {
  MutexLock lock(mutex_);
  loop_ = nullptr;
}

void Tune(Socket& socket, int64_t stall_ms) {
  ErrorCode ignored;
  socket.non_blocking(true, ignored);
  const int fd = socket.native_handle();
  (void)::fcntl(fd, F_SETFD, FD_CLOEXEC);
  Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<unsigned>(std::max<int64_t>(stall_ms, 1)));
}

void TuneEarly(int fd) {
  static const bool send_allowed = KernelLimit("/proc/sys/net/core/wmem_max") >= kSocketBufferBytes;
  static const bool receive_allowed = KernelLimit("/proc/sys/net/core/rmem_max") >= kSocketBufferBytes;
  (void)::fcntl(fd, F_SETFD, FD_CLOEXEC);
  if (send_allowed) Set(fd, SOL_SOCKET, SO_SNDBUF, kSocketBufferBytes);
  if (receive_allowed) Set(fd, SOL_SOCKET, SO_RCVBUF, kSocketBufferBytes);
}

}  // namespace kvmanager::tcp
