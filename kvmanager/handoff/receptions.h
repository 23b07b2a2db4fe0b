// Sequences that arrive: a hand-off from its acceptance to its end.
//
// Owned by IncomingHandOffs. What the transport calls only reads, and posts messages to the loop and, for looking at
// what arrived, to workers; everything else is the loop's thread.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kvmanager/handoff/hand_off_turns.h"
#include "kvmanager/handoff/incoming_parts.h"
#include "kvmanager/handoff/manifest.h"
#include "kvmanager/handoff/offered.h"
#include "kvmanager/handoff/tickets.h"
#include "transport/transport.h"

namespace kvmanager {

class Receptions {
 public:
  static constexpr size_t kValidateAtOnce = 16;  // pages of one task on a worker

  /// Both outlive it.
  Receptions(const IncomingParts& parts, Tickets* tickets, HandOffTurns* turns)
      : parts_(parts), tickets_(*tickets), turns_(*turns) {}
  Receptions(const Receptions&) = delete;
  Receptions& operator=(const Receptions&) = delete;

  /// What was offered is received from now on, into `import`. ticket: its name.
  std::shared_ptr<IncomingHandOff> Begin(const Offered& offered, std::unique_ptr<ImportLease> import,
                                         std::string ticket);

  /// Whether pages of this sequence are still to come by a hand-off.
  bool arriving(SequenceId sequence) const { return arriving_.contains(sequence); }
  /// Once none are, for whatever reason.
  kj::Promise<void> WhenSettled(SequenceId sequence);

 private:
  class Incoming;

  /// The trailer, in pieces.
  void Extend(std::shared_ptr<Incoming> incoming, absl::StatusOr<TrailerManifest> manifest,
              absl::AnyInvocable<void(absl::Status)> reply);
  void ExtendSoon(std::shared_ptr<Incoming> incoming, absl::AnyInvocable<void(absl::Status)> reply);
  void ExtendSome(std::shared_ptr<Incoming> incoming, absl::AnyInvocable<void(absl::Status)> reply);
  void Landed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages);
  void PostEncodes(const Incoming& incoming);
  void Recomputed(Incoming& incoming, absl::StatusOr<std::vector<ArrivedPage>> pages);
  void Complete(Incoming& incoming, absl::AnyInvocable<void(absl::Status)> reply);
  void Abort(Incoming& incoming, const absl::Status& why);
  void GoOn(Incoming& incoming);  // shows and commits what it can
  void CommitSoon(std::shared_ptr<Incoming> incoming);
  void CommitSome(std::shared_ptr<Incoming> incoming);
  void Refuse(Incoming& incoming, const absl::Status& why);
  void Fail(Incoming& incoming, const absl::Status& why);
  void Settle(SequenceId sequence);

  const IncomingParts& parts_;
  Tickets& tickets_;
  HandOffTurns& turns_;
  absl::flat_hash_map<SequenceId, std::vector<kj::Own<kj::PromiseFulfiller<void>>>> arriving_;  // who waits for it
};

}  // namespace kvmanager
