#include "kvmanager/base/worker_pool.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

WorkerPool::WorkerPool(int threads) {
  KV_CHECK(threads >= 1 && threads <= kThreadsMax);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

WorkerPool::~WorkerPool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Post(Priority priority, Task task) {
  {
    MutexLock lock(mutex_);
    (priority == Priority::kAttend ? attend_ : encode_).push_back(std::move(task));
  }
  wake_.notify_one();
}

void WorkerPool::Work() {
  for (;;) {
    Task task;
    {
      MutexLock lock(mutex_);
      while (attend_.empty() && encode_.empty() && !stopping_) lock.Wait(wake_);
      const bool encode = attend_.empty() || (!encode_.empty() && attend_run_ == kAttendRunMax);
      std::deque<Task>& queue = encode ? encode_ : attend_;
      if (queue.empty()) return;
      attend_run_ = encode || encode_.empty() ? 0 : attend_run_ + 1;
      task = std::move(queue.front());
      queue.pop_front();
    }
    task();
  }
}

}  // namespace kvmanager
