// Long calls of all connections take turns: between two turns of the event loop, in which others are served, one of
// them goes on for a turn. So however many there are, together they hold the loop for no longer than one.
//
// Owned by the daemon's wiring, which runs all messages of the queue before this goes. The loop's thread.
#pragma once

#include <kj/async.h>

#include <deque>
#include <utility>

#include "kvmanager/base/message_queue.h"

namespace kvmanager {

class TakingTurns {
 public:
  /// queue: outlives it.
  explicit TakingTurns(MessageQueue* queue) : queue_(queue) {}
  TakingTurns(const TakingTurns&) = delete;
  TakingTurns& operator=(const TakingTurns&) = delete;

  /// Resolves when it is the caller's turn, behind those who wait already.
  kj::Promise<void> Next() {
    auto turn = kj::newPromiseAndFulfiller<void>();
    waiting_.push_back(kj::mv(turn.fulfiller));
    if (waiting_.size() == 1) Post();
    return kj::mv(turn.promise);
  }

 private:
  void Post() {
    queue_->Post([this] {
      // Those that were given up have no turn.
      while (waiting_.size() > 1 && !waiting_.front()->isWaiting()) waiting_.pop_front();
      kj::Own<kj::PromiseFulfiller<void>> turn = kj::mv(waiting_.front());
      waiting_.pop_front();
      turn->fulfill();
      if (!waiting_.empty()) Post();
    });
  }

  MessageQueue* const queue_;
  std::deque<kj::Own<kj::PromiseFulfiller<void>>> waiting_;
};

}  // namespace kvmanager
