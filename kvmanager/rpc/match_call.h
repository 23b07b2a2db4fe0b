// One call of match, in pieces that each take less than a turn of the event loop. The loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/store/cache_directory.h"

namespace kvmanager {

using PrefixRequests = capnp::List<api::SequenceRequest>::Reader;

/// Of request `i`.
inline std::unique_ptr<BlockNamesReader> PrefixReader(const PrefixRequests& requests, size_t i) {
  return std::make_unique<BlockNamesReader>(absl::StrCat("requests[", i, "].prefix"),
                                            requests[static_cast<uint32_t>(i)].getPrefix(), limits::kBlockNamesMax);
}

/// What times calls; both outlive them.
struct MatchTimes {
  const Clock* clock = nullptr;
  MatchMetrics* metrics = nullptr;
};

class MatchCall {
 public:
  using OnHits = absl::AnyInvocable<void(std::vector<BlockName> hits)>;

  /// caches: outlives it. requests: of a message that stays. on_elsewhere: is called with the hits of each request that
  /// are not all in the cache's own memory; nullptr: nothing is.
  MatchCall(CacheDirectory* caches, const MatchTimes& times, CacheId cache, PrefixRequests requests,
            OnHits on_elsewhere)
      : caches_(caches),
        times_(times),
        start_ns_(times.clock->NowNs()),
        cache_(cache),
        requests_(requests),
        on_elsewhere_(std::move(on_elsewhere)) {}

  /// Reads a part of a prefix, or looks for one. False: that was the last piece.
  bool DoPiece() {
    if (found_.size() == requests_.size()) return false;
    if (match_ == nullptr) {
      if (reader_ == nullptr) reader_ = PrefixReader(requests_, found_.size());
      if (reader_->ReadNext()) return true;
      if (status_ = reader_->status(); !status_.ok()) return false;
      auto match = caches_->BeginMatch(cache_, reader_->Take());
      reader_ = nullptr;
      if (status_ = match.status(); !status_.ok()) return false;
      match_ = *std::move(match);
    }
    if (match_->DoPiece()) return true;
    const std::unique_ptr<PrefixMatch> match = std::exchange(match_, nullptr);
    const absl::StatusOr<MatchResult> result = match->result();
    if (status_ = result.status(); !status_.ok()) return false;
    if (on_elsewhere_ != nullptr && result->in_memory < result->hit_blocks) on_elsewhere_(match->TakeHits());
    found_.push_back(*result);
    if (found_.size() == requests_.size()) {
      times_.metrics->seconds.Observe(static_cast<double>(times_.clock->NowNs() - start_ns_) * 1e-9);
    }
    return true;
  }

  /// Of all requests: one that is malformed is an error for all.
  const absl::Status& status() const { return status_; }
  /// [requests]
  const std::vector<MatchResult>& found() const { return found_; }

 private:
  CacheDirectory* const caches_;
  const MatchTimes times_;
  const int64_t start_ns_;
  const CacheId cache_;
  const PrefixRequests requests_;
  OnHits on_elsewhere_;
  std::unique_ptr<BlockNamesReader> reader_;  // of the next request
  std::unique_ptr<PrefixMatch> match_;        // of the next request
  std::vector<MatchResult> found_;            // of those before
  absl::Status status_;
};

/// Does and answers a call.
template <typename Context>
kj::Promise<void> Match(std::shared_ptr<Session> session, TakingTurns* turns, WorkerPool::Owner owner,
                        std::shared_ptr<MatchCall> call, Context context) {
  return InTurns(session, Method::kMatch, turns, owner, [call] { return call->DoPiece(); })
      .then([session, call, context]() mutable {
        if (!call->status().ok()) return ServeError(*session, Method::kMatch, call->status(), context);
        auto results = context.getResults().initResults(static_cast<uint32_t>(call->found().size()));
        for (uint32_t i = 0; i < results.size(); ++i) WriteMatch(call->found()[i], results[i]);
      });
}

}  // namespace kvmanager
