// A fixed pool of worker threads with two queues: attention first, encoding when no attention waits, and now and then
// before attention that does: somebody's attention may wait for that encoding. Of idle threads the last to have worked
// goes on, whose core is awake and whose caches are warm.
//
// Owned by main(); any thread may post. Tasks must not block on other tasks. The destructor runs what is queued, then
// joins.
#pragma once

#include <condition_variable>
#include <deque>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "kvmanager/base/mutex.h"

namespace kvmanager {

class WorkerPool {
 public:
  enum class Priority { kAttend, kEncode };
  using Task = absl::AnyInvocable<void()>;

  /// threads: 1..kThreadsMax.
  explicit WorkerPool(int threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  static constexpr int kThreadsMax = 1024;
  static constexpr int kAttendRunMax = 16;  // attention tasks begun in a row while encoding waits

  int threads() const { return static_cast<int>(workers_.size()); }
  void Post(Priority priority, Task task);

 private:
  struct Worker {
    std::condition_variable wake;
    bool woken = false;  // under mutex_
    std::thread thread;
  };
  void Work(Worker& self);

  Mutex mutex_;
  std::deque<Task> attend_ ABSL_GUARDED_BY(mutex_);
  std::deque<Task> encode_ ABSL_GUARDED_BY(mutex_);
  int attend_run_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Worker*> idle_ ABSL_GUARDED_BY(mutex_);  // in the order in which they became so
  std::deque<Worker> workers_;
};

}  // namespace kvmanager
