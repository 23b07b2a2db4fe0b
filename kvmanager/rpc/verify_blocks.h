// Runs a store's BlockCheck: lists pages on the loop, and compares their bytes on workers. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>

#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/turn_watch.h"
#include "kvmanager/store/block_check.h"

namespace kvmanager {

/// Resolves once all is compared that there is to compare. Dropping the promise ends it behind the page that is being
/// compared. owner: whose work it is.
inline kj::Promise<void> VerifyBlocks(WorkerPool* workers, MessageQueue* queue, WorkerPool::Owner owner,
                                      TurnWatch* turns, std::shared_ptr<BlockCheck> check) {
  {
    const LoopTurn turn(turns, "verifyBlocks");
    if (!check->Next()) return kj::READY_NOW;
  }
  return OnWorkerInTurns(workers, queue, WorkerPool::Priority::kAttend, owner, [check] { return check->CompareOne(); })
      .then([=] { return VerifyBlocks(workers, queue, owner, turns, check); });
}

}  // namespace kvmanager
