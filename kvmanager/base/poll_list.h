// Asks functions from the event loop until they say that they are done: for words that another device or process writes
// and that wake nobody, such as those that streams of a GPU write.
//
// While the list has entries the loop asks each every kPollUs; with none it costs nothing. The loop's thread.
#pragma once

#include <kj/async.h>

#include <list>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/event_loop.h"

namespace kvmanager {

class PollList {
 public:
  static constexpr int64_t kPollUs = 50;

  /// nullptr: nothing is asked any more.
  void SetLoop(EventLoop* loop) {
    loop_ = loop;
    if (loop != nullptr) {
      if (!entries_.empty()) Wait();
      return;
    }
    polling_ = nullptr;
    next_ = nullptr;
    active_ = false;
    entries_.clear();
  }
  /// Asks `poll` until it returns true. It may add others.
  void Add(absl::AnyInvocable<bool()> poll) {
    entries_.push_back(std::move(poll));
    if (!active_) Wait();
  }
  /// Asks all of them now.
  void Ask() {
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      entry = (*entry)() ? entries_.erase(entry) : std::next(entry);
    }
  }

 private:
  void Wait() {
    active_ = loop_ != nullptr;
    if (!active_) return;
    polling_ = loop_->fine_timer()
                   .AfterUs(kPollUs)
                   .then([this] {
                     Ask();
                     active_ = false;
                     // A promise must not destroy itself: the next round is a promise of its own.
                     if (!entries_.empty()) next_ = kj::evalLater([this] { Wait(); }).eagerlyEvaluate(nullptr);
                   })
                   .eagerlyEvaluate(nullptr);
  }

  EventLoop* loop_ = nullptr;
  std::list<absl::AnyInvocable<bool()>> entries_;
  bool active_ = false;
  kj::Promise<void> polling_ = nullptr, next_ = nullptr;
};

}  // namespace kvmanager
