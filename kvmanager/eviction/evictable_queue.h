// Evictable blocks of one payer in an order that a policy gives them: all, or those that are kept elsewhere, too, or
// those that are not.
//
// Owned by a policy, on its thread. Add and Remove take O(log n).
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

class EvictableQueue {
 public:
  /// order: unique here.
  void Add(uint64_t order, Evictable* block) { KV_CHECK(BlocksLike(*block).emplace(order, block).second); }
  /// As it was added.
  void Remove(uint64_t order, Evictable* block) { KV_CHECK(BlocksLike(*block).erase({order, block}) == 1); }
  bool empty() const { return kept_.empty() && unkept_.empty(); }
  enum class Of : uint8_t { kAll, kKept, kUnkept };
  static constexpr size_t kOfs = 3;
  /// The first of an order of at least `least`, or nullptr.
  Evictable* First(Of of, uint64_t least = 0) const {
    const Entry wanted{least, nullptr};
    const auto kept = of == Of::kUnkept ? kept_.end() : kept_.lower_bound(wanted);
    const auto unkept = of == Of::kKept ? unkept_.end() : unkept_.lower_bound(wanted);
    if (kept == kept_.end()) return unkept == unkept_.end() ? nullptr : unkept->second;
    return unkept != unkept_.end() && unkept->first < kept->first ? unkept->second : kept->second;
  }

 private:
  using Entry = std::pair<uint64_t, Evictable*>;
  using Blocks = std::set<Entry>;
  Blocks& BlocksLike(const Evictable& block) { return block.kept ? kept_ : unkept_; }
  Blocks kept_, unkept_;
};

}  // namespace kvmanager
