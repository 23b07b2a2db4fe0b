// How much each of many owners has, and all of them together: for bounds of one that leave room for others.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

/// The end of an error's field where the bound is one tenant's own, which leaves others room.
inline constexpr char kOfTenant[] = " of this tenant";

/// An owner who has nothing takes no memory. One thread.
template <typename Owner>
class OwnerCounts {
 public:
  /// Owners may be given as whatever the map's keys are found by: a std::string as an absl::string_view.
  template <typename Key>
  void Add(const Key& owner, uint64_t count = 1) {
    if (count == 0) return;
    all_ += count;
    counts_[owner] += count;
  }
  /// Of what was added.
  template <typename Key>
  void Remove(const Key& owner, uint64_t count = 1) {
    if (count == 0) return;
    const auto found = counts_.find(owner);
    KV_CHECK(found != counts_.end() && found->second >= count);
    all_ -= count;
    if ((found->second -= count) == 0) counts_.erase(found);
  }

  template <typename Key>
  uint64_t Of(const Key& owner) const {
    const auto found = counts_.find(owner);
    return found == counts_.end() ? 0 : found->second;
  }
  uint64_t all() const { return all_; }
  /// Of the owner who has most. It looks at all of them.
  uint64_t most() const {
    uint64_t most = 0;
    for (const auto& [owner, count] : counts_) most = std::max(most, count);
    return most;
  }

 private:
  uint64_t all_ = 0;
  absl::flat_hash_map<Owner, uint64_t> counts_;  // none is 0
};

}  // namespace kvmanager
