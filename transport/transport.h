// Moves the pages of a hand-off from one daemon's slots into another's.
//
// The transport knows descriptors, not stores: what is handed over is an opaque manifest and a list of pages, each a
// run of bytes with a checksum; the receiver answers with targets. A transfer completes exactly once on each side.
// Nothing is visible at the receiver before HandOffReceiver::Complete. Owned by main(); methods may be called from any
// thread; callbacks run on the transport's own thread and must only pass a message on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager {

struct SendPage {
  absl::Span<const uint8_t> bytes;  // stays valid and unchanged until `done`
  uint64_t checksum = 0;            // XXH3-64 of bytes
};

struct SendRequest {
  std::string peer;             // "HOST:PORT"
  std::string manifest;         // opaque, 1..kManifestBytesMax
  std::vector<SendPage> pages;  // in the order of sending
  int64_t timeout_ms = 0;       // without progress; 0: kStallMsDefault

  static constexpr size_t kManifestBytesMax = 16 << 20;
  static constexpr size_t kPagesMax = 1 << 20;
  static constexpr uint64_t kPageBytesMax = 64 << 20;
  static constexpr int64_t kStallMsDefault = 4000;  // both sides give up after this long without a byte
};

struct SendResult {
  std::string ticket;       // from the receiver: what a client claims the sequence with
  uint64_t bytes_sent = 0;  // of pages; pages the receiver had already are not sent
  uint64_t pages_sent = 0;
  uint64_t pages_skipped = 0;
  double seconds = 0;  // from the first byte to the receiver's confirmation
};

/// Where received pages go. One object per incoming hand-off; destroyed without Complete means: give everything back.
class IncomingHandOff {
 public:
  virtual ~IncomingHandOff() = default;
  /// Target of page i; empty: not wanted, the sender skips it.
  virtual absl::Span<uint8_t> target(size_t page) = 0;
};

/// What the daemon does with an incoming hand-off. Called on the transport's thread; answers may come from any thread.
class HandOffReceiver {
 public:
  virtual ~HandOffReceiver() = default;
  using OfferReply = absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<IncomingHandOff>>)>;
  using CompleteReply = absl::AnyInvocable<void(absl::StatusOr<std::string> ticket)>;
  /// `page_bytes[i]` and `page_checksums[i]` as the sender announced them; targets must have exactly those sizes.
  virtual void Offer(std::string peer, std::string manifest, std::vector<uint64_t> page_bytes,
                     std::vector<uint64_t> page_checksums, OfferReply reply) = 0;
  /// Every wanted page arrived and matched its checksum.
  virtual void Complete(std::unique_ptr<IncomingHandOff> hand_off, CompleteReply reply) = 0;
  /// The transfer ended early: `hand_off`'s targets are no longer written.
  virtual void Abort(std::unique_ptr<IncomingHandOff> hand_off, absl::Status why) = 0;
};

struct PeerInfo {
  std::string peer;
  bool incoming = false;
  uint64_t transfers = 0, failures = 0, bytes = 0;
  uint64_t active = 0;     // transfers under way
  double bytes_per_s = 0;  // of the last finished transfer
  std::string last_error;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Sends; `done` is called exactly once. Returns a handle for Cancel. Errors given to `done`: UNAVAILABLE (peer),
  /// DATA_LOSS (checksum), RESOURCE_EXHAUSTED and others as the receiver answered, CANCELLED, DEADLINE_EXCEEDED (no
  /// progress).
  virtual uint64_t Send(SendRequest request, absl::AnyInvocable<void(absl::StatusOr<SendResult>)> done) = 0;
  virtual void Cancel(uint64_t transfer) = 0;
  virtual std::vector<PeerInfo> Peers() const = 0;
  /// "HOST:PORT" that peers connect to; empty if this transport only sends.
  virtual std::string listen_address() const = 0;
};

}  // namespace kvmanager
