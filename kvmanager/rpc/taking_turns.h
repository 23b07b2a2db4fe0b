// Long work of all connections takes turns: between two turns of the event loop, in which others are served, one piece
// of it goes on for a turn. So however much there is, together it holds the loop for no longer than one turn. Owners
// (tenants) go round: who asks for much waits for itself, others for one turn of each owner.
//
// Owned by the daemon's wiring, which runs all messages of the queue before this goes. The loop's thread.
#pragma once

#include <kj/async.h>

#include <chrono>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"

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

  /// Resolves when it is the caller's turn, behind those of the same owner who wait already.
  kj::Promise<void> Next(WorkerPool::Owner owner = WorkerPool::kDaemon) {
    Line& line = lines_[owner];
    if (line.empty()) round_.push_back(owner);
    return WaitIn(line);
  }
  /// Every other turn, whoever's work it is: it gives back what others ask for.
  kj::Promise<void> NextToGiveBack() { return WaitIn(first_); }

 private:
  using Fulfiller = kj::Own<kj::PromiseFulfiller<void>>;
  using Line = std::deque<Fulfiller>;

  kj::Promise<void> WaitIn(Line& line) {
    auto turn = kj::newPromiseAndFulfiller<void>();
    line.push_back(kj::mv(turn.fulfiller));
    Post();
    return kj::mv(turn.promise);
  }
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
    while (!first_.empty() || !round_.empty()) {
      Fulfiller turn = Take();
      if (!turn->isWaiting()) continue;  // it was given up
      turn->fulfill();
      break;
    }
    if (!first_.empty() || !round_.empty()) Post();
  }
  Fulfiller Take() {
    gave_first_ = !first_.empty() && (round_.empty() || !gave_first_);
    if (gave_first_) return TakeFrom(first_);
    const WorkerPool::Owner owner = round_.front();
    round_.pop_front();
    Line& line = lines_.at(owner);
    Fulfiller turn = TakeFrom(line);
    line.empty() ? void(lines_.erase(owner)) : round_.push_back(owner);
    return turn;
  }
  // The first that was not given up, or the last.
  static Fulfiller TakeFrom(Line& line) {
    while (line.size() > 1 && !line.front()->isWaiting()) line.pop_front();
    Fulfiller turn = kj::mv(line.front());
    line.pop_front();
    return turn;
  }

  MessageQueue* const queue_;
  Line first_;
  bool gave_first_ = false;                             // the last turn
  absl::flat_hash_map<WorkerPool::Owner, Line> lines_;  // none is empty
  std::deque<WorkerPool::Owner> round_;                 // each that has a line once, in the order of their turns
  bool posted_ = false;                                 // exactly while somebody waits
  kj::Promise<void> giving_ = nullptr;
};

}  // namespace kvmanager
