// Pieces of hand-offs, on the loop's thread: payers take turns, and one piece at a time is a message of the loop's
// queue. So whatever else is posted there waits for one piece, however many hand-offs are under way. (What a call of a
// client begins, its first piece, is the call's own turn.)
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/owner_lines.h"

namespace kvmanager {

class HandOffTurns {
 public:
  /// How long a piece may take.
  static constexpr std::chrono::microseconds kPiece{150};

  /// queue: outlives this, and runs nothing behind its end.
  explicit HandOffTurns(MessageQueue* queue) : queue_(queue) {}
  HandOffTurns(const HandOffTurns&) = delete;
  HandOffTurns& operator=(const HandOffTurns&) = delete;

  /// A piece of a payer's (payer_name.h), behind its others.
  void Post(const std::string& payer, absl::AnyInvocable<void()> piece) {
    waiting_.Push(payer, std::move(piece));
    if (!std::exchange(posted_, true)) PostNext();
  }

 private:
  void PostNext() {
    queue_->Post([this] {
      waiting_.Take()();
      posted_ = !waiting_.empty();
      if (posted_) PostNext();
    });
  }

  MessageQueue* const queue_;
  OwnerLines<std::string, absl::AnyInvocable<void()>> waiting_;
  bool posted_ = false;  // a message that takes the next is in the queue
};

}  // namespace kvmanager
