// Hand-offs that this daemon sends: each goes to that of several peers that can take it and would be done first, or to
// the next one where that one does not accept. Owned by the daemon's wiring. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/handoff/outgoing_hand_off.h"
#include "kvmanager/handoff/peer_choice.h"

namespace kvmanager {

struct HandOffTargets {
  std::vector<std::string> peers;  // ParsePeers'; a single one is not asked beforehand
  int64_t room_ms = 0;             // once every peer that answers is full: how long the best may let it wait
  int64_t timeout_ms = 0;          // as OutgoingHandOff::Target's
  bool will_append = false;        // as Exports::Whole's
  std::string payer;               // whose it is (payer_name.h)
};

/// Begins to list what is sent: once for each peer that is tried, and once more for one that takes kept raw pages in
/// the trailer.
using BeginExport = absl::AnyInvocable<absl::StatusOr<std::unique_ptr<ExportBeginning>>(KeptRaw)>;

class OutgoingHandOffs {
 public:
  /// Everything outlives this and its promises. parts.active is set by this.
  explicit OutgoingHandOffs(OutgoingHandOff::Parts parts) : parts_(std::move(parts)) { parts_.active = &active_; }
  OutgoingHandOffs(const OutgoingHandOffs&) = delete;
  OutgoingHandOffs& operator=(const OutgoingHandOffs&) = delete;

  /// A hand-off that a peer has accepted. `list` is called before this returns, if there is room for one more. Dropping
  /// the promise cancels what is under way. Errors: SendPlace's; of `list`; a single peer's own; of several the best
  /// one's, with what each of the others said; UNAVAILABLE where none answered; DEADLINE_EXCEEDED.
  kj::Promise<absl::StatusOr<kj::Own<CancelOnDrop>>> Begin(BeginExport list, HandOffTargets targets) const;

  /// Sends what `list` lists, sequences that are complete, to whichever peer accepts it. One that breaks off after that
  /// is not replaced. Dropping the promise cancels it. Errors: Begin's and OutgoingHandOff's.
  kj::Promise<absl::StatusOr<SentHandOff>> Send(BeginExport list, HandOffTargets targets, SharedBlob blob) const;

  /// As AskPeers.
  kj::Promise<std::vector<PeerCandidate>> Ask(std::vector<std::string> peers) const;
  /// As Transport::Peers.
  std::vector<PeerInfo> Peers() const { return parts_.transport->Peers(); }

  /// Hand-offs under way, by payer.
  const OwnerCounts<std::string>& active() const { return active_.of_payers; }
  /// Of the payer and peer that have most.
  uint64_t most_to_peer() const { return active_.to_peers.most(); }

 private:
  // To the only peer.
  kj::Promise<absl::StatusOr<SentHandOff>> SendTo(BeginExport& list, const HandOffTargets& targets, SharedBlob blob,
                                                  KeptRaw kept_raw) const;

  ActiveSends active_;
  OutgoingHandOff::Parts parts_;
};

}  // namespace kvmanager
