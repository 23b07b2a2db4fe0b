#include "client/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

namespace kvmanager::client {
namespace {

std::atomic<uint64_t> fork_count{0};

/// Under ForkMutex(). Never destroyed: handles may outlive static destruction.
std::vector<int>& Descriptors() {
  static auto* descriptors = new std::vector<int>();
  return *descriptors;
}

void Prepare() { internal::ForkMutex().Lock(); }
void Parent() { internal::ForkMutex().Unlock(); }
void Child() {
  for (int fd : Descriptors()) ::close(fd);
  Descriptors().clear();
  fork_count.fetch_add(1, std::memory_order_relaxed);
  internal::ForkMutex().Unlock();
}

}  // namespace

namespace internal {
Mutex& ForkMutex() {
  static auto* mutex = new Mutex();
  return *mutex;
}
}  // namespace internal

uint64_t ForkCount() { return fork_count.load(std::memory_order_relaxed); }

GuardedFd& GuardedFd::operator=(GuardedFd&& other) noexcept {
  if (this != &other) {
    Close();
    fd_ = std::exchange(other.fd_, -1);
    forks_ = other.forks_;
  }
  return *this;
}

GuardedFd GuardedFd::Adopt(int fd) {
  static const int registered = pthread_atfork(Prepare, Parent, Child);
  (void)registered;
  GuardedFd guarded;
  guarded.fd_ = fd;
  guarded.forks_ = ForkCount();
  if (fd >= 0) {
    const int error = errno;
    Descriptors().push_back(fd);
    errno = error;
  }
  return guarded;
}

void GuardedFd::Close() {
  if (fd_ < 0) return;
  if (forks_ == ForkCount()) {
    MutexLock lock(internal::ForkMutex());
    auto& all = Descriptors();
    const auto at = std::find(all.begin(), all.end(), fd_);
    if (at != all.end()) {
      *at = all.back();
      all.pop_back();
    }
    ::close(fd_);
  }
  fd_ = -1;
}

}  // namespace kvmanager::client
