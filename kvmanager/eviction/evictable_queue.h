// Evictable blocks of one payer in an order that a policy gives them, and those of them that are not kept elsewhere.
//
// Owned by a policy, on its thread. Add and Remove take O(log n).
#pragma once

#include <cstdint>
#include <set>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

/// Order: what blocks are compared by; a default one is the least.
template <typename Order>
class OrderedEvictables {
 public:
  /// order: unique here, of this block.
  void Add(const Order& order, Evictable* block) {
    KV_CHECK(all_.emplace(order, block).second);
    if (!block->kept) unkept_.emplace(order, block);
  }
  /// As it was added.
  void Remove(const Order& order, Evictable* block) {
    KV_CHECK(all_.erase({order, block}) == 1);
    KV_CHECK(unkept_.erase({order, block}) == (block->kept ? 0 : 1));
  }
  bool empty() const { return all_.empty(); }
  /// The first of an order of at least `least`, or nullptr. unkept: of those not kept elsewhere.
  Evictable* First(bool unkept, const Order& least = {}) const {
    const Blocks& blocks = unkept ? unkept_ : all_;
    const auto first = blocks.lower_bound({least, nullptr});
    return first == blocks.end() ? nullptr : first->second;
  }

 private:
  using Blocks = std::set<std::pair<Order, Evictable*>>;
  Blocks all_, unkept_;
};

using EvictableQueue = OrderedEvictables<uint64_t>;

}  // namespace kvmanager
