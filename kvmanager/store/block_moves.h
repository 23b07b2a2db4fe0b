// Blocks in two memories: a GPU's pages go to the host before their room is needed, and come back when they are asked
// for; sequences are copied from one to the other, to be handed over or taken over.
//
// Caches of equal digest are one cache in several memories, so what leaves a GPU is an ordinary published block of the
// host's cache: found, evicted, handed over and purged as any other. A move is a hand-off inside the daemon: its source
// is pinned, its target is Receiving and found by nobody until it lands. Bytes that come from a GPU are checked as a
// peer's are, since engines write there themselves.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/mover.h"
#include "kvmanager/store/store_metrics.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

/// What is copied of blocks that move.
struct MoveForms {
  /// Pages of which the raw form is wanted beside the encoded one.
  absl::FunctionRef<bool(const Block& block, uint32_t layer)> with_raw;
  uint32_t full_blocks = UINT32_MAX;  // a block with this index is open
  int open_tokens = 0;                // of that, as many
};

/// Blocks on their way between a tier and the next lower one. The pages that they come from are pinned, the blocks that
/// they become held; both caches have a lease.
struct BlockMove {
  struct Pair {
    Block* from = nullptr;
    Block* to = nullptr;
    size_t first_page = 0;  // of the moving pages, as many as follow until the next pair's
    bool named = false;     // then `to` takes the name, unless another has it by then
    bool arriving = false;  // `to` is in its cache's `arriving`
    BlockName name;
  };
  std::shared_ptr<Cache> from, to;
  Tier* upper = nullptr;  // of the two tiers: its mover copies
  std::vector<Pair> blocks;
  uint64_t bytes = 0;    // that are copied
  bool demotes = false;  // for room on the GPU: counted in its tier's bytes().demoting
  bool purged = false;   // meanwhile: what arrives gets no name
};

class BlockMoves {
 public:
  /// Everything outlives it.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    const std::vector<std::unique_ptr<Tier>>* tiers = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    Mover* mover = nullptr;
  };

  explicit BlockMoves(const Parts& parts) : parts_(parts) {}
  BlockMoves(const BlockMoves&) = delete;
  BlockMoves& operator=(const BlockMoves&) = delete;

  /// The higher of two tiers that are one above the other; nullptr: they are not.
  static Tier* UpperOf(Tier* a, Tier* b) { return a->lower() == b ? a : b->lower() == a ? b : nullptr; }
  static void CountSlots(const Block& block, const Cache& to, const MoveForms& forms, SlotCounts* wanted);
  /// Starts to copy `blocks`, all of cache `from`, into slots of `to`, which they need as CountSlots says. Adds the new
  /// blocks, in order, to `copies`; each has the move as its holder.
  void Start(const std::shared_ptr<Cache>& from, const std::shared_ptr<Cache>& to, absl::Span<Block* const> blocks,
             const MoveForms& forms, bool demotes, Reservation* slots, std::vector<Block*>* copies);
  /// TierOwner's.
  bool Demote(Block* block);
  /// The block's tier has it no more by its name: those of higher tiers with this name are not kept.
  void NotKept(const Block& block);
  /// What is on its way to another memory must not be found there later. digest: of one cache; nullptr: of all.
  void NotePurge(const CacheDigest* digest);

  const std::vector<std::shared_ptr<BlockMove>>& all() const { return moves_; }

 private:
  void Land(BlockMove& move, bool moved, absl::Span<const MovingPage> pages);
  void LandBlock(BlockMove& move, const BlockMove::Pair& pair, bool moved, absl::Span<const MovingPage> pages);

  const Parts parts_;
  std::vector<std::shared_ptr<BlockMove>> moves_;  // under way
};

}  // namespace kvmanager
