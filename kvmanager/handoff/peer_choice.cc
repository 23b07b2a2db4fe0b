#include "kvmanager/handoff/peer_choice.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kvmanager/base/address.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {
namespace {

constexpr size_t kNamedMax = 16;       // allowed peers, in an error
constexpr size_t kPeerShownMax = 300;  // bytes of one, where it is said again

using Load = absl::StatusOr<ReceiverLoad>;

kj::Promise<Load> Ask(Transport* transport, EventLoop* loop, const std::string& peer) {
  struct Waiting {
    kj::Own<kj::PromiseFulfiller<Load>> fulfiller;
  };
  auto pair = kj::newPromiseAndFulfiller<Load>();
  auto waiting = std::make_unique<Waiting>();
  waiting->fulfiller = kj::mv(pair.fulfiller);
  transport->Probe(peer, [queue = &loop->queue(), waiting = std::move(waiting)](Load load) mutable {
    queue->Post([waiting = std::move(waiting), load = std::move(load)]() mutable {
      waiting->fulfiller->fulfill(kj::mv(load));
    });
  });
  auto late = loop->timer().afterDelay(limits::kPeerAnswerMs * kj::MILLISECONDS).then([peer] {
    return Load(FieldError(absl::StatusCode::kDeadlineExceeded, absl::StrCat("ms without an answer of ", peer),
                           absl::StrCat(limits::kPeerAnswerMs), absl::StrCat("below ", limits::kPeerAnswerMs)));
  });
  return pair.promise.exclusiveJoin(kj::mv(late));
}

}  // namespace

std::vector<size_t> RankPeers(absl::Span<const PeerCandidate> candidates, uint64_t needed_bytes) {
  double fastest = 0;
  for (const PeerCandidate& each : candidates) fastest = std::max(fastest, each.bytes_per_s);
  if (fastest == 0) fastest = 1;
  std::vector<size_t> order;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].load.ok()) order.push_back(i);
  }
  const auto full = [&](size_t i) { return candidates[i].load->free_bytes < needed_bytes; };
  const auto seconds = [&](size_t i) {
    const PeerCandidate& each = candidates[i];
    const double bytes = static_cast<double>(each.load->queued_bytes) + static_cast<double>(needed_bytes);
    return bytes / (each.bytes_per_s > 0 ? each.bytes_per_s : fastest);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return full(a) != full(b) ? full(b) : seconds(a) < seconds(b); });
  return order;
}

absl::StatusOr<std::vector<std::string>> ParsePeers(absl::string_view text) {
  std::vector<std::string> peers = absl::StrSplit(text, ',');
  if (text.empty() || peers.size() > limits::kPeersChoiceMax) {
    return InvalidField("peer", absl::StrCat(text.empty() ? 0 : peers.size(), " addresses"),
                        absl::StrCat("HOST:PORT, or 1..", limits::kPeersChoiceMax, " of them with commas between"));
  }
  const size_t bytes_max = limits::kPeerTextBytesMax;
  for (const std::string& peer : peers) {
    if (peer.size() > bytes_max) {
      return InvalidField("peer", absl::StrCat(peer.size(), " bytes long"),
                          absl::StrCat("HOST:PORT of 1..", bytes_max, " bytes"));
    }
    if (peers.size() > 1) KV_RETURN_IF_ERROR(ParseHostPort("peer", peer).status());
  }
  for (auto peer = peers.begin(); peer != peers.end();) {
    peer = std::find(peers.begin(), peer, *peer) == peer ? peer + 1 : peers.erase(peer);
  }
  return peers;
}

absl::Status CheckPeersAllowed(absl::string_view field, absl::Span<const std::string> peers,
                               absl::Span<const std::string> allowed) {
  if (allowed.size() == 1 && allowed[0] == "any") return absl::OkStatus();
  for (const std::string& peer : peers) {
    if (std::find(allowed.begin(), allowed.end(), peer) != allowed.end()) continue;
    if (allowed.empty()) {
      return FieldError(absl::StatusCode::kPermissionDenied, field, peer,
                        absl::StrCat("of --hand-off-peers, which is not set: start this daemon with --hand-off-peers ",
                                     peer.substr(0, kPeerShownMax), ", or with --hand-off-peers any"));
    }
    std::string bound = absl::StrJoin(allowed.first(std::min(allowed.size(), kNamedMax)), ", ");
    if (allowed.size() > kNamedMax) absl::StrAppend(&bound, " or ", allowed.size() - kNamedMax, " more");
    return FieldError(absl::StatusCode::kPermissionDenied, field, peer, absl::StrCat("of --hand-off-peers, ", bound));
  }
  return absl::OkStatus();
}

kj::Promise<std::vector<PeerCandidate>> AskPeers(Transport* transport, EventLoop* loop,
                                                 std::vector<std::string> peers) {
  absl::flat_hash_map<std::string, double> measured;
  for (const PeerInfo& info : transport->Peers()) {
    if (!info.incoming) measured[info.peer] = info.bytes_per_s;
  }
  auto asked = kj::heapArrayBuilder<kj::Promise<Load>>(peers.size());
  for (const std::string& peer : peers) asked.add(Ask(transport, loop, peer));
  return kj::joinPromises(asked.finish())
      .then([peers = std::move(peers), measured = std::move(measured)](kj::Array<Load> loads) mutable {
        std::vector<PeerCandidate> candidates;
        candidates.reserve(peers.size());
        for (size_t i = 0; i < peers.size(); ++i) {
          const auto found = measured.find(peers[i]);
          const double bytes_per_s = found == measured.end() ? 0 : found->second;
          candidates.push_back({std::move(peers[i]), std::move(loads[i]), bytes_per_s});
        }
        return candidates;
      });
}

}  // namespace kvmanager
