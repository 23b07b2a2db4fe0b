// Memory for the messages of all connections together: the requests that they send, or the replies to them. A message
// waits for room; it is not allocated before.
//
//   MessageRoom    the bound of all, those that wait in the order in which they came, and who keeps others waiting
//   MessageShare   one connection's part
//
// Memory of large replies is kept for the next ones (reply_memory.h): with what is used it stays within the bound, and
// what nobody wants goes.
//
// Within kOwnBytes a connection is served whatever the others use. It may use Bounds::share, or more for a single
// message. A connection that keeps others waiting is cut off: one that sends nothing of a request for kStalledMs, or
// does not end it for kSlowMs, or takes no reply for as long. So is, where small replies that are not taken exceed the
// room, the connection with the most of them.
//
// The loop's thread. The room outlives its shares.
#pragma once

#include <capnp/common.h>
#include <kj/async.h>

#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "kvmanager/api/socket_stream.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/rpc/reply_memory.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class MessageShare;

class MessageRoom {
 public:
  static constexpr uint64_t kOwnBytes = 64 << 10;
  static constexpr int64_t kStalledMs = 2000;
  static constexpr int64_t kSlowMs = 10000;

  struct Bounds {
    uint64_t whole = 0;  // bytes of all shares together, but for kOwnBytes of each
    uint64_t share = 0;
  };
  /// clock outlives this.
  MessageRoom(const Bounds& bounds, const Clock* clock) : bounds_(bounds), clock_(clock) {}
  ~MessageRoom();
  MessageRoom(const MessageRoom&) = delete;
  MessageRoom& operator=(const MessageRoom&) = delete;

  /// No connection begins to read another message: the daemon ends.
  void Close() { closed_ = true; }
  bool closed() const { return closed_; }

  const Bounds& bounds() const { return bounds_; }
  uint64_t used_bytes() const { return used_; }
  uint64_t kept_bytes() const { return memory_.kept_bytes(); }
  size_t waiting() const { return waiting_.size(); }
  /// Of the share that has most.
  uint64_t most_used_bytes() const;
  /// Whether somebody waits for memory that others have.
  bool keeps_waiting() const;
  /// From time to time: where others wait, here or for what shares of this room keep, cuts off who keeps them waiting;
  /// and gives kept memory back.
  void Look(bool others_wait);

 private:
  friend class MessageShare;
  class Waiting;

  bool FitsShare(const MessageShare& share, uint64_t bytes) const;
  bool Fits(const MessageShare& share, uint64_t bytes) const;
  /// Those that wait and fit now, in their order: one that lacks room keeps those behind it waiting, or those of its
  /// share if only this lacks room.
  void Admit();
  /// Of what is used beyond the bound, cuts off the largest use that nobody reserved.
  void CutOffLargest();

  const Bounds bounds_;
  const Clock* const clock_;
  bool closed_ = false;
  uint64_t used_ = 0;
  absl::flat_hash_set<MessageShare*> shares_;
  std::list<Waiting*> waiting_;
  ReplyMemory memory_;
};

class MessageShare final : public MessageMemory, public std::enable_shared_from_this<MessageShare> {
 public:
  /// Memory that is reserved; given back when destroyed.
  class Charge {
   public:
    Charge() = default;
    Charge(std::shared_ptr<MessageShare> of, uint64_t bytes) : of_(std::move(of)), bytes_(bytes) {}
    Charge(Charge&& other) noexcept : of_(std::move(other.of_)), bytes_(std::exchange(other.bytes_, 0)) {}
    Charge& operator=(Charge&& other) noexcept {
      std::swap(of_, other.of_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Charge() { Shrink(0); }
    uint64_t bytes() const { return bytes_; }
    /// Gives back all but so many bytes.
    void Shrink(uint64_t bytes);
    /// The caller gives them back.
    uint64_t Release() { return std::exchange(bytes_, 0); }
    /// Memory for a reply that is reserved here. Errors: RESOURCE_EXHAUSTED.
    absl::StatusOr<ReplyBuffer> Make(absl::string_view what, size_t bytes);
    /// Of Make: nobody uses it any more.
    void Keep(ReplyBuffer buffer);

   private:
    std::shared_ptr<MessageShare> of_;
    uint64_t bytes_ = 0;
  };

  /// cut_off: ends the connection soon; called at most once, and not behind Detach.
  MessageShare(MessageRoom* room, absl::AnyInvocable<void()> cut_off);
  ~MessageShare() override;
  /// The connection is gone; charges may live a little longer.
  void Detach();

  uint64_t used_bytes() const { return used_; }
  bool room_closed() const { return room_->closed(); }

  // Requests.
  uint64_t bytes_max() const override { return bytes_max_; }
  void SetBytesMax(uint64_t bytes) { bytes_max_ = bytes; }
  bool TryTake(uint64_t bytes) override;
  kj::Promise<void> Take(uint64_t bytes) override;
  void GiveBack(uint64_t bytes) override;
  void NoteReceived(bool whole) override;
  void NoteWhole(kj::ArrayPtr<const kj::byte> bytes, const std::shared_ptr<const void>& memory) override;
  /// The memory of the large request that holds `at`, whose reader lives: it is destroyed on the loop's thread.
  /// nullptr: there is none.
  std::shared_ptr<const void> KeepRequest(const uint8_t* at);

  // Replies.
  /// Resolves once so many bytes are reserved. Dropping the promise gives them back.
  kj::Promise<Charge> Reserve(uint64_t bytes);
  /// Memory that a reply refers to instead of holding a copy.
  using Lent = absl::InlinedVector<ReplyBuffer, 2>;
  /// A reply that refers to `lent` was handed to the network. They and their charge stay until it was written, or until
  /// this goes, which must be behind the network. lent: not empty.
  void SendWith(Charge charge, Lent lent);
  bool lends() const { return !sending_.empty(); }
  /// The network has nothing to send, and every call that has lent something has handed its reply to it: what is left
  /// belongs to calls that were cancelled.
  void DropUnsent();
  /// `unsent`: bytes of all replies that wait to be sent, reserved or not.
  void NoteUnsent(uint64_t unsent);
  /// A message of these segments was written; at most `unsent` bytes of others are left. To be told of messages of
  /// kOwnBytes and more, and of all while counts_unsent().
  void NoteSent(kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments, uint64_t unsent);
  bool counts_unsent() const { return counted_ != 0; }

 private:
  friend class MessageRoom;
  void CountUnsent(uint64_t unsent);
  void KeepMemory(Lent& lent);
  void CutOff();
  bool stalled(int64_t now_ns) const {
    const auto for_ms = [now_ns](int64_t since_ns) { return since_ns == 0 ? 0 : (now_ns - since_ns) / 1000000; };
    return for_ms(since_ns_) >= MessageRoom::kSlowMs || for_ms(received_ns_) >= MessageRoom::kStalledMs;
  }

  MessageRoom* const room_;
  absl::AnyInvocable<void()> cut_off_;  // empty: cut off, or gone
  uint64_t bytes_max_ = UINT64_MAX;
  uint64_t used_ = 0;     // reserved
  uint64_t counted_ = 0;  // of what is not reserved, in the room's sum
  uint64_t sending_bytes_ = 0;
  int64_t since_ns_ = 0;  // a request began to arrive, or a reply was last taken while others are to be sent; 0: none
  int64_t received_ns_ = 0;  // more of this request arrived; 0: there is none
  struct Request {
    kj::ArrayPtr<const kj::byte> bytes;
    std::weak_ptr<const void> memory;
  };
  std::vector<Request> requests_;  // large ones, some of which may be gone
  struct Sending {
    uint64_t bytes;  // reserved
    Lent lent;
  };
  std::vector<Sending> sending_;
};

/// Memory of messages of all connections.
struct MessageMetrics {
  explicit MessageMetrics(Metrics* metrics);
  void Set(const MessageRoom& requests, const MessageRoom& replies);

  prometheus::Gauge &request_bytes, &reply_bytes, &kept_bytes, &waiting_requests, &waiting_replies;
};

}  // namespace kvmanager
