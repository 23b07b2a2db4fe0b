// Memory for what one connection sends and is answered: its shares of the daemon's two rooms (message_room.h). The
// loop's thread.
#pragma once

#include <capnp/message.h>
#include <capnp/orphan.h>
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

  /// The connection reads no message while somebody holds this: what its client sends next finds the call done.
  std::shared_ptr<const void> HoldReading() {
    ++holds_;
    return std::shared_ptr<const void>(this, [this](const void*) {
      if (--holds_ > 0 || held_.get() == nullptr) return;
      held_->fulfill();
      held_ = nullptr;
    });
  }
  bool reading_held() const { return holds_ > 0 || requests_->room_closed(); }
  /// For the one who reads.
  kj::Promise<void> WhenReadingGoesOn() {
    auto pair = kj::newPromiseAndFulfiller<void>();
    held_ = kj::mv(pair.fulfiller);
    return kj::mv(pair.promise);
  }

  /// Waits for memory for a call: what it keeps, and its reply. Errors: RESOURCE_EXHAUSTED if
  /// limits::kRepliesWaitingMax calls wait already. This outlives the promise.
  absl::StatusOr<kj::Promise<MessageShare::Charge>> ReserveReply(uint64_t bytes) {
    if (bytes == 0) return kj::Promise<MessageShare::Charge>(MessageShare::Charge());
    if (waiting_ >= limits::kRepliesWaitingMax) {
      return FieldError(absl::StatusCode::kResourceExhausted, "calls that wait for memory for their replies",
                        absl::StrCat(waiting_), absl::StrCat("below ", limits::kRepliesWaitingMax));
    }
    // What a connection asks for next waits in its socket: calls under way are destroyed in one piece when it ends.
    if (++waiting_ == kWaitingToHold) many_wait_ = HoldReading();
    return replies_->Reserve(bytes).attach(kj::defer([this] {
      if (waiting_-- == kWaitingToHold) many_wait_ = nullptr;
    }));
  }
  /// From so many bytes on a reply refers to memory instead of holding a copy.
  static constexpr uint64_t kLentBytesMin = MessageRoom::kOwnBytes;
  /// What a call reserves for bytes that it makes and answers with.
  static uint64_t BytesToReserve(uint64_t bytes) {
    return bytes < kLentBytesMin ? 2 * bytes : ReplyMemory::BytesFor(bytes);
  }

  /// A field of a reply, of `bytes`, that the caller gives to SendReply in the same turn.
  static capnp::Orphan<capnp::Data> DataOf(capnp::Orphanage orphanage, const ReplyBuffer& bytes) {
    const capnp::Data::Reader data(bytes.data(), bytes.size());
    if (bytes.size() < kLentBytesMin) return orphanage.newOrphanCopy(data);
    return orphanage.referenceExternalData(data);
  }
  /// The call has written a reply with `parts`, of DataOf, and keeps nothing more. What the reply refers to stays, and
  /// stays reserved, until it is written. charge: for BytesToReserve of each part, at least.
  void SendReply(MessageShare::Charge charge, MessageShare::Lent parts) {
    uint64_t bytes = 0;
    MessageShare::Lent lent;
    for (ReplyBuffer& part : parts) {
      if (part.size() < kLentBytesMin) continue;
      bytes += part.memory_bytes();
      lent.push_back(std::move(part));
    }
    charge.Shrink(bytes);
    if (!lent.empty()) replies_->SendWith(std::move(charge), std::move(lent));
  }

 private:
  const std::shared_ptr<MessageShare> requests_, replies_;
  static constexpr size_t kWaitingToHold = 64;

  size_t waiting_ = 0;
  int holds_ = 0;
  kj::Own<kj::PromiseFulfiller<void>> held_;  // nullptr: nobody waits to read
  std::shared_ptr<const void> many_wait_;     // while kWaitingToHold do
};

}  // namespace kvmanager
