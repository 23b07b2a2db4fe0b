// StoreReport of a store: who holds its memory, and every invariant of the whole. On the store's thread.
//
// Invariants beyond those of page_state.h, page_table.h and sequence.h (CheckInvariants):
//  1. A block is in the block index exactly while it has a live page, a holder or a name.
//  2. block.holders = sequences, hand-offs and moves that list it; page.raw_holds = those that have not aged the page.
//  3. Every slot that a page names is the pool's current one, and no slot is named twice.
//  4. A block that is being copied from another memory is Receiving, held by its move and, before it can be found, by
//     the sequences that wait for it; it has no name.
//  5. A block is evictable exactly while published with no holder, pin or job; its slots, and no others, are then
//     reclaimable in the pool.
//  6. A Resident page keeps its raw form only if declined, held, or pinned by who may read it (identity codecs have one
//     form).
#pragma once

#include <memory>
#include <vector>

#include "kvmanager/store/block_lowering.h"
#include "kvmanager/store/block_moves.h"
#include "kvmanager/store/disk_loads.h"
#include "kvmanager/store/disk_writes.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/gone_blocks.h"
#include "kvmanager/store/payers.h"
#include "kvmanager/store/recovery.h"
#include "kvmanager/store/sequence_exports.h"
#include "kvmanager/store/sequence_imports.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_reads.h"
#include "kvmanager/store/store_report.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

class StoreInspector final : public StoreReport {
 public:
  static constexpr size_t kCachesNamed = 3;  // in RESOURCE_EXHAUSTED

  /// Everything outlives it.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    const std::vector<std::unique_ptr<Tier>>* tiers = nullptr;
    const CacheTable* caches = nullptr;
    Payers* payers = nullptr;
    const BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    const SequenceTable* sequences = nullptr;
    const BlockMoves* moves = nullptr;
    const BlockLowering* lowering = nullptr;
    const DiskWrites* disk_writes = nullptr;
    const DiskLoads* disk_loads = nullptr;
    const Recovery* recovery = nullptr;
    const SequenceExports* exports = nullptr;
    SequenceImports* imports = nullptr;
    const StoreReads* reads = nullptr;
    const LeasePages* mapped_pages = nullptr;
    const GoneBlocks* gone = nullptr;
    const BlockDisk* disk = nullptr;  // nullptr: there is none
    const Clock* clock = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit StoreInspector(const Parts& parts) : parts_(parts) {}

  std::vector<SequenceId> SequenceIds() const override { return parts_.sequences->Ids(); }
  std::vector<PoolShare> Shares() const override { return parts_.payers->List(); }
  StoreUse Use() const override;
  absl::StatusOr<std::unique_ptr<Explanation>> BeginExplain(CacheId cache, std::vector<BlockName> names) override;
  void CheckInvariants() const override;
  absl::Status SetQuotas(Quotas quotas) override;
  void SetSampler(PageSampler* sampler) override { parts_.encodes->SetSampler(sampler); }
  /// TierOwner's.
  absl::Status Exhausted(const Cache& cache, const SlotCounts& wanted) const;

 private:
  /// The largest caches of its tenant in its memory, for people. Other tenants are not named, and no blocks are
  /// counted: this runs at every refusal of a full pool.
  std::string HeldByTenant(const Cache& of) const;

  const Parts parts_;
};

}  // namespace kvmanager
