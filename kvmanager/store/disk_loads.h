// Blocks that come from the disk into host memory before a call looks for them by their names: a call whose prefix the
// disk has begins a load, waits until it is done, and then finds the blocks as any others. On the store's thread.
//
// A block is read once, however many calls wait for it. What was read is compared with its checksums and checked as
// bytes of a peer are, by workers; what is wrong is erased on the disk, and a miss.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/disk_load.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/mover.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

class DiskLoads {
 public:
  /// That one load has on its way, and all of them.
  static constexpr uint64_t kLoadBytesMax = uint64_t{64} << 20;
  static constexpr uint64_t kReadingBytesMax = uint64_t{512} << 20;
  static constexpr uint64_t kAheadBytesMax = kReadingBytesMax / 2;  // then loads that nobody waits for wait

  /// Everything outlives it. disk: nullptr: there is none, and nothing is loaded.
  struct Parts {
    BlockDisk* disk = nullptr;
    Tier* host = nullptr;
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    Mover* mover = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit DiskLoads(const Parts& parts) : parts_(parts) {}
  DiskLoads(const DiskLoads&) = delete;
  DiskLoads& operator=(const DiskLoads&) = delete;

  /// LongCalls'.
  std::unique_ptr<DiskLoad> Begin(CacheId cache, std::vector<BlockName>* names, uint32_t first, LoadUrgency urgency);
  void OnLeftovers(std::function<void()> fn) { on_leftovers_ = std::move(fn); }
  bool ReleaseSome();
  /// What is being read of a cache gets no name, and its loads hold no block that has come; nullptr: of all.
  void NotePurge(const CacheDigest* digest);

  /// For CheckInvariants: blocks on their way, of each cache.
  absl::flat_hash_map<const Cache*, uint64_t> Arriving() const;

 private:
  class Load;
  /// A block on its way from the disk: Receiving, held by this, in its cache's `arriving`.
  struct Reading {
    std::shared_ptr<Cache> cache;  // has a lease
    BlockName name;
    uint64_t bytes = 0;
    bool purged = false;
    std::vector<Load*> waiting;
  };

  /// Whether the disk's block has the pages that one of `cache` has.
  static bool Fits(const Cache& cache, const DiskBlock& block);
  /// Takes slots and begins to read; the new block. nullptr: there is no room.
  Block* Read(const std::shared_ptr<Cache>& cache, const DiskBlock& block, const BlockName& name);
  void OnRead(Block* target, std::vector<MovingPage> pages, absl::StatusOr<std::vector<uint64_t>> checksums);
  void Land(Block* target, bool read, absl::Span<const MovingPage> pages);
  /// One of those that wait for room, and all that are to be woken.
  void WakeForRoom();
  void GiveBack(std::vector<Block*> blocks);
  void ReleaseLast(std::vector<Block*>& blocks);

  const Parts parts_;
  absl::flat_hash_map<Block*, Reading> readings_;
  absl::flat_hash_set<Load*> loads_;
  uint64_t reading_bytes_ = 0;
  std::deque<Load*> for_room_;            // loads that wait until others' blocks have come
  std::deque<Load*> ahead_for_room_;      // likewise, that nobody waits for
  std::deque<Load*> waking_;              // whose callbacks are to be called
  std::deque<std::vector<Block*>> left_;  // held by loads that have gone
  std::function<void()> on_leftovers_;
};

}  // namespace kvmanager
