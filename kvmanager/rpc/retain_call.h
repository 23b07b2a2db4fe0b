// One call of retain, of a Cache or of Admin, in pieces that each take less than a turn of the event loop. The loop's
// thread.
#pragma once

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/store/cache_directory.h"

namespace kvmanager {

class RetainCall {
 public:
  using Names = capnp::List<api::BlockName>::Reader;

  /// caches: outlives it. names: of a message that stays.
  RetainCall(CacheDirectory* caches, CacheId cache, Names names, uint8_t priority, uint64_t ttl_ms)
      : caches_(caches),
        cache_(cache),
        priority_(priority),
        ttl_ms_(ttl_ms),
        reader_("names", names, limits::kBlockNamesMax) {}

  /// Reads a part of the names, or retains some. False: that was the last piece.
  bool DoPiece() {
    if (retaining_ == nullptr) {
      if (reader_.ReadNext()) return true;
      if (status_ = reader_.status(); !status_.ok()) return false;
      auto retaining = caches_->BeginRetain(cache_, reader_.Take(), priority_, ttl_ms_);
      if (status_ = retaining.status(); !status_.ok()) return false;
      retaining_ = *std::move(retaining);
    }
    if (retaining_->DoPiece()) return true;
    const absl::StatusOr<RetainResult> result = retaining_->result();
    if (status_ = result.status(); status_.ok()) result_ = *result;
    return false;
  }

  // After the last piece.
  const absl::Status& status() const { return status_; }
  const RetainResult& result() const { return result_; }

 private:
  CacheDirectory* const caches_;
  const CacheId cache_;
  const uint8_t priority_;
  const uint64_t ttl_ms_;
  BlockNamesReader reader_;
  std::unique_ptr<Retaining> retaining_;  // nullptr: names are still read
  RetainResult result_;
  absl::Status status_;
};

/// Does and answers a call, whose parameters and results are alike in both interfaces. owner: whose work it is.
template <typename Context>
kj::Promise<void> Retain(std::shared_ptr<Session> session, TakingTurns* turns, WorkerPool::Owner owner,
                         CacheDirectory* caches, CacheId cache, Context context) {
  const auto params = context.getParams();
  auto call = std::make_shared<RetainCall>(caches, cache, params.getNames(), params.getPriority(), params.getTtlMs());
  return InTurns(session, Method::kRetain, turns, owner, [call] { return call->DoPiece(); })
      .then([session, call, context]() mutable {
        if (!call->status().ok()) return ServeError(*session, Method::kRetain, call->status(), context);
        auto results = context.getResults();
        results.setBlocks(static_cast<uint32_t>(call->result().blocks));
        results.setBytes(call->result().bytes);
      });
}

}  // namespace kvmanager
