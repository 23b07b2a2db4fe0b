// The fast pool of one KV head: copies of the blocks of tokens that hold most of what queries choose, between the slow
// pool (a sequence's pages) and attention (PQCache, section 3.4).
//
// Where both pools are host memory, as on a CPU, it saves nothing, and a cache is opened without one; where attention
// runs on a device, the fast pool is the device's. Owned by an index and used by one step at a time: whoever wins
// TryLock. A step that finds it taken goes without, and reads the same values.
//
// Invariants:
//  1. A block is in at most one slot; at most `blocks` are in.
//  2. Eviction takes the block with the fewest uses since it came (LFU; ties: the one used longest ago) or the one used
//     longest ago (LRU); never one admitted by the same call.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "codecs/pq/pq_parameters.h"

namespace kvmanager::pq {

/// Tokens of a block.
inline constexpr uint64_t kCacheBlockTokens = 128;

class BlockCache {
 public:
  /// A block that a query chose `tokens` tokens of.
  struct Use {
    uint64_t block = 0;
    uint32_t tokens = 0;
    bool may_enter = true;  // all its tokens are there
  };
  struct Counts {
    uint64_t hits = 0, misses = 0;  // in tokens
    uint64_t evictions = 0;         // in blocks
  };

  BlockCache(uint32_t blocks, size_t block_bytes, Parameters::CachePolicy policy);

  bool TryLock() { return !taken_.test_and_set(std::memory_order_acquire); }
  void Unlock() { taken_.clear(std::memory_order_release); }

  // The rest: whoever has it locked.

  /// The copy of `block`, or nullptr.
  const uint8_t* Find(uint64_t block) const;
  /// A query's blocks, each named once: counts them, notes the uses of those that are in, then admits the ones with the
  /// most tokens (ties: the lower block), at most as many as there are slots. fill(block, to) copies a block in.
  void Update(absl::Span<const Use> uses, absl::FunctionRef<void(uint64_t block, uint8_t* to)> fill, Counts* counts);

  uint64_t bytes() const { return slots_.size() * block_bytes_; }

 private:
  struct Slot {
    uint64_t block = 0;
    uint64_t uses = 0;       // since it came; 0: the slot is empty
    uint64_t last_call = 0;  // that used it
    uint64_t admitted = 0;   // the call that admitted it
  };
  size_t Victim() const;

  const size_t block_bytes_;
  const Parameters::CachePolicy policy_;
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
  uint64_t call_ = 0;
  std::vector<Slot> slots_;
  absl::flat_hash_map<uint64_t, size_t> slot_of_;
  std::vector<Use> ranked_;  // scratch of Update
  std::unique_ptr<uint8_t[]> data_;
};

}  // namespace kvmanager::pq
