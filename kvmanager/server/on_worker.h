// Work that takes too long for the event loop, run on a worker: its result comes back as a promise.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/server/context.h"

namespace kvmanager {

/// Runs `work` once on a worker; the promise is the loop's, and dropping it drops the result. `work` runs even so: it
/// must own what it reads. Result: movable, and destroyed on the loop's thread.
template <typename Result>
kj::Promise<Result> OnWorker(DaemonContext& daemon, absl::AnyInvocable<Result()> work) {
  struct Waiting {
    kj::Own<kj::PromiseFulfiller<Result>> fulfiller;
  };
  auto pair = kj::newPromiseAndFulfiller<Result>();
  auto waiting = std::make_unique<Waiting>();
  waiting->fulfiller = kj::mv(pair.fulfiller);
  daemon.workers->Post(WorkerPool::Priority::kEncode,
                       [queue = daemon.queue, waiting = std::move(waiting), work = std::move(work)]() mutable {
                         Result result = work();
                         queue->Post([waiting = std::move(waiting), result = std::move(result)]() mutable {
                           waiting->fulfiller->fulfill(kj::mv(result));
                         });
                       });
  return kj::mv(pair.promise);
}

}  // namespace kvmanager
