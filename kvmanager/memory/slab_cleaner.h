// Zeroes free slabs of a PagePool that a tenant wrote, so that another tenant's are clean as a whole and may be shown:
// by workers, a piece at a time, and only while somebody lacks such slabs.
//
// A slab that is being cleaned is nobody's until then. The pool's thread, which runs the messages of the queue; the
// pool, the workers' tasks and the messages that they post are gone before this is.
#pragma once

#include <cstdint>

#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/memory/page_pool.h"

namespace kvmanager {

class SlabCleaner {
 public:
  static constexpr uint64_t kLookBytes = 256 << 20;  // of memory's bandwidth a second, since a look comes each
  static constexpr uint64_t kPieceBytes = 2 << 20;

  SlabCleaner(PagePool* pool, WorkerPool* workers, MessageQueue* queue)
      : pool_(*pool), workers_(*workers), queue_(*queue) {}
  SlabCleaner(const SlabCleaner&) = delete;
  SlabCleaner& operator=(const SlabCleaner&) = delete;

  /// Begins to clean kLookBytes if somebody lacked clean slabs since the last look.
  void Look();

 private:
  void CleanNext();
  void CleanPiece(uint32_t slab, uint64_t offset);

  PagePool& pool_;
  WorkerPool& workers_;
  MessageQueue& queue_;
  uint64_t left_ = 0;  // bytes of this look
  bool busy_ = false;
};

}  // namespace kvmanager
