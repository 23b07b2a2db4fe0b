// A fixed pool of worker threads: attention first, encoding when no attention waits, and now and then before attention
// that does: somebody's attention may wait for that encoding. Of idle threads the last to have worked goes on, whose
// core is awake and whose caches are warm.
//
// Tasks have owners (tenants), and of those whose tasks wait the one goes next that had the least of the workers' time
// (start-time fair queueing, equal weights). A thread does not interrupt a task: long work is cut into turns. A task
// that is not done when its Turn is over posts its rest, behind which others come first.
//
// Owned by main(); any thread may post. Tasks must not block on other tasks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/mutex.h"

namespace kvmanager {

/// How long a task may work before others have their turn. It is asked behind each piece of work, and a piece takes
/// less than as long again, so that a thread is free after 2 ms.
class Turn {
 public:
  static constexpr std::chrono::microseconds kLength{1000};

  /// Begins now.
  explicit Turn(std::chrono::microseconds length) : until_(std::chrono::steady_clock::now() + length) {}
  /// Never over: of a thread that is the caller's own.
  static Turn Endless() { return Turn(std::chrono::steady_clock::time_point::max()); }

  bool over() const {
    return until_ != std::chrono::steady_clock::time_point::max() && std::chrono::steady_clock::now() >= until_;
  }

 private:
  explicit Turn(std::chrono::steady_clock::time_point until) : until_(until) {}
  std::chrono::steady_clock::time_point until_;
};

class WorkerPool {
 public:
  /// Whose work it is. What the daemon does for itself is one owner's among the others.
  using Owner = uint64_t;
  static constexpr Owner kDaemon = 0;
  static Owner OwnerOf(absl::string_view tenant);

  enum class Priority { kAttend, kEncode };
  using Task = absl::AnyInvocable<void()>;

  /// threads: 1..kThreadsMax. turn: of NewTurn. nice: 0..19, of the threads: with more than 0, they leave the cores to
  /// others that have work.
  explicit WorkerPool(int threads, std::chrono::microseconds turn = Turn::kLength, int nice = 0);
  /// Stops it.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  static constexpr int kThreadsMax = 1024;
  static constexpr int kAttendRunMax = 16;  // attention tasks begun in a row while encoding waits

  int threads() const { return static_cast<int>(workers_.size()); }
  Turn NewTurn() const { return Turn(turn_); }
  void Post(Priority priority, Task task, Owner owner = kDaemon);
  /// Several at once, in their order, with one lock; they are moved from.
  void Post(Priority priority, absl::Span<Task> tasks, Owner owner = kDaemon);
  /// Runs what is queued and what that posts, then joins the threads. What others post from here on may never run: it
  /// is destroyed. Of one thread, not a worker.
  void Stop();

 private:
  struct Worker {
    std::condition_variable wake;
    bool woken = false;  // under mutex_
    std::thread thread;
  };
  struct Share {
    std::deque<Task> waiting[2];  // by priority
    int64_t used_ns = 0;          // of the workers' time, since a time that is the same for all
    int running = 0;
  };
  static constexpr size_t kSharesKept = 1024;  // beyond, those are forgotten that nothing waits in

  void Work(Worker& self);
  /// The owner who goes next of those with tasks of this priority.
  Share& NextShare(Priority priority) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::chrono::microseconds turn_;
  const int nice_;
  Mutex mutex_;
  absl::flat_hash_map<Owner, std::unique_ptr<Share>> shares_ ABSL_GUARDED_BY(mutex_);
  std::vector<Share*> active_ ABSL_GUARDED_BY(mutex_);  // those with tasks that wait
  size_t waiting_[2] ABSL_GUARDED_BY(mutex_) = {0, 0};  // tasks, by priority
  int64_t floor_ns_ ABSL_GUARDED_BY(mutex_) = 0;        // used_ns of the owner who went last
  int attend_run_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false, stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Worker*> idle_ ABSL_GUARDED_BY(mutex_);  // in the order in which they became so
  std::deque<Worker> workers_;
};

}  // namespace kvmanager
