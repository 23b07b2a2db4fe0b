// Drops sequences that nobody holds any more, in turns of the event loop between which others are served: a connection
// that ends may leave many and long ones.
//
// Owned by the daemon's wiring, which runs all messages of the queue before this goes. The loop's thread.
#pragma once

#include <deque>
#include <optional>

#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/turn_watch.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

class SequenceDrops {
 public:
  /// Everything outlives it.
  SequenceDrops(PageStore* store, MessageQueue* queue, TurnWatch* turns)
      : store_(store), queue_(queue), turns_(turns) {}
  SequenceDrops(const SequenceDrops&) = delete;
  SequenceDrops& operator=(const SequenceDrops&) = delete;

  /// Now, or as soon as those before it are dropped.
  void Drop(SequenceId sequence) {
    if (!turn_.has_value()) {
      turn_.emplace(Turn::kLength);
      queue_->Post([this] { GoOn(); });
    }
    if (waiting_.empty() && !turn_->over()) return store_->Drop(sequence);
    waiting_.push_back(sequence);
  }

 private:
  void GoOn() {
    const LoopTurn watched(turns_, "dropSequences");
    turn_.emplace(Turn::kLength);
    for (; !waiting_.empty() && !turn_->over(); waiting_.pop_front()) store_->Drop(waiting_.front());
    if (waiting_.empty()) return turn_.reset();
    queue_->Post([this] { GoOn(); });
  }

  PageStore* const store_;
  MessageQueue* const queue_;
  TurnWatch* const turns_;
  std::deque<SequenceId> waiting_;
  std::optional<Turn> turn_;  // that drops in this one; empty: none did
};

}  // namespace kvmanager
