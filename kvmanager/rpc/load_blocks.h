// Waits for blocks that come from the disk: pieces of the load in turns of the loop, and in between whatever comes. The
// loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>
#include <utility>

#include "kvmanager/rpc/serve.h"
#include "kvmanager/store/disk_load.h"

namespace kvmanager {

/// Resolves once the load can go on.
inline kj::Promise<void> WhenMore(DiskLoad& load) {
  auto more = kj::newPromiseAndFulfiller<void>();
  load.OnMore([fulfiller = kj::mv(more.fulfiller)]() mutable { fulfiller->fulfill(); });
  return kj::mv(more.promise);
}

/// Resolves once the load is done; nullptr is. owner: whose work it is.
inline kj::Promise<void> LoadBlocks(std::shared_ptr<Session> session, Method method, TakingTurns* turns,
                                    WorkerPool::Owner owner, std::shared_ptr<DiskLoad> load) {
  if (load == nullptr) return kj::READY_NOW;
  return InTurns(session, method, turns, owner, [load] { return load->DoPiece(); })
      .then([session, method, turns, owner, load]() mutable -> kj::Promise<void> {
        if (load->done()) return kj::READY_NOW;
        kj::Promise<void> more = WhenMore(*load);
        return more.then([session = std::move(session), method, turns, owner, load = std::move(load)]() mutable {
          return LoadBlocks(std::move(session), method, turns, owner, std::move(load));
        });
      });
}

}  // namespace kvmanager
