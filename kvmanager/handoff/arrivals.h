// Waits for sequences that come from another memory of their cache, and for room. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// A sequence that arrived, dropped with this unless somebody takes it.
class Arrived {
 public:
  Arrived(PageStore* store, const CreateResult& made) : store_(store), made_(made) {}
  Arrived(Arrived&& other) noexcept : store_(std::exchange(other.store_, nullptr)), made_(other.made_) {}
  Arrived& operator=(Arrived&&) = delete;
  ~Arrived() {
    if (store_ != nullptr) store_->Drop(made_.sequence);
  }
  SequenceId sequence() const { return made_.sequence; }
  /// It is the caller's now.
  CreateResult Take() {
    store_ = nullptr;
    return made_;
  }

 private:
  PageStore* store_;
  const CreateResult made_;
};

class Arrivals {
 public:
  /// Everything outlives the promises.
  Arrivals(PageStore* store, const Clock* clock, EventLoop* loop) : store_(store), clock_(clock), loop_(loop) {}

  /// lease: what PageStore::Fetch or PageStore::Copy returned. Tries again for a while where what is being given up
  /// would make room, waits until the pages are there, and commits. Dropping the promise gives everything back. Errors:
  /// those of the lease and of ArrivalLease::Commit.
  kj::Promise<absl::StatusOr<Arrived>> Await(absl::StatusOr<std::unique_ptr<ArrivalLease>> lease) const;

 private:
  kj::Promise<absl::StatusOr<Arrived>> GoOn(std::shared_ptr<ArrivalLease> lease, int64_t until_ns) const;

  PageStore* const store_;
  const Clock* const clock_;
  EventLoop* const loop_;
};

}  // namespace kvmanager
