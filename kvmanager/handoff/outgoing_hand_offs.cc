#include "kvmanager/handoff/outgoing_hand_offs.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/gpu_landing.h"

namespace kvmanager {
namespace {

using Begun = absl::StatusOr<kj::Own<CancelOnDrop>>;

// Counts a hand-off for which a peer is still chosen.
class Choosing {
 public:
  Choosing(OwnerCounts<std::string>* active, std::string payer) : active_(active), payer_(std::move(payer)) {
    active_->Add(payer_);
  }
  ~Choosing() { active_->Remove(payer_); }
  Choosing(const Choosing&) = delete;
  Choosing& operator=(const Choosing&) = delete;

 private:
  OwnerCounts<std::string>* const active_;
  const std::string payer_;
};

// Peers in the order in which they are tried. Owned by the step that goes on with it.
struct Trial {
  const OutgoingHandOff::Parts& parts;
  MakeExportLease make_lease;
  HandOffTargets targets;
  std::unique_ptr<ExportLease> lease;  // for the next one; nullptr: to be made
  std::vector<std::string> order;
  absl::Status best;     // what the first of them said, or the first that would take the pages from host memory
  std::string refusals;  // what all of them said
  int full = -1;         // the first that had no room
};

uint64_t NeededBytes(const HandOffHeader& first) {
  const uint64_t page_tokens = first.config.layout.page_tokens;
  const uint64_t pages = (first.tokens + page_tokens - 1) / page_tokens * first.config.layers;
  uint64_t bytes = (pages - first.pages.size()) * first.config.layout.raw_bytes();
  for (const HandOffPage& page : first.pages) bytes += page.bytes;
  return bytes;
}

void Refused(Trial& trial, const std::string& peer, const absl::Status& why) {
  absl::StrAppend(&trial.refusals, trial.refusals.empty() ? "" : "; ", peer, ": ",
                  absl::string_view(why.message().data(), why.message().size()));
  if (trial.best.ok() || (WantsHostPages(why) && !WantsHostPages(trial.best))) trial.best = why;
}

kj::Promise<Begun> TryOne(Trial& trial, const std::string& peer, int64_t room_ms,
                          KeptRaw kept_raw = KeptRaw::kWithHeader) {
  if (absl::Status room = OutgoingHandOff::CheckRoom(trial.parts, trial.targets.payer, peer); !room.ok()) {
    return Begun(std::move(room));
  }
  if (trial.lease == nullptr) {
    auto lease = trial.make_lease(kept_raw);
    if (!lease.ok()) return Begun(lease.status());
    trial.lease = *std::move(lease);
  }
  auto begun =
      OutgoingHandOff::Begin(trial.parts, std::move(trial.lease),
                             {peer, room_ms, trial.targets.timeout_ms, trial.targets.will_append, trial.targets.payer});
  if (!begun.ok()) return Begun(begun.status());
  auto hand_off = kj::heap<CancelOnDrop>(*std::move(begun));
  auto accepted = (*hand_off)->Accepted();
  return accepted.then([&trial, peer, room_ms, kept_raw,
                        hand_off = kj::mv(hand_off)](absl::StatusOr<std::string> ticket) mutable -> kj::Promise<Begun> {
    if (ticket.ok()) return Begun(kj::mv(hand_off));
    if (kept_raw == KeptRaw::kWithTrailer || !WantsKeptRawInTrailer(ticket.status())) return Begun(ticket.status());
    hand_off = nullptr;  // its place is for the next
    return TryOne(trial, peer, room_ms, KeptRaw::kWithTrailer);
  });
}

kj::Promise<Begun> TryFrom(kj::Own<Trial> trial, size_t at) {
  if (at == trial->order.size()) {
    if (trial->full >= 0 && trial->targets.room_ms > 0) {
      const std::string peer = trial->order[trial->full];
      auto tried = TryOne(*trial, peer, trial->targets.room_ms);
      return tried.attach(kj::mv(trial));
    }
    const absl::StatusCode code = trial->best.ok() ? absl::StatusCode::kUnavailable : trial->best.code();
    absl::Status none(code, absl::StrCat("no peer takes the hand-off: ", trial->refusals));
    if (WantsHostPages(trial->best)) none = WithDetail(std::move(none), DetailOf(trial->best));
    return Begun(std::move(none));
  }
  const std::string peer = trial->order[at];
  auto tried = TryOne(*trial, peer, 0);
  return tried.then([trial = kj::mv(trial), peer, at](Begun begun) mutable -> kj::Promise<Begun> {
    if (begun.ok()) return begun;
    spdlog::info("hand-off to {} of {} peers: {}", peer, trial->targets.peers.size(), begun.status().ToString());
    if (absl::IsResourceExhausted(begun.status()) && trial->full < 0) trial->full = static_cast<int>(at);
    Refused(*trial, peer, begun.status());
    return TryFrom(kj::mv(trial), at + 1);
  });
}

kj::Promise<Begun> Choose(kj::Own<Trial> trial) {
  if (absl::Status room = OutgoingHandOff::CheckRoom(trial->parts, trial->targets.payer, /*peer=*/""); !room.ok()) {
    return Begun(std::move(room));
  }
  auto lease = trial->make_lease(KeptRaw::kWithHeader);
  if (!lease.ok()) return Begun(lease.status());
  trial->lease = *std::move(lease);
  const uint64_t needed = NeededBytes(trial->lease->first());
  auto choosing = kj::heap<Choosing>(&trial->parts.active->of_payers, trial->targets.payer);
  auto asked = AskPeers(trial->parts.transport, trial->parts.loop, trial->targets.peers).attach(kj::mv(choosing));
  return asked.then([trial = kj::mv(trial), needed](std::vector<PeerCandidate> candidates) mutable {
    for (const size_t i : RankPeers(candidates, needed)) trial->order.push_back(candidates[i].peer);
    for (const PeerCandidate& each : candidates) {
      if (each.load.ok()) continue;
      absl::StrAppend(&trial->refusals, trial->refusals.empty() ? "" : "; ", each.peer, ": ",
                      std::string(each.load.status().message()));
    }
    return TryFrom(kj::mv(trial), 0);
  });
}

}  // namespace

kj::Promise<absl::StatusOr<kj::Own<CancelOnDrop>>> OutgoingHandOffs::Begin(MakeExportLease lease,
                                                                           HandOffTargets targets) const {
  const int64_t ms = targets.timeout_ms + targets.room_ms;
  auto trial = kj::heap<Trial>(Trial{parts_, std::move(lease), std::move(targets), nullptr, {}, {}, {}, -1});
  if (trial->targets.peers.size() == 1) {
    const std::string peer = trial->targets.peers[0];
    auto tried = TryOne(*trial, peer, trial->targets.room_ms);
    return tried.attach(kj::mv(trial));
  }
  auto deadline = parts_.loop->timer().afterDelay(ms * kj::MILLISECONDS).then([ms] {
    return Begun(absl::DeadlineExceededError(absl::StrCat("no peer accepted the hand-off within ", ms, " ms")));
  });
  return Choose(kj::mv(trial)).exclusiveJoin(kj::mv(deadline));
}

kj::Promise<absl::StatusOr<SentHandOff>> OutgoingHandOffs::SendTo(MakeExportLease& make_lease,
                                                                  const HandOffTargets& targets, SharedBlob blob,
                                                                  KeptRaw kept_raw) const {
  using Result = absl::StatusOr<SentHandOff>;
  // Before anything is listed and pinned.
  if (absl::Status room = OutgoingHandOff::CheckRoom(parts_, targets.payer, targets.peers[0]); !room.ok())
    return Result(std::move(room));
  auto lease = make_lease(kept_raw);
  if (!lease.ok()) return Result(lease.status());
  auto begun = OutgoingHandOff::Begin(
      parts_, *std::move(lease),
      {targets.peers[0], targets.room_ms, targets.timeout_ms, targets.will_append, targets.payer});
  if (!begun.ok()) return Result(begun.status());
  auto hand_off = kj::heap<CancelOnDrop>(*std::move(begun));
  auto sent = (*hand_off)->Finish(std::move(blob), targets.room_ms);
  return sent.attach(kj::mv(hand_off));
}

kj::Promise<absl::StatusOr<SentHandOff>> OutgoingHandOffs::Send(MakeExportLease make_lease, HandOffTargets targets,
                                                                SharedBlob blob) const {
  using Result = absl::StatusOr<SentHandOff>;
  if (targets.peers.size() == 1) {
    auto sent = SendTo(make_lease, targets, blob, KeptRaw::kWithHeader);
    return sent.then([this, make_lease = std::move(make_lease), targets = std::move(targets),
                      blob = std::move(blob)](Result result) mutable -> kj::Promise<Result> {
      if (!WantsKeptRawInTrailer(result.status())) return result;
      return SendTo(make_lease, targets, std::move(blob), KeptRaw::kWithTrailer);
    });
  }
  const int64_t ms = targets.timeout_ms + targets.room_ms;
  auto deadline = parts_.loop->timer().afterDelay(ms * kj::MILLISECONDS).then([ms] {
    return Result(absl::DeadlineExceededError(absl::StrCat("the hand-off did not get there within ", ms, " ms")));
  });
  return Begin(std::move(make_lease), std::move(targets))
      .then([blob = std::move(blob)](Begun begun) mutable -> kj::Promise<Result> {
        if (!begun.ok()) return Result(begun.status());
        kj::Own<CancelOnDrop> hand_off = *std::move(begun);
        auto sent = (*hand_off)->Finish(std::move(blob));
        return sent.attach(kj::mv(hand_off));
      })
      .exclusiveJoin(kj::mv(deadline));
}

kj::Promise<std::vector<PeerCandidate>> OutgoingHandOffs::Ask(std::vector<std::string> peers) const {
  return AskPeers(parts_.transport, parts_.loop, std::move(peers));
}

}  // namespace kvmanager
