// Sequences that come from another memory of their cache: waiting for them, and for room. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/rpc/context.h"
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

/// Starts (PageStore::Fetch, PageStore::Copy), tries again for a while where what is being given up would make room,
/// waits until the pages are there, and commits. Dropping the promise gives everything back. Errors: those of the start
/// and of ArrivalLease::Commit.
kj::Promise<absl::StatusOr<Arrived>> Arrive(DaemonContext& daemon, absl::StatusOr<std::unique_ptr<ArrivalLease>> lease);

}  // namespace kvmanager
