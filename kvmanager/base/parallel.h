// Work over the items 0 .. count - 1 by the calling thread and a pool's, to its end.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>

#include "absl/functional/function_ref.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {

/// Calls work(item) once for each item, in any order, and returns when all are done. pool: nullptr: the calling thread
/// alone. Must not be called from a task of the pool, nor be nested.
inline void ParallelFor(WorkerPool* pool, size_t count, absl::FunctionRef<void(size_t item)> work,
                        WorkerPool::Priority priority = WorkerPool::Priority::kAttend) {
  std::atomic<size_t> next{0};
  const auto pull = [&] {
    for (size_t item = next.fetch_add(1); item < count; item = next.fetch_add(1)) work(item);
  };
  Mutex mutex;
  std::condition_variable done;
  size_t left = pool == nullptr || count == 0 ? 0 : std::min<size_t>(pool->threads(), count - 1);
  for (size_t helper = left; helper > 0; --helper) {
    pool->Post(priority, [&] {
      pull();
      MutexLock lock(mutex);
      if (--left == 0) done.notify_one();
    });
  }
  pull();
  MutexLock lock(mutex);
  while (left > 0) lock.Wait(done);
}

}  // namespace kvmanager
