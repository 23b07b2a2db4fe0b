// Long work of all connections takes turns: between two turns of the event loop, in which others are served, one piece
// of it goes on for a turn. So however much there is, together it holds the loop for no longer than one turn.
//
// Owned by the daemon's wiring, which runs all messages of the queue before this goes. The loop's thread.
#pragma once

#include <kj/async.h>

#include <chrono>
#include <deque>
#include <utility>

#include "kvmanager/base/message_queue.h"

namespace kvmanager {

class TakingTurns {
 public:
  /// How long one turn may take. A step of an engine waits for a turn when its call comes, and for another when workers
  /// are done with it, in each layer: turns of a millisecond take most of the few that it has.
  static constexpr std::chrono::microseconds kLength{150};

  /// queue: outlives it.
  explicit TakingTurns(MessageQueue* queue) : queue_(queue) {}
  TakingTurns(const TakingTurns&) = delete;
  TakingTurns& operator=(const TakingTurns&) = delete;

  /// Resolves when it is the caller's turn, behind those who wait already.
  kj::Promise<void> Next() {
    auto turn = kj::newPromiseAndFulfiller<void>();
    waiting_.push_back(kj::mv(turn.fulfiller));
    Post();
    return kj::mv(turn.promise);
  }
  /// The same, before all who wait already: of work that gives back what they ask for.
  kj::Promise<void> NextOfAll() {
    auto turn = kj::newPromiseAndFulfiller<void>();
    waiting_.push_front(kj::mv(turn.fulfiller));
    Post();
    return kj::mv(turn.promise);
  }

 private:
  void Post() {
    if (posted_) return;
    posted_ = true;
    queue_->Post([this] {
      // Behind what the other messages make ready, and behind the replies that this sends (socket_stream.h, 2).
      giving_ = kj::evalLast([this] { return kj::evalLast([this] { Give(); }); }).eagerlyEvaluate(nullptr);
    });
  }
  void Give() {
    posted_ = false;
    // Those that were given up have no turn.
    while (waiting_.size() > 1 && !waiting_.front()->isWaiting()) waiting_.pop_front();
    kj::Own<kj::PromiseFulfiller<void>> turn = kj::mv(waiting_.front());
    waiting_.pop_front();
    turn->fulfill();
    if (!waiting_.empty()) Post();
  }

  MessageQueue* const queue_;
  std::deque<kj::Own<kj::PromiseFulfiller<void>>> waiting_;
  bool posted_ = false;  // exactly while somebody waits
  kj::Promise<void> giving_ = nullptr;
};

}  // namespace kvmanager
