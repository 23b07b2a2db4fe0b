// The store's blocks: found by name and verified, held, pinned, given up. The one owner of blocks, and the sole caller
// of transitions of their pages. On the store's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/block_check.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/cache_directory.h"
#include "kvmanager/store/gone_blocks.h"
#include "kvmanager/store/page_bytes.h"
#include "kvmanager/store/store_metrics.h"
#include "kvmanager/store/tier.h"
#include "kvmanager/store/unnamed_blocks.h"

namespace kvmanager {

/// Somebody takes the found block: where it was until then.
HitTier TakeHit(Block* block);

class BlockIndex {
 public:
  /// Everything outlives it.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    const Clock* clock = nullptr;
    const Tier* host = nullptr;                  // whose use is shown in metrics
    GoneBlocks* gone = nullptr;                  // is told of each that loses its name
    std::function<void(Block*)> after_name;      // the block can be found by its name
    std::function<void(Block*)> before_unname;   // the block can be found no more by its name
    std::function<void(Block*)> after_resident;  // a page of a block that has a name has its last form
  };

  explicit BlockIndex(Parts parts) : parts_(std::move(parts)) {}
  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  /// Block `index` of a sequence of `cache`, with one holder.
  Block* New(const std::shared_ptr<Cache>& cache, uint32_t index);
  void Apply(PageRef ref, PageEvent event, const PageChange& after);

  // Who keeps a block, or its bytes.
  void Hold(Block* block);  // one more holder
  /// One holder less; of a chain, children first (EvictionPolicy). run: what used it, if that is known.
  void Release(Block* block, const EvictionRun* run = nullptr);
  /// It was used now, and nothing else changes; of a chain, children first. What holds it says so when it lets go.
  void NoteUse(Block* block);
  void Pin(PageRef ref);
  void Unpin(PageRef ref);
  /// Of a lease that reads the encoded form alone, if there is one.
  void PinEncoded(PageRef ref);
  void UnpinEncoded(PageRef ref);
  /// A sequence has not aged the page: one more, or one less.
  void HoldRaw(PageRef ref) { ++Wake(ref).raw_holds; }
  void DropRawHold(PageRef ref);
  void ReleaseRawIfUnused(PageRef ref);
  /// An encode job of the page has ended. True: the page was quarantined meanwhile, and goes.
  bool EndJobIfQuarantined(PageRef ref, bool declined);
  void MakeEvictableIfUnused(Block* block);

  // Names.
  /// run: what has the block, if that is known.
  void Name(Block* block, const BlockName& name, EvictionRun* run = nullptr);
  /// The block goes if nobody holds it. reason: not kEvicted, which is Evict's.
  void Unname(Block* block, GoneReason reason) { Unname(block, reason, nullptr); }
  void Evict(Block* block, const Cache& taker);  // TierOwner's
  /// Of a found block: whether its bytes are compared with their checksums, which takes as long as reading them, unless
  /// they were within BlockCheck::kVerifiedForNs.
  enum class Bytes : uint8_t { kVerify, kTrust };

  /// The block named so; one that proves corrupt is dropped. Held. nullptr and the reason otherwise.
  Block* Find(Cache& cache, const BlockName& name, uint32_t index, Bytes bytes, MissReason* reason);
  /// The blocks named so, one behind the other, each held. lower_too: also those that are on their way to
  /// `cache`'s memory, and those of `lower`, its counterpart in the next lower tier, if there is one. match: how far,
  /// and why no further.
  std::vector<Block*> FindPrefix(Cache& cache, absl::Span<const BlockName> names, Bytes bytes, bool lower_too,
                                 Cache* lower, MatchResult* match);
  void CountHits(const MatchResult& match, const HitTierCounts& tiers);
  /// Whether kVerify looks at the block's bytes.
  bool IsUnverified(const Block& block) const {
    return !block.verified.is_set() || parts_.clock->NowNs() - block.verified.ns() > BlockCheck::kVerifiedForNs;
  }
  /// Every page that may be compared was. intact: they are what was written; else the block loses its name.
  void NoteCompared(Block* block, bool intact);

  /// For CheckInvariants.
  std::vector<const Block*> All() const;
  /// A holder that is no sequence and no move: a hand-off, an arrival or a check.
  void NoteHolder(Block* block) { ++block->other_holders; }
  void ForgetHolder(Block* block) {
    KV_CHECK(block->other_holders > 0);
    --block->other_holders;
  }

 private:
  static constexpr int kNoRung = -1;  // of a page without an encoded form
  /// A page of a ladder may have another encoded form, or none.
  void NoteRungs(int rung_before, uint64_t bytes_before, const Page& page, uint64_t bytes_after);
  static Page& Wake(const PageRef& ref);  // the page, to be changed
  static bool VerifyChecksums(const Block& block);
  /// A block that was found: held, once its bytes are looked at. nullptr and the reason: it is corrupt, and dropped.
  Block* Take(Block* block, Bytes bytes, MissReason* reason);
  void Unname(Block* block, GoneReason reason, const Cache* taker);
  void MakeUnevictable(Block* block);
  void Dispose(Block* block);  // nobody holds it, it has no name
  void FreePage(PageRef ref);  // and deletes the block with its last page
  void DeleteIfEmpty(Block* block);

  const Parts parts_;
  // It owns the blocks: those without a name, and those in the tables of caches that have some.
  UnnamedBlocks unnamed_;
  absl::flat_hash_map<const Cache*, std::shared_ptr<Cache>> caches_;
};

}  // namespace kvmanager
