#include "kvmanager/base/event_loop.h"

#include "kvmanager/base/clock.h"

namespace kvmanager {

EventLoop::EventLoop(MessageQueue* queue, int64_t busy_poll_us)
    : queue_(queue),
      busy_poll_ns_(busy_poll_us * 1000),
      io_(kj::setupAsyncIo()),
      wake_(io_.unixEventPort, queue->fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
      fine_timer_(io_.unixEventPort) {}

void EventLoop::Run(absl::FunctionRef<bool()> done) {
  const SteadyClock clock;
  uint64_t seen = activity_;
  int64_t spin_until_ns = 0;
  for (;;) {
    io_.waitScope.poll();
    const bool ran = queue_->RunAll();
    if (ran) NoteActivity();
    if (done()) return;
    if (ran) continue;
    if (busy_poll_ns_ > 0) {
      const int64_t now_ns = clock.NowNs();
      if (activity_ != seen) {
        seen = activity_;
        spin_until_ns = now_ns + busy_poll_ns_;
      }
      if (now_ns < spin_until_ns) continue;
    }
    if (!queue_->PrepareSleep()) continue;
    io_.unixEventPort.wait();
    queue_->Awake();
  }
}

void EventLoop::RunReady() {
  do {
    io_.waitScope.poll();
  } while (queue_->RunAll());
}

}  // namespace kvmanager
