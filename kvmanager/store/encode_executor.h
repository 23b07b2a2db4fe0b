// Encodes the store's jobs on the worker pool, behind attention.
//
// Owned by the Server. Encode() is called on the loop's thread; batches are split over the workers; the last worker
// posts the completion back. Workspaces are kept between batches: at most one per worker that encoded at once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/store/page_store.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// References to series, made once at start. Any thread may touch them.
struct EncodeMetrics {
  explicit EncodeMetrics(Metrics* metrics);

  prometheus::Histogram& seconds;
  prometheus::Counter& input_bytes;
};

class PoolEncodeExecutor final : public EncodeExecutor {
 public:
  /// Everything given outlives the executor; the pool's workers are joined before it is destroyed.
  PoolEncodeExecutor(WorkerPool* workers, MessageQueue* queue, EncodeMetrics* metrics, const Clock* clock);

  void Encode(std::shared_ptr<const Codec> codec, std::vector<EncodeItem> items, WorkerPool::Owner owner,
              absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) override;
  void Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) override;

 private:
  struct Job;
  static constexpr size_t kPagesAtOnce = 4;  // in one call of a codec: some 0.1 to 1 ms

  /// Encodes items begin .. end - 1 of a job on one worker.
  void PostTurn(std::shared_ptr<Job> job, size_t begin, size_t end);
  void EncodePart(Job& job, size_t begin, size_t end);
  AlignedBuffer TakeWorkspace(size_t bytes);
  void GiveBack(AlignedBuffer workspace);

  WorkerPool* const workers_;
  MessageQueue* const queue_;
  EncodeMetrics* const metrics_;
  const Clock* const clock_;
  Mutex mutex_;
  std::vector<AlignedBuffer> workspaces_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmanager
