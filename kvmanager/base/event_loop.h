// The daemon's one KJ event loop, with a bounded busy-poll before it blocks.
//
// Made, run and destroyed on one thread, which then owns every RPC object and the page store. Other threads reach it
// through the MessageQueue alone.
//
// A round runs the messages, then what is ready, then looks at sockets and timers. It does not wait until no socket has
// work: a client that sends without a pause would keep workers' answers to others waiting.
#pragma once

#include <kj/async-unix.h>
#include <kj/async.h>

#include <cstdint>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "kvmanager/base/fine_timer.h"
#include "kvmanager/base/message_queue.h"

namespace kvmanager {

class EventLoop {
 public:
  /// busy_poll_us: how long to look for work without blocking after the last activity; 0: block at once.
  EventLoop(MessageQueue* queue, int64_t busy_poll_us);

  /// `run` calls queue().RunSome() from now on, and looks at how long that takes.
  void WatchMessages(absl::AnyInvocable<bool()> run) { run_messages_ = std::move(run); }

  /// Runs events and messages until `done()`, which is asked after every round.
  void Run(absl::FunctionRef<bool()> done);
  /// Runs what is ready now, without blocking.
  void RunReady();

  /// Work arrived: the busy-poll starts anew.
  void NoteActivity() { ++activity_; }

  MessageQueue& queue() { return *queue_; }
  kj::UnixEventPort& port() { return port_; }
  /// Of whole milliseconds.
  kj::Timer& timer() { return port_.getTimer(); }
  FineTimer& fine_timer() { return fine_timer_; }

 private:
  MessageQueue* const queue_;
  const int64_t busy_poll_ns_;
  absl::AnyInvocable<bool()> run_messages_ = [this] { return queue_->RunSome(); };
  uint64_t activity_ = 0;
  kj::UnixEventPort port_;
  kj::EventLoop events_;
  kj::WaitScope scope_;                 // makes `events_` the thread's
  kj::UnixEventPort::FdObserver wake_;  // only so that a write to the queue's eventfd ends port().wait()
  FineTimer fine_timer_;
};

}  // namespace kvmanager
