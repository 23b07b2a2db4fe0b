// Messages to the event-loop thread from every other thread: closures in order, and an eventfd that wakes the loop.
//
// Owned by the Server, which makes it before any thread that posts and destroys it after they are joined. Post() may be
// called from any thread, the rest from the loop's thread. A std::mutex and an eventfd, not kj::Executor:
// ThreadSanitizer reports false races in Debian's uninstrumented one.
//
// Invariants: 1. Every message is run or destroyed on the loop's thread. 2. While the loop sleeps, a non-empty queue
// has written the eventfd.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/mutex.h"

namespace kvmanager {

class MessageQueue {
 public:
  using Message = absl::AnyInvocable<void()>;

  /// Workers may end thousands of small tasks while the loop does something else.
  static constexpr std::chrono::microseconds kTurn{1000};

  MessageQueue();
  ~MessageQueue();
  MessageQueue(const MessageQueue&) = delete;
  MessageQueue& operator=(const MessageQueue&) = delete;

  void Post(Message message);

  /// Runs what is queued, for a turn of kTurn; the rest, and what they queue on this thread, is left for the next call.
  /// False: there was nothing.
  bool RunSome();
  /// Says that the loop is about to block on fd(). False: a message is waiting, do not block.
  bool PrepareSleep();
  /// Takes back PrepareSleep and empties fd().
  void Awake();
  int fd() const { return fd_; }

 private:
  const int fd_;
  Mutex mutex_;
  std::vector<Message> queued_ ABSL_GUARDED_BY(mutex_);
  bool sleeping_ ABSL_GUARDED_BY(mutex_) = false;
  // The loop's thread.
  std::vector<Message> running_;  // kept for its capacity
  size_t next_ = 0;               // of running_
};

}  // namespace kvmanager
