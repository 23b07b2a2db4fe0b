// A kind of memory that pages are computed on: its slots, which blocks go first when they are short, and what is on its
// way to a lower tier. The only place that takes slots, chooses victims and frees them.
//
// What is a block's (its name, its pages, where its bytes go) is the store's: a tier asks its TierOwner to evict or
// demote a victim. On the store's thread.
//
// Invariants (CheckInvariants of the store):
//  1. bytes().evictable is the sum of the evictable blocks' slots; these and the unclaimed ones are the reclaimable
//     slots of the pool.
//  2. bytes().ladders has the sums of evictable blocks that were lowered or can be.
//  3. A slot that was freed is given out again once no plan of ReleaseEpochs may name it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kvmanager/eviction/retaining_eviction.h"
#include "kvmanager/memory/page_mover.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/store_device.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

class Tier;

/// What a tier asks of the store that it belongs to.
class TierOwner {
 public:
  virtual ~TierOwner() = default;
  /// Gives up an evictable block for a request of `taker`: its name, and its slots by way of Tier::Free.
  virtual void Evict(Block* block, const Cache& taker) = 0;
  /// Whether what `tier` has can be copied to the next lower tier, or to the disk, now.
  virtual bool CanDemote(const Tier& tier) const = 0;
  /// Whether what a disk below `tier` has not taken yet will be there soon. False: there is none, or it failed lately.
  virtual bool WritesSoon(const Tier& tier) const = 0;
  /// Starts to copy an evictable block there, and counts it (Bytes::demoting). false: it is there (Block::kept), or
  /// it cannot go there.
  virtual bool Demote(Block* block) = 0;
  /// Whether an evictable block could be encoded again in fewer bytes, by a later rung of its cache's ladder.
  virtual bool CanLower(const Block& block) const = 0;
  /// Starts that for a block that could. False: there are no slots for it.
  virtual bool Lower(Block* block) = 0;
  /// Gives back more of what sequences and leases have left. False: that was all.
  virtual bool GiveBackSome() = 0;
  /// Blocks of an earlier process in `tier` whose cache is not open (Recovery): whether a payer has some, and gives
  /// one up, which frees its slots.
  virtual bool HasUnclaimed(const Tier& tier, PayerId payer) const = 0;
  virtual bool GiveUpUnclaimed(const Tier& tier, PayerId payer) = 0;
  /// Slots of `tier` were freed, or have become evictable.
  virtual void OnRoomIn(const Tier& tier) = 0;
  /// The error for slots that a cache cannot have.
  virtual absl::Status Exhausted(const Cache& cache, const SlotCounts& wanted) const = 0;
};

class Tier {
 public:
  /// What `device` names outlives it, and so does clock. lower: the next lower tier, to which device.mover moves pages;
  /// nullptr: this is the lowest.
  Tier(const StoreDevice& device, std::unique_ptr<MemoryBackend> memory, Tier* lower, EvictionKind eviction,
       const Clock* clock, TierOwner* owner);

  int device() const { return device_; }  // as CacheConfig::device
  std::string name() const { return device_ == CacheConfig::kHost ? "host" : absl::StrCat("gpu", device_); }
  Tier* lower() const { return lower_; }
  const MemoryBackend& memory() const { return *memory_; }
  SlotPool* pool() const { return pool_; }
  EncodeExecutor* executor() const { return executor_; }

  /// Moves pages to the next lower tier and back; nullptr: nothing moves, or no more, since the GPU has failed.
  PageMover* mover() const { return mover_; }
  bool can_move() const { return mover_ != nullptr && mover_->ready(); }
  void StopMoving() { mover_ = nullptr; }

  /// Takes `wanted` slots for `cache`, which is of this tier: takes back slabs that nobody maps any more, then evicts
  /// the policy's victims until they fit, of the payer that the pool names (SlabForecast::NextToGive). Errors:
  /// RESOURCE_EXHAUSTED, if evicting every evictable block that the cache's payer may take would not make them fit, or
  /// if what was evicted or is being demoted has to be waited for. A request that is refused evicts nothing more than
  /// that.
  absl::Status Reserve(const Cache& cache, const SlotCounts& wanted, Reservation* out);
  /// The same if they are free and leave slabs for raw pages: nothing is evicted. False: none is taken.
  bool ReserveFree(const Cache& cache, const SlotCounts& wanted, Reservation* out);
  /// Whether evicting what its payer may take would make room for all of `wanted`.
  bool CanReserve(const Cache& cache, const SlotCounts& wanted) const;
  void Free(PageId slot);
  /// Frees the slots that kernels have done with.
  void Collect();
  /// Slots have been given up, or are being demoted or lowered, that only have to be waited for.
  bool awaits_release() const { return retired_slots() > 0 || bytes_.demoting > 0 || bytes_.lowering > 0; }
  uint64_t retired_slots() const { return epochs_ == nullptr ? 0 : epochs_->retired_slots(); }

  /// To be told which blocks are found, named, touched and retained; the rest is the tier's.
  RetainingEviction& eviction() { return *eviction_; }
  void AddEvictable(Block* block);
  void RemoveEvictable(Block* block);
  /// Whether the next lower tier has a copy of `block`.
  void SetKept(Block* block, bool kept);
  /// `give_up` frees the slots of a victim.
  void EvictBy(Block* victim, absl::FunctionRef<void()> give_up) {
    eviction_->Evicted(*victim);
    evicted_bytes_ = evicted_waiting_bytes() + victim->bytes;
    give_up();
    evicted_until_ = retired_;
  }

  /// Demotes what would go next, while little room can be had at once: a few blocks in each call. is_late: whatever
  /// room there is, since one was lost that the lower tier has not: slots of one size may be short alone.
  void DemoteAhead(bool is_late = false);
  /// `taker` has just taken slots: lowers what would go next of its payer's ladders, or while few slabs are free of
  /// those who have more, as far as LowersMore says, a few blocks in each call. For the slots that this takes, evicts
  /// what was lowered before, or if nothing was, a little of the first rung.
  void LowerAhead(const Cache& taker);

  /// Of a payer, evictable blocks that were lowered or can be.
  struct LadderBytes {
    uint64_t all = 0;
    uint64_t lowerable = 0;
    bool operator==(const LadderBytes&) const = default;
  };
  struct Bytes {
    uint64_t evictable = 0;
    uint64_t kept = 0;                                  // of those, of blocks that the lower tier has, too
    uint64_t demoting = 0;                              // on their way to the lower tier: evictable once they are there
    uint64_t index = 0;                                 // of sequences' indexes
    uint64_t unclaimed = 0;                             // of blocks of an earlier process
    uint64_t lowering = 0;                              // of slots that blocks will have which are being lowered
    absl::flat_hash_map<PayerId, LadderBytes> ladders;  // of those who have some
  };
  const Bytes& bytes() const { return bytes_; }
  /// Bytes more, or less, of Bytes::index, unclaimed, demoting or lowering, whose owners say so.
  void Count(uint64_t Bytes::*of, int64_t bytes) { bytes_.*of += static_cast<uint64_t>(bytes); }

 private:
  // What was evicted and has not all returned: it is room that only has to be waited for.
  uint64_t evicted_waiting_bytes() const { return retired_ - retired_slots() < evicted_until_ ? evicted_bytes_ : 0; }
  Block* NextToEvict(PayerId payer, const Cache& taker, const SlotCounts& wanted) const;
  Block* NextToDemote() const;
  Block* NextToLower(const Cache& taker, bool of_others) const;
  bool LacksEncoded(const Cache& cache, const SlotCounts& wanted) const;
  absl::Status Take(const Cache& cache, const SlotCounts& counts, Reservation* out);
  void SetReclaimable(const Block& block, bool reclaimable);  // its slots, in the pool

  const int device_;
  const std::unique_ptr<MemoryBackend> memory_;
  Tier* const lower_;
  SlotPool* const pool_;
  EncodeExecutor* const executor_;
  ReleaseEpochs* const epochs_;
  PageMover* mover_;
  TierOwner* const owner_;
  const std::unique_ptr<RetainingEviction> eviction_;
  Bytes bytes_;
  std::vector<PageId> reusable_;  // scratch of Collect
  uint64_t retired_ = 0;          // slots ever given to `epochs_`
  uint64_t evicted_until_ = 0;    // of them, up to the last one that was evicted
  uint64_t evicted_bytes_ = 0;    // since none that was evicted waited
};

/// Shows what the host's pool has in use, and what of that can be taken back at once.
void ShowHostUse(const Tier& host, StoreMetrics* metrics);

}  // namespace kvmanager
