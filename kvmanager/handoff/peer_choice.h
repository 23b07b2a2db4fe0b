// Which of several daemons gets a hand-off: each is asked how much it has to do, and they are tried in the order in
// which they would be done. The loop's thread; RankPeers, ParsePeers and CheckPeersAllowed anywhere.
#pragma once

#include <kj/async.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/event_loop.h"
#include "transport/transport.h"

namespace kvmanager {

struct PeerCandidate {
  std::string peer;
  absl::StatusOr<ReceiverLoad> load;
  double bytes_per_s = 0;  // measured to there; 0: never
};

/// Which candidates to try, as indexes, best first. Those with needed_bytes free come before those without; among each,
/// the one first that would be done first: its queued bytes and needed_bytes over its bandwidth, ties in their order.
/// One to which nothing was measured counts as fast as the fastest, so that it is tried. Who did not answer is left
/// out.
std::vector<size_t> RankPeers(absl::Span<const PeerCandidate> candidates, uint64_t needed_bytes);

/// "HOST:PORT,HOST:PORT": 1..limits::kPeersChoiceMax, each of them once. A single one is left for the transport to
/// judge. Errors: INVALID_ARGUMENT naming "peer".
absl::StatusOr<std::vector<std::string>> ParsePeers(absl::string_view text);

/// Whether a client may have this daemon connect to what it names: `allowed` are the peers of --hand-off-peers,
/// compared as text; "any": whatever is named; empty: nothing. Errors: PERMISSION_DENIED naming `field` and the flag.
absl::Status CheckPeersAllowed(absl::string_view field, absl::Span<const std::string> peers,
                               absl::Span<const std::string> allowed);

/// Asks all at once, each for limits::kPeerAnswerMs at most: in their order, with the bandwidths measured so far.
kj::Promise<std::vector<PeerCandidate>> AskPeers(Transport* transport, EventLoop* loop, std::vector<std::string> peers);

}  // namespace kvmanager
