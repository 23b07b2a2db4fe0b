// Hand-offs, both ways: sending a sequence that a client holds, and keeping received ones until a client claims them.
//
// HandOffDesk is owned by the Server and outlives the transport. Offer, Complete and Abort are called on the
// transport's thread and only post messages; everything else is the loop's thread. A received sequence is visible to
// nobody but the holder of its ticket: 32 random bytes, good for one claim within Options::hand_off_lease_ms.
#pragma once

#include <kj/async.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/server/context.h"
#include "transport/transport.h"

namespace kvmanager {

class HandOffDesk final : public HandOffReceiver {
 public:
  static constexpr size_t kTicketBytes = 32;

  struct Claimed {
    SequenceId sequence = 0;
    uint64_t tokens = 0;
    std::string blob;
  };

  explicit HandOffDesk(DaemonContext* daemon) : daemon_(daemon) {}

  void Offer(std::string peer, std::string manifest, std::vector<uint64_t> page_bytes,
             std::vector<uint64_t> page_checksums, OfferReply reply) override;
  void Complete(std::unique_ptr<IncomingHandOff> hand_off, CompleteReply reply) override;
  void Abort(std::unique_ptr<IncomingHandOff> hand_off, absl::Status why) override;

  /// The sequence that waits for this ticket, for a look. Errors: Claim's.
  absl::StatusOr<SequenceId> Find(absl::string_view ticket, CacheId cache) const;
  /// While its sequence is copied nobody else may: FAILED_PRECONDITION if somebody does. Claim and EndClaim end it.
  absl::Status BeginClaim(absl::string_view ticket);
  void EndClaim(absl::string_view ticket);
  /// Takes over a received sequence, once. It is in the host's memory: `cache`, or the host's of equal digest. Errors:
  /// NOT_FOUND (no such ticket, or it expired), FAILED_PRECONDITION (it is of another cache; the ticket stays good).
  absl::StatusOr<Claimed> Claim(absl::string_view ticket, CacheId cache);

  /// Received sequences that wait to be claimed.
  size_t tickets() const { return tickets_.size(); }
  /// Those, and hand-offs that were accepted and are being received.
  size_t waiting() const { return tickets_.size() + receiving_->load(std::memory_order_relaxed); }
  /// Gives back every sequence that waits, and logs how many. Before the event loop ends.
  void DropAll();

 private:
  class Incoming;
  struct Waiting {
    SequenceId sequence = 0;
    CacheId cache = 0;
    uint64_t tokens = 0;
    std::string blob;
    bool being_claimed = false;
    kj::Promise<void> expiry = nullptr;
  };

  struct Offered;

  absl::Status MayReceive() const;
  void Consider(std::shared_ptr<Offered> offered);
  absl::StatusOr<std::unique_ptr<IncomingHandOff>> Accept(Offered& offered);
  void Answer(Offered& offered, absl::StatusOr<std::unique_ptr<IncomingHandOff>> incoming);
  absl::StatusOr<std::string> Keep(Incoming& incoming);
  void Expire(const std::string& ticket);

  DaemonContext* const daemon_;
  absl::flat_hash_map<std::string, std::unique_ptr<Waiting>> tickets_;
  // Shared with each Incoming, which may end on the transport's thread, or with the queue's last messages.
  const std::shared_ptr<std::atomic<size_t>> receiving_ = std::make_shared<std::atomic<size_t>>(0);
};

/// Sends `sequence` to `peer`. Dropping the promise cancels the transfer; pages stay pinned until the transport lets
/// go. Errors: those of PageStore::Export and Transport::Send; DEADLINE_EXCEEDED after timeout_ms.
kj::Promise<absl::StatusOr<SendResult>> SendSequence(DaemonContext& daemon, SequenceId sequence, std::string peer,
                                                     std::string blob, int64_t timeout_ms);

}  // namespace kvmanager
