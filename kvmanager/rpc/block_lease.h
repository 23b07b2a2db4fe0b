// BlocksLease: pages that a client reads where they lie, in slabs that it maps.
//
// The lease holds the pages' blocks, so nothing moves or writes them until release is answered or the capability goes,
// at the latest with its connection. The client copies bytes and compares its copy with the checksums; a block of which
// it says that they differ is compared here too, since a client may be wrong. The loop's thread.
#pragma once

#include <kj/async.h>

#include <memory>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/store/block_transfers.h"

namespace kvmanager {

class BlockLeaseService final : public api::BlocksLease::Server {
 public:
  /// place: ReserveBlockLease's. workers, queue: outlive it. owner: whose work comparing is.
  BlockLeaseService(std::shared_ptr<Session> session, std::shared_ptr<const void> place, WorkerPool* workers,
                    MessageQueue* queue, WorkerPool::Owner owner, std::unique_ptr<BlockReads> reads);

  kj::Promise<void> release(ReleaseContext context) override;
  kj::Promise<void> mapSlab(MapSlabContext context) override;

 private:
  absl::Status CheckHeld() const;

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<const void> place_;
  WorkerPool* const workers_;
  MessageQueue* const queue_;
  const WorkerPool::Owner owner_;
  std::shared_ptr<BlockReads> reads_;  // shared with workers that compare; nullptr: released
};

}  // namespace kvmanager
