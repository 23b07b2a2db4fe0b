// BlocksLease: pages that a client reads where they lie, in slabs that it maps.
//
// The lease holds the pages' blocks, so nothing moves or writes them until release is answered or the capability goes,
// at the latest with its connection, or until its time is over: then release says that they were not held all the time.
// The client copies bytes and compares its copy with the checksums; a block of which it says that they differ is
// compared here too, since a client may be wrong. The loop's thread.
#pragma once

#include <kj/async.h>
#include <kj/timer.h>

#include <cstdint>
#include <memory>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/disposals.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/store/block_transfers.h"

namespace kvmanager {

class BlockLeaseService final : public api::BlocksLease::Server {
 public:
  /// Everything outlives it.
  struct Parts {
    WorkerPool* workers = nullptr;
    MessageQueue* queue = nullptr;
    Disposals* disposals = nullptr;  // where the end gives back what is held; nullptr: at once
    kj::Timer* timer = nullptr;      // nullptr: it has no end
    int64_t ms = 0;                  // until that
  };
  struct Held {
    std::unique_ptr<BlockReads> reads;
    std::shared_ptr<const void> pages;  // ReserveMappedPages's
  };
  /// place: ReserveBlockLease's. owner: whose work comparing is.
  BlockLeaseService(std::shared_ptr<Session> session, std::shared_ptr<const void> place, const Parts& parts,
                    WorkerPool::Owner owner, Held held);
  ~BlockLeaseService() noexcept {}

  kj::Promise<void> release(ReleaseContext context) override;
  kj::Promise<void> mapSlab(MapSlabContext context) override;

 private:
  absl::Status CheckHeld() const;
  void End();

  const std::shared_ptr<Session> session_;
  const std::shared_ptr<const void> place_;
  const Parts parts_;
  const WorkerPool::Owner owner_;
  std::shared_ptr<BlockReads> reads_;  // shared with workers that compare; nullptr: released, or over
  bool over_ = false;
  kj::Promise<void> ending_ = nullptr;
};

}  // namespace kvmanager
