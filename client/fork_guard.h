// What keeps a forked child from holding its parent's leases: the daemon gives leases back when the last copy of a
// socket is closed, and fork() copies sockets. A pthread_atfork handler closes every guarded descriptor in the child at
// once.
//
// The registry is of the process because fork() is. Any thread; the handlers hold the registry's lock across fork(), so
// that a descriptor opened through Guarded() cannot slip through.
#pragma once

#include <cstdint>
#include <utility>

#include "kvmanager/base/mutex.h"

namespace kvmanager::client {

/// A descriptor that forked children do not keep. Owns it: closed on destruction, except in a child, where the number
/// may by then be another file's.
class GuardedFd {
 public:
  GuardedFd() = default;
  GuardedFd(GuardedFd&& other) noexcept { *this = std::move(other); }
  GuardedFd& operator=(GuardedFd&& other) noexcept;
  ~GuardedFd() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  template <typename Open>
  friend GuardedFd Guarded(Open open);
  static GuardedFd Adopt(int fd);
  void Close();

  int fd_ = -1;
  uint64_t forks_ = 0;
};

/// How often this process's line has forked: a child sees another number than its parent did.
uint64_t ForkCount();

namespace internal {
Mutex& ForkMutex();
}

/// Guards what `open` returns (a descriptor, or -1 with errno set), opened so that no fork can come between.
template <typename Open>
GuardedFd Guarded(Open open) {
  MutexLock lock(internal::ForkMutex());
  return GuardedFd::Adopt(open());
}

}  // namespace kvmanager::client
