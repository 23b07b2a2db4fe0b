// Memory for what one connection sends and is answered: its shares of the daemon's two rooms (message_room.h). The
// loop's thread.
#pragma once

#include <kj/async.h>
#include <kj/common.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/message_room.h"

namespace kvmanager {

class SessionMessages {
 public:
  /// The rooms outlive it. unfinished, unread: end the connection, which keeps others waiting by what it sends, or by
  /// what it does not take.
  SessionMessages(MessageRoom* requests, MessageRoom* replies, absl::AnyInvocable<void()> unfinished,
                  absl::AnyInvocable<void()> unread)
      : requests_(std::make_shared<MessageShare>(requests, std::move(unfinished))),
        replies_(std::make_shared<MessageShare>(replies, std::move(unread))) {
    requests_->SetBytesMax(limits::kHelloBytesMax);
  }
  /// hello was answered.
  void Greet() { requests_->SetBytesMax(limits::kMessageBytesMax); }
  /// The connection is gone.
  void Detach() {
    requests_->Detach();
    replies_->Detach();
  }

  /// Shared with the messages that it sends.
  const std::shared_ptr<MessageShare>& requests() const { return requests_; }
  MessageShare& replies() { return *replies_; }

  /// Waits for memory for a call: what it keeps, and its reply. Errors: RESOURCE_EXHAUSTED if
  /// limits::kRepliesWaitingMax calls wait already. This outlives the promise.
  absl::StatusOr<kj::Promise<MessageShare::Charge>> BookReply(uint64_t bytes) {
    if (bytes == 0) return kj::Promise<MessageShare::Charge>(MessageShare::Charge());
    if (waiting_ >= limits::kRepliesWaitingMax) {
      return FieldError(absl::StatusCode::kResourceExhausted, "calls that wait for memory for their replies",
                        absl::StrCat(waiting_), absl::StrCat("below ", limits::kRepliesWaitingMax));
    }
    ++waiting_;
    return replies_->Book(bytes).attach(kj::defer([this] { --waiting_; }));
  }
  /// The call has written a reply of so many bytes and keeps nothing more: these stay booked until it is sent.
  void SendReply(MessageShare::Charge charge, uint64_t bytes) {
    charge.Shrink(bytes);
    replies_->SendWith(std::move(charge));
  }

 private:
  const std::shared_ptr<MessageShare> requests_, replies_;
  size_t waiting_ = 0;
};

}  // namespace kvmanager
