// The offline optimum: a policy that knows the whole trace.
//
// The block whose next use is furthest in the future goes first, and among equals the one furthest from its sequence's
// beginning (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966). A request uses all
// blocks of its prefix, so a block's next use is never after its descendants': the end of a chain goes first, no block
// is kept without its ancestors, and each block that hits is a prefix hit. Where all blocks have the same bytes and
// each block of a request is stored, as all policies here do, no policy has more hits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kvmanager/eviction/eviction_policy.h"
#include "kvmanager/simulator/trace.h"

namespace kvmanager::simulator {

/// For each place in trace.blocks, the number of the request that names this block next; SIZE_MAX: none does.
std::vector<size_t> NextUses(const Trace& trace);

/// next_use: by Evictable::id, of the time that Touch is called in.
std::unique_ptr<EvictionPolicy> MakeOptimum(std::function<size_t(uint64_t id)> next_use);

}  // namespace kvmanager::simulator
