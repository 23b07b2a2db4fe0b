// Does a store's LongCall: pieces of it in turns of the loop, comparisons on workers. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>

#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/store/long_call.h"

namespace kvmanager {

/// Resolves once the call is done. Dropping the promise ends it behind the page that is being compared. owner: whose
/// work it is.
inline kj::Promise<void> DoLongCall(std::shared_ptr<Session> session, Method method, const SequenceParts& parts,
                                    WorkerPool::Owner owner, std::shared_ptr<LongCall> call) {
  auto next = std::make_shared<LongCall::Next>();
  return InTurns(session, method, parts.long_calls, owner,
                 [call, next] { return (*next = call->DoPiece()) == LongCall::Next::kPiece; })
      .then([session, method, &parts, owner, call, next]() mutable -> kj::Promise<void> {
        if (*next == LongCall::Next::kDone) return kj::READY_NOW;
        return OnWorkerInTurns(parts.workers, &parts.loop->queue(), WorkerPool::Priority::kAttend, owner,
                               [call] { return call->CompareOne(); })
            .then([session = std::move(session), method, &parts, owner, call]() mutable {
              return DoLongCall(std::move(session), method, parts, owner, std::move(call));
            });
      });
}

}  // namespace kvmanager
