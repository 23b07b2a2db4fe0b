#include "kvmanager/handoff/outgoing_hand_offs.h"

#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/handoff/list_export.h"

namespace kvmanager {
namespace {

using Begun = absl::StatusOr<kj::Own<CancelOnDrop>>;
using Listed = absl::StatusOr<std::unique_ptr<ExportLease>>;

// Peers in the order in which they are tried. Owned by the step that goes on with it.
struct Trial {
  const OutgoingHandOff::Parts& parts;
  BeginExport list;
  HandOffTargets targets;
  std::optional<SendPlace> place;      // for the next one; empty: to be taken
  std::unique_ptr<ExportLease> lease;  // likewise; nullptr: to be listed
  std::vector<std::string> order;
  absl::Status best;     // what the first of them said, or the first that would take the pages from host memory
  std::string refusals;  // what all of them said
  int full = -1;         // the first that had no room
};

void Refused(Trial& trial, const std::string& peer, const absl::Status& why) {
  absl::StrAppend(&trial.refusals, trial.refusals.empty() ? "" : "; ", peer, ": ",
                  absl::string_view(why.message().data(), why.message().size()));
  if (trial.best.ok() || (WantsHostPages(why) && !WantsHostPages(trial.best))) trial.best = why;
}

absl::StatusOr<SendPlace> TakePlace(Trial& trial, const std::string& peer) {
  if (!trial.place.has_value()) return SendPlace::Take(trial.parts.active, trial.targets.payer, peer);
  SendPlace place = *std::move(trial.place);
  trial.place.reset();
  if (absl::Status room = place.GoTo(peer); !room.ok()) return room;
  return place;
}

kj::Promise<Begun> TryOne(Trial& trial, const std::string& peer, int64_t room_ms,
                          KeptRaw kept_raw = KeptRaw::kWithHeader) {
  // Before anything is listed and pinned.
  absl::StatusOr<SendPlace> place = TakePlace(trial, peer);
  if (!place.ok()) return Begun(place.status());
  kj::Promise<Listed> listed = trial.lease != nullptr
                                   ? kj::Promise<Listed>(Listed(std::move(trial.lease)))
                                   : ListExport(trial.parts.turns, trial.targets.payer, trial.list(kept_raw));
  return listed
      .then([&trial, peer, room_ms, place = *std::move(place)](Listed lease) mutable -> kj::Promise<Begun> {
        if (!lease.ok()) return Begun(lease.status());
        const HandOffTargets& targets = trial.targets;
        return OutgoingHandOff::Begin(trial.parts, *std::move(lease),
                                      {peer, room_ms, targets.timeout_ms, targets.will_append, targets.payer},
                                      std::move(place));
      })
      .then([](Begun begun) -> kj::Promise<Begun> {
        if (!begun.ok()) return begun;
        kj::Own<CancelOnDrop> hand_off = *std::move(begun);
        auto accepted = (*hand_off)->Accepted();
        return accepted.then([hand_off = kj::mv(hand_off)](absl::StatusOr<std::string> ticket) mutable -> Begun {
          if (ticket.ok()) return kj::mv(hand_off);
          hand_off = nullptr;  // its place is for the next
          return ticket.status();
        });
      })
      .then([&trial, peer, room_ms, kept_raw](Begun begun) -> kj::Promise<Begun> {
        if (kept_raw == KeptRaw::kWithTrailer || !WantsKeptRawInTrailer(begun.status())) return begun;
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
  absl::StatusOr<SendPlace> place = SendPlace::Take(trial->parts.active, trial->targets.payer, /*peer=*/"");
  if (!place.ok()) return Begun(place.status());
  trial->place.emplace(*std::move(place));
  return ListExport(trial->parts.turns, trial->targets.payer, trial->list(KeptRaw::kWithHeader))
      .then([trial = kj::mv(trial)](Listed lease) mutable -> kj::Promise<Begun> {
        if (!lease.ok()) return Begun(lease.status());
        trial->lease = *std::move(lease);
        const uint64_t needed = trial->lease->needed_bytes();
        auto asked = AskPeers(trial->parts.transport, trial->parts.loop, trial->targets.peers);
        return asked.then([trial = kj::mv(trial), needed](std::vector<PeerCandidate> candidates) mutable {
          for (const size_t i : RankPeers(candidates, needed)) trial->order.push_back(candidates[i].peer);
          for (const PeerCandidate& each : candidates) {
            if (each.load.ok()) continue;
            absl::StrAppend(&trial->refusals, trial->refusals.empty() ? "" : "; ", each.peer, ": ",
                            std::string(each.load.status().message()));
          }
          return TryFrom(kj::mv(trial), 0);
        });
      });
}

}  // namespace

kj::Promise<absl::StatusOr<kj::Own<CancelOnDrop>>> OutgoingHandOffs::Begin(BeginExport list,
                                                                           HandOffTargets targets) const {
  const int64_t ms = targets.timeout_ms + targets.room_ms;
  auto trial =
      kj::heap<Trial>(Trial{parts_, std::move(list), std::move(targets), std::nullopt, nullptr, {}, {}, {}, -1});
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

kj::Promise<absl::StatusOr<SentHandOff>> OutgoingHandOffs::SendTo(BeginExport& list, const HandOffTargets& targets,
                                                                  SharedBlob blob, KeptRaw kept_raw) const {
  using Result = absl::StatusOr<SentHandOff>;
  // Before anything is listed and pinned.
  absl::StatusOr<SendPlace> place = SendPlace::Take(parts_.active, targets.payer, targets.peers[0]);
  if (!place.ok()) return Result(place.status());
  OutgoingHandOff::Target target{targets.peers[0], targets.room_ms, targets.timeout_ms, targets.will_append,
                                 targets.payer};
  return ListExport(parts_.turns, targets.payer, list(kept_raw))
      .then([this, target = std::move(target), place = *std::move(place)](Listed lease) mutable -> kj::Promise<Begun> {
        if (!lease.ok()) return Begun(lease.status());
        return OutgoingHandOff::Begin(parts_, *std::move(lease), std::move(target), std::move(place));
      })
      .then([blob = std::move(blob), room_ms = targets.room_ms](Begun begun) mutable -> kj::Promise<Result> {
        if (!begun.ok()) return Result(begun.status());
        kj::Own<CancelOnDrop> hand_off = *std::move(begun);
        auto sent = (*hand_off)->Finish(std::move(blob), room_ms);
        return sent.attach(kj::mv(hand_off));
      });
}

kj::Promise<absl::StatusOr<SentHandOff>> OutgoingHandOffs::Send(BeginExport list, HandOffTargets targets,
                                                                SharedBlob blob) const {
  using Result = absl::StatusOr<SentHandOff>;
  if (targets.peers.size() == 1) {
    auto sent = SendTo(list, targets, blob, KeptRaw::kWithHeader);
    return sent.then([this, list = std::move(list), targets = std::move(targets),
                      blob = std::move(blob)](Result result) mutable -> kj::Promise<Result> {
      if (!WantsKeptRawInTrailer(result.status())) return result;
      return SendTo(list, targets, std::move(blob), KeptRaw::kWithTrailer);
    });
  }
  const int64_t ms = targets.timeout_ms + targets.room_ms;
  auto deadline = parts_.loop->timer().afterDelay(ms * kj::MILLISECONDS).then([ms] {
    return Result(absl::DeadlineExceededError(absl::StrCat("the hand-off did not get there within ", ms, " ms")));
  });
  return Begin(std::move(list), std::move(targets))
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
