#include "kvmanager/base/worker_pool.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/hash/hash.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kAttendQueue = static_cast<int>(WorkerPool::Priority::kAttend);
constexpr int kEncodeQueue = static_cast<int>(WorkerPool::Priority::kEncode);

}  // namespace

WorkerPool::WorkerPool(int threads, std::chrono::microseconds turn, int nice) : turn_(turn), nice_(nice) {
  KV_CHECK(threads >= 1 && threads <= kThreadsMax);
  KV_CHECK(nice >= 0 && nice <= 19);
  for (int i = 0; i < threads; ++i) {
    Worker& worker = workers_.emplace_back();
    worker.thread = std::thread([this, &worker] { Work(worker); });
  }
}

WorkerPool::~WorkerPool() { Stop(); }

void WorkerPool::Stop() {
  {
    MutexLock lock(mutex_);
    if (std::exchange(stopping_, true)) return;
    for (Worker* worker : idle_) worker->wake.notify_one();
  }
  for (Worker& worker : workers_) worker.thread.join();
  // Came when the last thread had looked. It may hold what posts in its destructor: destroyed without the lock.
  absl::flat_hash_map<Owner, std::unique_ptr<Share>> late;
  MutexLock lock(mutex_);
  stopped_ = true;
  active_.clear();
  late.swap(shares_);
}

WorkerPool::Owner WorkerPool::OwnerOf(absl::string_view tenant) {
  const Owner owner = absl::HashOf(tenant);
  return owner == kDaemon ? 1 : owner;
}

void WorkerPool::Post(Priority priority, Task task, Owner owner) { Post(priority, {&task, 1}, owner); }

void WorkerPool::Post(Priority priority, absl::Span<Task> tasks, Owner owner) {
  if (tasks.empty()) return;
  absl::InlinedVector<Worker*, 16> to_wake;  // those that work look at the queues before they are idle
  {
    MutexLock lock(mutex_);
    if (stopped_) return;
    std::unique_ptr<Share>& share = shares_[owner];
    if (share == nullptr) share = std::make_unique<Share>();
    const bool waits = !share->waiting[0].empty() || !share->waiting[1].empty();
    // Who did nothing for a while has saved nothing up.
    if (!waits && share->running == 0) share->used_ns = std::max(share->used_ns, floor_ns_);
    if (!waits) active_.push_back(share.get());
    const int queue = static_cast<int>(priority);
    for (Task& task : tasks) share->waiting[queue].push_back(std::move(task));
    waiting_[queue] += tasks.size();
    while (to_wake.size() < tasks.size() && !idle_.empty()) {
      to_wake.push_back(idle_.back());
      idle_.pop_back();
      to_wake.back()->woken = true;
    }
  }
  for (Worker* worker : to_wake) worker->wake.notify_one();
}

WorkerPool::Share& WorkerPool::NextShare(Priority priority) {
  Share* next = nullptr;
  for (Share* share : active_) {
    if (share->waiting[static_cast<int>(priority)].empty()) continue;
    if (next == nullptr || share->used_ns < next->used_ns) next = share;
  }
  KV_CHECK(next != nullptr);
  return *next;
}

void WorkerPool::Forget() {
  if (shares_.size() <= kSharesKept) return;
  absl::erase_if(shares_, [this](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Share& share = *entry.second;
    return share.waiting[0].empty() && share.waiting[1].empty() && share.running == 0 && share.used_ns <= floor_ns_;
  });
}

void WorkerPool::Work(Worker& self) {
  // Linux: of this thread alone. More than 0 is allowed to everybody.
  if (nice_ > 0) KV_CHECK(setpriority(PRIO_PROCESS, 0, nice_) == 0);
  // Of the task that was run last. Clocks are read without the lock: workers that end together wait for one another.
  Share* share = nullptr;
  std::chrono::nanoseconds took{0};
  for (;;) {
    Task task;
    {
      MutexLock lock(mutex_);
      if (share != nullptr) {
        share->used_ns += took.count();
        --share->running;
        Forget();
      }
      while (waiting_[0] == 0 && waiting_[1] == 0 && !stopping_) {
        idle_.push_back(&self);
        self.woken = false;
        while (!self.woken && !stopping_) lock.Wait(self.wake);
      }
      if (waiting_[0] == 0 && waiting_[1] == 0) return;
      const bool encode = waiting_[kAttendQueue] == 0 || (waiting_[kEncodeQueue] > 0 && attend_run_ == kAttendRunMax);
      const int queue = encode ? kEncodeQueue : kAttendQueue;
      attend_run_ = encode || waiting_[kEncodeQueue] == 0 ? 0 : attend_run_ + 1;
      share = &NextShare(encode ? Priority::kEncode : Priority::kAttend);
      task = std::move(share->waiting[queue].front());
      share->waiting[queue].pop_front();
      --waiting_[queue];
      ++share->running;
      floor_ns_ = std::max(floor_ns_, share->used_ns);
      if (share->waiting[0].empty() && share->waiting[1].empty()) {
        active_.erase(std::find(active_.begin(), active_.end(), share));
      }
    }
    const auto begun = std::chrono::steady_clock::now();
    task();
    took = std::chrono::steady_clock::now() - begun;
    // A whole turn: whoever waits for this core, such as the event loop, is not to wait for the kernel's tick, 4 ms.
    if (took >= turn_) ::sched_yield();
  }
}

}  // namespace kvmanager
