// Brings blocks of a prefix ahead of need: for prefetch, of a Cache or of Admin, which waits for them, and behind a
// match, which does not. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/handoff/arrivals.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/load_blocks.h"
#include "kvmanager/rpc/match_call.h"
#include "kvmanager/rpc/memory_calls.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/verify_blocks.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// What a prefetch uses; everything outlives it.
struct PrefetchParts {
  PageStore* store = nullptr;
  const Arrivals* arrivals = nullptr;
  WorkerPool* workers = nullptr;
  MessageQueue* queue = nullptr;
  TakingTurns* long_calls = nullptr;
};

/// What a match does with its hits, if that is `wanted`: it begins to bring them from the disk into host memory. That
/// ends with the connection. Nothing where the connection has limits::kPrefetchNamesMax on their way.
inline MatchCall::OnHits PrefetchingOf(const std::shared_ptr<Session>& session, const PrefetchParts& parts,
                                       const std::shared_ptr<const BoundCache>& cache, bool wanted) {
  if (!wanted) return nullptr;
  return [=, &parts](std::vector<BlockName> hits) {
    absl::StatusOr<std::shared_ptr<const void>> place = ReservePrefetch(session, hits.size());
    if (!place.ok()) return;
    std::shared_ptr<DiskLoad> load =
        parts.store->long_calls().BeginLoad(cache->cache.id, &hits, 0, LoadUrgency::kAhead);
    if (load == nullptr) return;
    GoOnWith(*session, LoadBlocks(session, Method::kPrefetch, parts.long_calls, cache->cache.owner, std::move(load))
                           .attach(*std::move(place)));
  };
}

/// One call of prefetch.
class PrefetchCall {
 public:
  using Names = capnp::List<api::BlockName>::Reader;

  /// names: of a message that stays. owner: whose work it is.
  PrefetchCall(std::shared_ptr<Session> session, const PrefetchParts& parts, WorkerPool::Owner owner, CacheId cache,
               Names names)
      : session_(std::move(session)),
        parts_(parts),
        owner_(owner),
        cache_(cache),
        reader_("names", names, limits::kBlockNamesMax) {}

  /// Once, while this lives. Resolves to what there is of the names once all has come. Errors: INVALID_ARGUMENT
  /// (names), NOT_FOUND (cache).
  kj::Promise<absl::StatusOr<MatchResult>> Run() {
    return Turns([this] { return reader_.ReadNext(); }).then([this]() -> kj::Promise<absl::StatusOr<MatchResult>> {
      if (!reader_.status().ok()) return absl::StatusOr<MatchResult>(reader_.status());
      names_ = reader_.Take();
      std::shared_ptr<DiskLoad> load = parts_.store->long_calls().BeginLoad(cache_, &names_, 0, LoadUrgency::kAhead);
      // What was loaded stays in the host's memory until it is on the GPU, too.
      return LoadBlocks(session_, Method::kPrefetch, parts_.long_calls, owner_, load)
          .then([this, load] {
            if (load != nullptr) names_ = load->TakeNames();
            return FetchToGpu();
          })
          .attach(std::move(load))
          .then([this] { return Match(); });
    });
  }

 private:
  kj::Promise<void> Turns(absl::AnyInvocable<bool()> step) {
    return InTurns(session_, Method::kPrefetch, parts_.long_calls, owner_, std::move(step));
  }

  // As a sequence that begins with them and goes at once.
  kj::Promise<void> FetchToGpu() {
    if (!parts_.store->long_calls().Fetches(cache_)) return kj::READY_NOW;
    auto check = parts_.store->caches().Check(cache_, names_);
    if (!check.ok()) return kj::READY_NOW;  // Match says why
    kj::Promise<void> verified = kj::READY_NOW;
    if (*check != nullptr) {
      verified = VerifyBlocks(parts_.workers, parts_.queue, owner_, session_->calls().turns(), *std::move(check));
    }
    return verified.then([this] { return parts_.arrivals->Await(parts_.store->Fetch(cache_, names_, 0)); })
        .then([](absl::StatusOr<Arrived>) {});  // no room for all of it: Match says what is there
  }

  kj::Promise<absl::StatusOr<MatchResult>> Match() {
    auto begun = parts_.store->caches().BeginMatch(cache_, names_);
    if (!begun.ok()) return absl::StatusOr<MatchResult>(begun.status());
    std::shared_ptr<PrefixMatch> match = *std::move(begun);
    return Turns([match] { return match->DoPiece(); }).then([match] { return match->result(); });
  }

  const std::shared_ptr<Session> session_;
  const PrefetchParts parts_;
  const WorkerPool::Owner owner_;
  const CacheId cache_;
  BlockNamesReader reader_;
  std::vector<BlockName> names_;
};

/// Does and answers a call, whose names and results are alike in both interfaces.
template <typename Context>
kj::Promise<void> Prefetch(std::shared_ptr<Session> session, const PrefetchParts& parts, WorkerPool::Owner owner,
                           CacheId cache, Context context) {
  auto call = std::make_shared<PrefetchCall>(session, parts, owner, cache, context.getParams().getNames());
  return call->Run()
      .then([session, context](absl::StatusOr<MatchResult> match) mutable {
        if (!match.ok()) return ServeError(*session, Method::kPrefetch, match.status(), context);
        WriteMatch(*match, context.getResults().initMatch());
      })
      .attach(std::move(call));
}

}  // namespace kvmanager
