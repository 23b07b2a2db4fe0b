// Waits of less than a millisecond, to which kj::Timer rounds up: its port waits by epoll, in whole milliseconds.
//
// Of an EventLoop, and of its thread. A wait ends at its time or, on a machine that is busy, later.
#pragma once

#include <kj/async-unix.h>
#include <kj/io.h>

#include <cstdint>
#include <map>

#include "kvmanager/base/clock.h"

namespace kvmanager {

class FineTimer {
 public:
  /// port: of the loop, outlives this.
  explicit FineTimer(kj::UnixEventPort& port);
  FineTimer(const FineTimer&) = delete;
  FineTimer& operator=(const FineTimer&) = delete;

  /// us: from now, 0 and more. Dropping the promise is all it takes to end a wait. Those that are left when the timer
  /// is destroyed are rejected.
  kj::Promise<void> AfterUs(int64_t us);

 private:
  using Waiting = std::multimap<int64_t, kj::Own<kj::PromiseFulfiller<void>>>;  // by when, in ns

  void Arm();
  kj::Promise<void> Listen();
  void End();

  const SteadyClock clock_;
  const kj::AutoCloseFd fd_;  // a timerfd
  kj::UnixEventPort::FdObserver observer_;
  Waiting waiting_;
  kj::Promise<void> listening_;
};

}  // namespace kvmanager
