// Work that takes too long for the event loop, run on a worker: its result comes back as a promise.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

/// Runs `work` once on a worker. The promise belongs to the thread that runs the messages of `queue`. Dropping it drops
/// the result, but `work` runs even so: it must own what it reads. Result: movable, and destroyed on the loop's thread.
template <typename Result>
kj::Promise<Result> OnWorker(WorkerPool* workers, MessageQueue* queue, WorkerPool::Owner owner,
                             absl::AnyInvocable<Result()> work) {
  struct Waiting {
    kj::Own<kj::PromiseFulfiller<Result>> fulfiller;
  };
  auto pair = kj::newPromiseAndFulfiller<Result>();
  auto waiting = std::make_unique<Waiting>();
  waiting->fulfiller = kj::mv(pair.fulfiller);
  auto task = [queue, waiting = std::move(waiting), work = std::move(work)]() mutable {
    Result result = work();
    queue->Post([waiting = std::move(waiting), result = std::move(result)]() mutable {
      waiting->fulfiller->fulfill(kj::mv(result));
    });
  };
  workers->Post(WorkerPool::Priority::kEncode, std::move(task), owner);
  return kj::mv(pair.promise);
}

}  // namespace kvmanager
