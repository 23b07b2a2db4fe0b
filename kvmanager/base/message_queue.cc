#include "kvmanager/base/message_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

MessageQueue::MessageQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) { KV_CHECK(fd_ >= 0); }

MessageQueue::~MessageQueue() { close(fd_); }

void MessageQueue::Post(Message message) {
  bool wake;
  {
    MutexLock lock(mutex_);
    queued_.push_back(std::move(message));
    wake = std::exchange(sleeping_, false);
  }
  if (wake) {
    const uint64_t one = 1;
    KV_CHECK(write(fd_, &one, sizeof one) == sizeof one || errno == EAGAIN);
  }
}

bool MessageQueue::RunSome() {
  if (next_ == running_.size()) {
    running_.clear();
    next_ = 0;
    MutexLock lock(mutex_);
    if (queued_.empty()) return false;
    running_.swap(queued_);
  }
  const Turn turn(kTurn);
  do {
    Message message = std::move(running_[next_++]);
    message();
  } while (next_ < running_.size() && !turn.over());
  return true;
}

bool MessageQueue::PrepareSleep() {
  if (next_ < running_.size()) return false;
  MutexLock lock(mutex_);
  if (!queued_.empty()) return false;
  sleeping_ = true;
  return true;
}

void MessageQueue::Awake() {
  {
    MutexLock lock(mutex_);
    sleeping_ = false;
  }
  uint64_t count;
  while (read(fd_, &count, sizeof count) > 0) {
  }
}

}  // namespace kvmanager
