// Evictable blocks of one payer in an order that a policy gives them: all, or those that are kept elsewhere, too, or
// those that are not, or those that can be lowered.
//
// Owned by a policy, on its thread. Add and Remove take O(log n).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/btree_set.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

enum class EvictablesOf : uint8_t { kAll, kKept, kUnkept, kLowerable };
constexpr size_t kEvictablesOf = 4;

/// Order: what blocks are compared by; a default one is the least.
template <typename Order>
class OrderedEvictables {
 public:
  /// order: unique here, of this block.
  void Add(const Order& order, Evictable* block) { KV_CHECK(BlocksLike(*block).emplace(order, block).second); }
  /// As it was added.
  void Remove(const Order& order, Evictable* block) { KV_CHECK(BlocksLike(*block).erase({order, block}) == 1); }
  bool empty() const {
    for (const Blocks& blocks : blocks_) {
      if (!blocks.empty()) return false;
    }
    return true;
  }
  /// The first of an order of at least `least`, or nullptr.
  Evictable* First(EvictablesOf of, const Order& least = {}) const {
    const Entry* first = nullptr;
    for (size_t like = 0; like < blocks_.size(); ++like) {
      if (of == EvictablesOf::kKept && (like & kKeptBit) == 0) continue;
      if (of == EvictablesOf::kUnkept && (like & kKeptBit) != 0) continue;
      if (of == EvictablesOf::kLowerable && (like & kLowerableBit) == 0) continue;
      const auto found = blocks_[like].lower_bound({least, nullptr});
      if (found != blocks_[like].end() && (first == nullptr || found->first < first->first)) first = &*found;
    }
    return first == nullptr ? nullptr : first->second;
  }

 private:
  using Entry = std::pair<Order, Evictable*>;
  using Blocks = absl::btree_set<Entry>;  // some 20 bytes a block, of which a std::set takes 64
  static constexpr size_t kKeptBit = 1, kLowerableBit = 2;
  Blocks& BlocksLike(const Evictable& block) {
    return blocks_[(block.kept ? kKeptBit : 0) | (block.can_lower ? kLowerableBit : 0)];
  }
  std::array<Blocks, 4> blocks_;
};

using EvictableQueue = OrderedEvictables<uint64_t>;

}  // namespace kvmanager
