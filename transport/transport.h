// Moves the pages of a hand-off from one daemon's slots into another's, while the sender still makes them.
//
// The transport knows descriptors, not stores: what is handed over is an opaque manifest and numbered pages, each a run
// of bytes; the receiver answers with targets. A hand-off has two parts. The header, with which it begins, says what
// can be said before a page is there; the trailer comes when everything is known, and its pages go ahead of those of
// the header that still wait. Pages travel in the order in which they are posted, each with its checksum. A connection
// that breaks is made again, and what had arrived is not sent twice.
//
// Owned by main(); methods may be called from any thread; callbacks run on the transport's own thread and must only
// pass a message on.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/page_sizes.h"

namespace kvmanager {

/// A GPU's name in every process, whatever CUDA_VISIBLE_DEVICES says there; zeros: none.
using GpuName = std::array<uint8_t, 16>;

/// Memory of a GPU out of which pages are sent, as another process of this host can map it.
struct DeviceSlab {
  GpuName gpu = {};
  std::array<uint8_t, 16> name = {};  // of this memory alone, also once it is gone: receivers keep what they mapped
  const uint8_t* data = nullptr;      // on the GPU
  uint64_t bytes = 0;
  int fd = -1;
};

/// Pages are numbered from 0 in the header; those of the trailer go on from there.
struct HandOffPart {
  std::string manifest;             // opaque, 1..kManifestBytesMax
  PageSizes page_bytes;             // each 1..kPageBytesMax; at most kPagesMax in both parts
  std::vector<uint32_t> withdrawn;  // of the trailer: pages of the header that will not come, ascending
  GpuName gpu = {};                 // of the header: in whose memory all pages lie; zeros: in the host's

  static constexpr size_t kManifestBytesMax = 16 << 20;
  static constexpr size_t kPagesMax = 1 << 20;
  static constexpr uint64_t kPageBytesMax = 64 << 20;
};

struct SendRequest {
  std::string peer;  // "HOST:PORT"
  HandOffPart header;
  int64_t stall_ms = 0;  // a peer that is not heard of for so long is given up; 0: kStallMsDefault
  int64_t room_ms = 0;   // how long a receiver that is full may let this wait for room; 0: it refuses at once

  static constexpr int64_t kStallMsDefault = 4000;
  static constexpr int64_t kRoomMsMax = 3600 * 1000;
};

struct SendPage {
  uint32_t page = 0;
  absl::Span<const uint8_t> bytes;   // as many as its part said; valid and unchanged until `done`
  uint64_t checksum = 0;             // XXH3-64 of bytes
  uint32_t group = 0;                // below kGroupsMax: pages whose times are told together
  const DeviceSlab* slab = nullptr;  // that they are in, if they are a GPU's; valid until `done`

  static constexpr uint32_t kGroupsMax = 1 << 16;
};

/// When pages of a group went, in seconds since Begin; negative: none did.
struct SendTimes {
  double posted_first = -1, posted_last = -1;  // ready to go
  double sent_first = -1;                      // given to a connection
  double arrived_last = -1;                    // the receiver said that it has them
};

struct SendResult {
  uint64_t bytes_sent = 0;    // of pages; pages that the receiver had already are not sent
  uint64_t bytes_resent = 0;  // of those, sent once more because a connection broke
  uint64_t pages_sent = 0;
  uint64_t pages_skipped = 0;
  uint64_t resumes = 0;           // connections that broke and were made again
  double seconds = 0;             // from the offer to the receiver's confirmation
  std::vector<SendTimes> groups;  // by SendPage::group
  double sending_seconds = 0;     // of these, with pages to send, or on their way
};

struct SendEvents {
  /// The receiver has room, and this is what a client claims the sequence with. At most once.
  absl::AnyInvocable<void(std::string ticket)> accepted;
  /// The receiver is full and lets the hand-off wait: why. Any number of times before `accepted`.
  absl::AnyInvocable<void(absl::Status why)> waiting;
  /// Exactly once, last; nothing reads pages' bytes after it, the kernel's sockets included. Errors: UNAVAILABLE
  /// (peer), DATA_LOSS (checksum), RESOURCE_EXHAUSTED and others as the receiver answered, CANCELLED, DEADLINE_EXCEEDED
  /// (the peer was not heard of, or took no page, for stall_ms).
  absl::AnyInvocable<void(absl::StatusOr<SendResult>)> done;
};

/// Where received pages go, and what becomes of them. Called on the transport's thread; replies may come from any.
/// Exactly one of Complete and Abort is called, last; destroyed without either: the transport has ended.
class IncomingHandOff {
 public:
  virtual ~IncomingHandOff() = default;
  /// Target of a page, of exactly its size; empty: not wanted, the sender skips it. The same whenever it is asked.
  /// Pages of the trailer: after Extend's reply.
  virtual absl::Span<uint8_t> target(uint32_t page) const = 0;
  /// Of pages [first, first + count) those without a target, ascending. For who knows it without a look at each: the
  /// sender waits for the answer, and hand-offs have hundreds of thousands.
  virtual std::vector<uint32_t> Unwanted(uint32_t first, uint32_t count) const {
    std::vector<uint32_t> pages;
    for (uint32_t page = first; page < first + count; ++page) {
      if (target(page).empty()) pages.push_back(page);
    }
    return pages;
  }
  /// Every byte of these pages is in its target and matches its checksum. They are not written again.
  virtual void Arrived(absl::Span<const uint32_t> pages) = 0;
  /// The trailer. Once; pages of the header may still arrive.
  virtual void Extend(HandOffPart trailer, absl::AnyInvocable<void(absl::Status)> reply) = 0;
  /// Every wanted page has arrived.
  virtual void Complete(absl::AnyInvocable<void(absl::Status)> reply) = 0;
  /// The hand-off ended early: targets are no longer written.
  virtual void Abort(absl::Status why) = 0;
};

/// How much a receiver has to do, for whoever chooses one.
struct ReceiverLoad {
  uint64_t capacity_bytes = 0;
  uint64_t free_bytes = 0;      // to be had at once, evictable pages included
  uint64_t waiting_offers = 0;  // for room
  uint64_t active_transfers = 0;
  uint64_t queued_bytes = 0;  // accepted, or waiting for room, and not yet arrived
};

/// What the daemon does with incoming hand-offs. Called on the transport's thread; replies may come from any.
class HandOffReceiver {
 public:
  struct Accepted {
    std::shared_ptr<IncomingHandOff> hand_off;
    std::string ticket;  // 1..kTicketBytesMax
    int device = -1;     // where its targets are: the ordinal of a GPU, exactly if the offer's pages are a GPU's
  };
  struct OfferReply {
    absl::AnyInvocable<void(absl::Status why)> waiting;       // for room; any number of times before `done`
    absl::AnyInvocable<void(absl::StatusOr<Accepted>)> done;  // once
    std::shared_ptr<const std::atomic<bool>> gone;            // true: the sender is, nobody looks at an answer
  };
  static constexpr size_t kTicketBytesMax = 4096;

  virtual ~HandOffReceiver() = default;
  /// room_ms: how long the sender lets it wait for room. Pages of a GPU (HandOffPart::gpu) can come into a GPU's memory
  /// alone: FAILED_PRECONDITION of the field `gpu` tells the sender to offer them from host memory.
  virtual void Offer(std::string peer, HandOffPart header, int64_t room_ms, OfferReply reply) = 0;
  /// One of `gone` has become true. Those that wait for room behind it need not.
  virtual void OfferGone() {}
  /// capacity_bytes, free_bytes and waiting_offers; the rest is the transport's to know.
  virtual ReceiverLoad Load() const = 0;
};

struct PeerInfo {
  std::string peer;
  bool incoming = false;
  uint64_t transfers = 0, failures = 0, bytes = 0;
  uint64_t copied_bytes = 0;  // of `bytes`: from one daemon's memory to the other's, or through UCX
  uint64_t active = 0;        // transfers under way
  double bytes_per_s = 0;  // while there were pages to send, of finished transfers, recent ones counting most; 0: never
  std::string last_error;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Offers a hand-off. Returns its handle for the calls below, which do nothing once it has ended.
  virtual uint64_t Begin(SendRequest request, SendEvents events) = 0;
  /// Pages that are ready, each once: of the header or, after Finish, of the trailer.
  virtual void Post(uint64_t transfer, std::vector<SendPage> pages) = 0;
  /// Says the trailer, once. The hand-off ends when every page that is wanted and not withdrawn was posted and taken.
  virtual void Finish(uint64_t transfer, HandOffPart trailer) = 0;
  virtual void Cancel(uint64_t transfer) = 0;
  /// Asks a peer how much it has to do. Errors: as SendEvents::done; RESOURCE_EXHAUSTED if too many are being asked.
  virtual void Probe(std::string peer, absl::AnyInvocable<void(absl::StatusOr<ReceiverLoad>)> done) = 0;
  virtual std::vector<PeerInfo> Peers() const = 0;
  /// "HOST:PORT" that peers connect to; empty if this transport only sends.
  virtual std::string listen_address() const = 0;
};

}  // namespace kvmanager
