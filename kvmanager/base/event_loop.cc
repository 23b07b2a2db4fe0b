#include "kvmanager/base/event_loop.h"

#include "kvmanager/base/clock.h"
#include "kvmanager/base/core_slice.h"

namespace kvmanager {
namespace {

// The shortest that Linux takes.
constexpr std::chrono::microseconds kSlice{100};

}  // namespace

EventLoop::EventLoop(MessageQueue* queue, int64_t busy_poll_us)
    : queue_(queue),
      busy_poll_ns_(busy_poll_us * 1000),
      events_(port_),
      scope_(events_),
      wake_(port_, queue->fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
      fine_timer_(port_) {}

void EventLoop::Run(absl::FunctionRef<bool()> done) {
  AskForSlice(kSlice);
  const SteadyClock clock;
  uint64_t seen = activity_;
  int64_t spin_until_ns = 0;
  for (;;) {
    if (run_messages_()) NoteActivity();
    events_.run();
    if (done()) return;
    port_.poll();
    if (events_.isRunnable()) continue;
    if (busy_poll_ns_ > 0) {
      const int64_t now_ns = clock.NowNs();
      if (activity_ != seen) {
        seen = activity_;
        spin_until_ns = now_ns + busy_poll_ns_;
      }
      if (now_ns < spin_until_ns) continue;
    }
    if (!queue_->PrepareSleep()) continue;
    port_.wait();
    queue_->Awake();
  }
}

void EventLoop::RunReady() {
  do {
    events_.run();
    port_.poll();
  } while (queue_->RunSome() || events_.isRunnable());
}

}  // namespace kvmanager
