// Beginning a hand-off at one of several peers: who can take it and would be done first, or who is next where that one
// does not accept. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/handoff/outgoing_hand_off.h"
#include "kvmanager/rpc/context.h"

namespace kvmanager {

struct HandOffTargets {
  std::vector<std::string> peers;  // ParsePeers'; a single one is not asked beforehand
  int64_t room_ms = 0;             // once every peer that answers is full: how long the best may let it wait
  int64_t timeout_ms = 0;          // as OutgoingHandOff::Target's
  bool goes_on = false;            // as PageStore::ExportWhole's
};

/// Leases of what is sent: one for each peer that is tried.
using MakeExportLease = absl::AnyInvocable<absl::StatusOr<std::unique_ptr<ExportLease>>()>;

/// A hand-off that a peer has accepted. Dropping the promise cancels what is under way. Errors: of `lease`; a single
/// peer's own; of several the best one's, with what each of the others said; UNAVAILABLE where none answered;
/// DEADLINE_EXCEEDED.
kj::Promise<absl::StatusOr<kj::Own<CancelOnDrop>>> BeginHandOff(DaemonContext& daemon, MakeExportLease lease,
                                                                HandOffTargets targets);

/// Sends what `lease` gives leases of, finished ones, to whichever peer accepts it. One that breaks off after that is
/// not replaced. Dropping the promise cancels it. Errors: BeginHandOff's and OutgoingHandOff's.
kj::Promise<absl::StatusOr<SentHandOff>> SendSequence(DaemonContext& daemon, MakeExportLease lease,
                                                      HandOffTargets targets, std::string blob);

}  // namespace kvmanager
