// Changes of a sequence's page-to-slot table, polled by whoever keeps a copy on the GPU: the daemon's DeviceWork or an
// engine's process. On the store's thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// The slots of one page in one layer; an invalid id: it has no such form, or raw, none that stays for this sequence.
struct PagePlace {
  uint32_t page = 0;
  PageId raw;
  PageId encoded;  // assigned when the page is full, before its bytes are there; of codecs with indexes: the index's
                   // slot at place `page`, if that is what changed (the page may then be beyond the sequence's)
};

/// Who keeps tables of a sequence's slots: those who run its steps.
enum class TableKeeper : uint8_t { kDaemon = 0, kProcess = 1 };

class SlotTables {
 public:
  virtual ~SlotTables() = default;
  /// Appends to `changes` the pages of one layer whose slots changed since this keeper last asked, all at first,
  /// ascending; a page beyond the layer's last is not named.
  virtual absl::Status TakeChanges(SequenceId sequence, int layer, std::vector<PagePlace>* changes,
                                   TableKeeper keeper = TableKeeper::kDaemon) = 0;
  /// Pages, over all layers, that TakeChanges would name at most.
  virtual uint64_t ChangedPages(SequenceId sequence, TableKeeper keeper) const = 0;
  /// The position from which on queries of the sequence choose what they read (SequenceIndex::SparseFrom, for an
  /// append to come); SequenceIndex::kNever: none does, or it does not exist.
  virtual uint64_t SparseFrom(SequenceId sequence, uint64_t position, int tokens) const = 0;
  /// Whether the cache is on `device` and pages of its tenant are in a slab of that pool, so that a process of that
  /// tenant may map it.
  virtual bool OwnsSlab(CacheId cache, int device, uint32_t slab) const = 0;
  /// Frees slots that were given up and that kernels have done with; Append and others do so when they need room.
  virtual void CollectReleased() = 0;
  /// Slots were given up that kernels may still read, or are being copied to the host: what RESOURCE_EXHAUSTED refused
  /// may soon fit.
  virtual bool AwaitsRelease(int device) const = 0;
};

}  // namespace kvmanager
