// Blocks of ladders that are encoded again in fewer bytes, by the codec of the next rung (Codec::rung), before any is
// evicted. On the store's thread.
//
// Only evictable blocks are lowered, so no sequence ever sees a page of its change. A worker decodes each page, encodes
// it into a slot that was free, and compares the page that it reads with its checksum. What was taken meanwhile, or
// what the next codec declines, stays as it is. Pages that have no encoded form, as sinks, stay, too.
//
// Tier::LowerAhead chooses what is lowered, and when.
#pragma once

#include <cstdint>
#include <list>
#include <memory>

#include "kvmanager/base/ids.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/recovery.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

class BlockLowering {
 public:
  /// Everything outlives it. alive: expires with the store.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    Recovery* recovery = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit BlockLowering(Parts parts) : parts_(std::move(parts)) {}
  BlockLowering(const BlockLowering&) = delete;
  BlockLowering& operator=(const BlockLowering&) = delete;

  /// TierOwner's. has_disk: it takes blocks as they were encoded first, so what it has not is not lowered.
  static bool CanLower(const Block& block, bool has_disk) {
    const int rungs = block.cache->rungs();
    if (rungs == 1 || (has_disk && !block.kept)) return false;
    return block.CanBeLowered(rungs);
  }
  /// TierOwner's.
  bool Lower(Block* block);
  /// Before blocks of a cache are dropped; nullptr: of all. Drops those that are being lowered, and returns how many.
  uint64_t NotePurge(const CacheDigest* digest);

  void CheckInvariants() const;

 private:
  struct Job;
  void End(const std::shared_ptr<Job>& job);
  /// Bytes more, or less, of slots that blocks are being lowered to.
  void Count(Tier* tier, int64_t bytes);
  /// Nobody has taken it, and every page was encoded.
  bool CanSettle(const Job& job) const;
  void Settle(Job& job);

  const Parts parts_;
  std::list<std::shared_ptr<Job>> jobs_;
};

}  // namespace kvmanager
