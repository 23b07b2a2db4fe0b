// The block first whose memory buys the least recompute that is saved: by what its tokens would cost to compute again,
// the probability that they return, the time until then, and its bytes.
//
// A block's worth is worth(kind, age) of return_model.h times the cost of computing its tokens, divided by its bytes.
// Attention makes the cost of a token grow with its position (CostEvictionOptions).
//
// A kind says of the run that used a block last whether it went on where an earlier run had ended, as the next turn of
// a conversation does, and how much was new; the last block of a run is a kind of its own, since the next turn has
// other tokens there. What was evicted is remembered (ghost_table.h), so a conversation whose blocks were lost counts
// as one that returned, and the model learns from it.
//
// A block is worthless without its ancestors: of one kind and age the least recently used goes first, which is the end
// of a chain. Nothing is fitted beforehand: a new tier begins as LRU and learns.
//
// Invariants: 1. an evictable block is in the queue of its payer and of its notes' kind, by its last use. 2. the
// model counts it as waiting from its last Touch by a run until it is found or named again, or forgotten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "kvmanager/eviction/eviction_policy.h"
#include "kvmanager/eviction/ghost_table.h"

namespace kvmanager {

struct CostEvictionOptions {
  size_t ghosts = GhostTable::kDefaultSize;
  /// The position at which attention costs a token as much as all the rest; about 32768 for Llama-3.1-8B (4 x 32 layers
  /// x 4096 x 32768 FLOPs against 2 x 8e9). Infinity: each token costs the same. That is the default, since it saves
  /// more: a finite value keeps ends of long chains, and the short chains that go for them return more often
  /// (docs/benchmarks/2026-11-27-eviction.md).
  double equal_cost_tokens = std::numeric_limits<double>::infinity();
};

class CostEvictionPolicy : public EvictionPolicy {
 public:
  /// Of all blocks, so far.
  virtual uint64_t uses() const = 0;
  /// How likely `block`, which was touched, is used again before there were so many more uses, as far as was learned.
  virtual double ChanceOf(const Evictable& block, uint64_t uses) const = 0;
};

std::unique_ptr<CostEvictionPolicy> MakeCostEviction(const CostEvictionOptions& options = {});

}  // namespace kvmanager
