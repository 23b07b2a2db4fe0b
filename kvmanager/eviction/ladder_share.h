// How much of a tier's evictable bytes stays on the upper rungs of a ladder (Codec::rung).
//
// The blocks of a tier have one order, that of its eviction policy. The coldest block that can be lowered
// (EvictionPolicy::LowerableVictim) is encoded again by the next rung while LowersMore says so; it keeps its place in
// the order. All other room comes from the policy's victims. Thus what the policy would keep longest is on the first
// rung, but for what was lowered once: that stays below. The store and `kvctl simulate` both ask here. Pure; any
// thread.
#pragma once

#include <cstdint>

namespace kvmanager {

/// Of the evictable bytes, those of blocks that can be lowered stay below this.
constexpr double kLowerableShare = 0.5;

/// Whether the next block that can be lowered is to be. lowerable_bytes: of the evictable blocks that can be lowered
/// (Evictable::can_lower); evictable_bytes: of all evictable blocks, these among them. A tier whose slabs hold slots of
/// one size each counts its free slabs with them, so that lower rungs get some before the pool is full.
constexpr bool LowersMore(uint64_t lowerable_bytes, uint64_t evictable_bytes, double share = kLowerableShare) {
  return static_cast<double>(lowerable_bytes) > share * static_cast<double>(evictable_bytes);
}

}  // namespace kvmanager
