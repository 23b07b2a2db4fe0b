#include "kvmanager/base/worker_pool.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

WorkerPool::WorkerPool(int threads) {
  KV_CHECK(threads >= 1 && threads <= kThreadsMax);
  for (int i = 0; i < threads; ++i) {
    Worker& worker = workers_.emplace_back();
    worker.thread = std::thread([this, &worker] { Work(worker); });
  }
}

WorkerPool::~WorkerPool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    for (Worker* worker : idle_) worker->wake.notify_one();
  }
  for (Worker& worker : workers_) worker.thread.join();
}

void WorkerPool::Post(Priority priority, Task task) {
  Worker* worker = nullptr;  // to wake; those that work look at the queues before they are idle
  {
    MutexLock lock(mutex_);
    (priority == Priority::kAttend ? attend_ : encode_).push_back(std::move(task));
    if (idle_.empty()) return;
    worker = idle_.back();
    idle_.pop_back();
    worker->woken = true;
  }
  worker->wake.notify_one();
}

void WorkerPool::Work(Worker& self) {
  for (;;) {
    Task task;
    {
      MutexLock lock(mutex_);
      while (attend_.empty() && encode_.empty() && !stopping_) {
        idle_.push_back(&self);
        self.woken = false;
        while (!self.woken && !stopping_) lock.Wait(self.wake);
      }
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
