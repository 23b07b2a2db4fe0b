// Evictable blocks of one payer in an order that a policy gives them: all, or those that are kept elsewhere, too, or
// those that are not.
//
// Owned by a policy, on its thread. Add and Remove take O(log n).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/btree_set.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

enum class EvictablesOf : uint8_t { kAll, kKept, kUnkept };
constexpr size_t kEvictablesOf = 3;

/// Order: what blocks are compared by; a default one is the least.
template <typename Order>
class OrderedEvictables {
 public:
  /// order: unique here, of this block.
  void Add(const Order& order, Evictable* block) { KV_CHECK(BlocksLike(*block).emplace(order, block).second); }
  /// As it was added.
  void Remove(const Order& order, Evictable* block) { KV_CHECK(BlocksLike(*block).erase({order, block}) == 1); }
  bool empty() const { return kept_.empty() && unkept_.empty(); }
  /// The first of an order of at least `least`, or nullptr.
  Evictable* First(EvictablesOf of, const Order& least = {}) const {
    const Entry wanted{least, nullptr};
    const auto kept = of == EvictablesOf::kUnkept ? kept_.end() : kept_.lower_bound(wanted);
    const auto unkept = of == EvictablesOf::kKept ? unkept_.end() : unkept_.lower_bound(wanted);
    if (kept == kept_.end()) return unkept == unkept_.end() ? nullptr : unkept->second;
    return unkept != unkept_.end() && unkept->first < kept->first ? unkept->second : kept->second;
  }

 private:
  using Entry = std::pair<Order, Evictable*>;
  using Blocks = absl::btree_set<Entry>;  // some 20 bytes a block, of which a std::set takes 64
  Blocks& BlocksLike(const Evictable& block) { return block.kept ? kept_ : unkept_; }
  Blocks kept_, unkept_;
};

using EvictableQueue = OrderedEvictables<uint64_t>;

}  // namespace kvmanager
