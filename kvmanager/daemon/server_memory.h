// The daemon's host memory, which outlives it where --state-dir says so.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kvmanager/base/locked_folder.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/keep/kept_manifest.h"
#include "kvmanager/keep/memory_keeper.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/memory/slab_cleaner.h"
#include "kvmanager/rpc/daemon_facts.h"
#include "monitoring/metrics.h"

namespace kvmanager {

struct MemoryMetrics {
  explicit MemoryMetrics(Metrics* m)
      : kept(
            m->Gauge("memory_kept",
                     "Whether host memory outlives this daemon: 1: a process keeps it; 0: none does, or --state-dir is "
                     "not given")),
        keepers_lost(
            m->Counter("memory_keepers_lost_total", "Processes that kept the memory of --state-dir and ended")) {}
  prometheus::Gauge& kept;
  prometheus::Counter& keepers_lost;
};

class ServerMemory {
 public:
  /// Takes over what an earlier daemon had, if it has the same size, or makes it anew. Errors: PagePool's,
  /// LockedFolder's and MemoryKeeper's. Its pages are touched in the background: the first who writes to one else waits
  /// until the kernel has cleared it, a third of the time of a store.
  absl::Status Open(const Options& options, const Clock* clock, MemoryMetrics* metrics);

  /// Now and then: at what only a look shows of slabs that engines map, or could, and whether the keeper is there;
  /// where it has gone, another one takes its place. background: one thread, for what has time. Both outlive what this
  /// begins.
  void Look(WorkerPool* background, MessageQueue* queue);

  /// Before this daemon gives the memory up for another one: that it is kept. On the thread of `background`: it waits
  /// for the keeper, a second. Errors: UNAVAILABLE.
  absl::Status KeepOn();

  /// Nothing: without --state-dir. Any thread.
  std::optional<KeptMemoryFacts> Describe() const;

  PagePool* pool() const { return pool_.get(); }
  KeptManifest* manifest() const { return manifest_.get(); }  // nullptr: nothing outlives the daemon

 private:
  static constexpr int64_t kKeepTryNs = 10000000000;  // after one that failed

  absl::Status OpenPool(const Options& options, const Clock* clock);
  absl::Status OpenKept(const Options& options, const Clock* clock);
  absl::Status TakeOver(PagePool::Options pool);
  absl::Status MakeAnew(const PagePool::Options& pool);
  absl::Status OpenKeeper();
  absl::Status KeepAll();
  /// The keeper has gone: another one.
  absl::Status KeepAnew(const std::string& why);
  void LookAtKeeper();
  void NoteKept();
  /// outlives: a restart of the daemon, and of its service.
  void ShowKept(std::string state, uint32_t pid, bool outlives);
  /// Looks at so many slabs that are shown, in turns.
  void TakeBack(MessageQueue* queue, size_t looks);

  std::string state_dir_;  // empty: nothing outlives the daemon
  int64_t keep_s_ = 0;
  MemoryMetrics* metrics_ = nullptr;
  std::optional<LockedFolder> folder_;
  std::unique_ptr<MemoryKeeper> keeper_;  // once the daemon serves, the background thread's
  bool keeps_ = false;                    // it has all; likewise, as what follows
  int64_t try_again_ns_ = INT64_MIN;
  std::atomic<bool> looks_{false};  // at the keeper: one is on its way
  mutable Mutex mutex_;
  KeptMemoryFacts facts_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<KeptManifest> manifest_;
  std::optional<SlabCleaner> cleaner_;
  std::unique_ptr<HostPinner> toucher_;  // of the pool
};

}  // namespace kvmanager
