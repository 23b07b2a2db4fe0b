#include "kvmanager/base/fine_timer.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

FineTimer::FineTimer(kj::UnixEventPort& port)
    : fd_(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      observer_(port, fd_.get(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
      listening_(Listen().eagerlyEvaluate(nullptr)) {
  KV_CHECK(fd_.get() >= 0);
}

kj::Promise<void> FineTimer::AfterUs(int64_t us) {
  auto waiting = kj::newPromiseAndFulfiller<void>();
  const int64_t at_ns = clock_.NowNs() + std::max<int64_t>(us, 0) * 1000;
  const bool earliest = waiting_.empty() || at_ns < waiting_.begin()->first;
  waiting_.emplace(at_ns, kj::mv(waiting.fulfiller));
  if (earliest) Arm();
  return kj::mv(waiting.promise);
}

// A time of 0 would disarm it.
void FineTimer::Arm() {
  const int64_t ns = std::max<int64_t>(waiting_.begin()->first - clock_.NowNs(), 1);
  const itimerspec in = {.it_interval = {}, .it_value = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}};
  KV_CHECK(::timerfd_settime(fd_.get(), 0, &in, nullptr) == 0);
}

kj::Promise<void> FineTimer::Listen() {
  return observer_.whenBecomesReadable().then([this] {
    End();
    return Listen();
  });
}

void FineTimer::End() {
  uint64_t times = 0;
  (void)!::read(fd_.get(), &times, sizeof(times));  // so that it becomes readable again
  const auto due = waiting_.upper_bound(clock_.NowNs());
  for (auto each = waiting_.begin(); each != due; ++each) each->second->fulfill();
  waiting_.erase(waiting_.begin(), due);
  if (!waiting_.empty()) Arm();
}

}  // namespace kvmanager
