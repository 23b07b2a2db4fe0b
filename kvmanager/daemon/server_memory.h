// The daemon's host memory, which outlives it where --state-dir says so.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "kvmanager/base/locked_folder.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/keep/kept_manifest.h"
#include "kvmanager/keep/memory_keeper.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/memory/slab_cleaner.h"

namespace kvmanager {

class ServerMemory {
 public:
  /// Takes over what an earlier daemon had, if it has the same size, or makes it anew. Errors: PagePool's,
  /// LockedFolder's and MemoryKeeper's. Its pages are touched in the background: the first who writes to one else waits
  /// until the kernel has cleared it, a third of the time of a store.
  absl::Status Open(const Options& options, const Clock* clock);

  /// At what only a look shows of slabs that engines map, or could. workers: for what has time. Both outlive what this
  /// begins.
  void Look(WorkerPool* workers, MessageQueue* queue);

  /// Before this daemon gives the memory up for another one: that it is kept. Where the keeper has gone, another one
  /// takes its place. Any thread but the loop's, one at a time: it waits for the keeper, a second. Errors:
  /// UNAVAILABLE.
  absl::Status KeepOn(const Options& options);

  PagePool* pool() const { return pool_.get(); }
  KeptManifest* manifest() const { return manifest_.get(); }  // nullptr: nothing outlives the daemon

 private:
  absl::Status OpenPool(const Options& options, const Clock* clock);
  absl::Status OpenKept(const Options& options, const Clock* clock);
  absl::Status TakeOver(PagePool::Options pool);
  absl::Status MakeAnew(const PagePool::Options& pool);
  absl::Status OpenKeeper(const Options& options);
  absl::Status KeepAll();
  /// Looks at so many slabs that are shown, in turns.
  void TakeBack(MessageQueue* queue, size_t looks);

  std::optional<LockedFolder> folder_;
  std::unique_ptr<MemoryKeeper> keeper_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<KeptManifest> manifest_;
  std::optional<SlabCleaner> cleaner_;
  std::unique_ptr<HostPinner> toucher_;  // of the pool
};

}  // namespace kvmanager
