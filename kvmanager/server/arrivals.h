// Sequences that come from another memory of their cache: waiting for them, and for room. The loop's thread.
#pragma once

#include <kj/async.h>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/server/context.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// Starts (PageStore::Fetch, PageStore::Copy), tries again for a while where what is being given up on `device` would
/// make room, waits until the pages are there, and commits: who gets a sequence has to drop it. Dropping the promise
/// gives everything back. Errors: those of the start and of ArrivalLease::Commit.
kj::Promise<absl::StatusOr<CreateResult>> Arrive(
    DaemonContext& daemon, int device, absl::AnyInvocable<absl::StatusOr<std::unique_ptr<ArrivalLease>>()> start);

}  // namespace kvmanager
