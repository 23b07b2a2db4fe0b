// What tenants may have of the pools, and what they have: values that copy.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"

namespace kvmanager {

/// Of payers (payer_name.h), by name. Whoever is not named has no guarantee, and at most a share of each pool.
struct Quotas {
  struct InPool {
    uint64_t guaranteed_bytes = 0;
    std::optional<uint64_t> most_bytes;  // nothing: as for those who are not named; never less than what is guaranteed
    friend bool operator==(const InPool&, const InPool&) = default;
  };
  struct Tenant {
    InPool host, gpu;  // gpu: of each
    /// device: as CacheConfig::device.
    const InPool& In(int device) const { return device < 0 ? host : gpu; }
    friend bool operator==(const Tenant&, const Tenant&) = default;
  };
  absl::flat_hash_map<std::string, Tenant> tenants;
  uint64_t most_percent = 100;  // of a pool, for those who are not named: 1..100
};

/// What a payer has and may have of one pool.
struct PoolShare {
  std::string payer;
  int device = 0;  // as CacheConfig::device
  uint64_t bytes = 0;
  uint64_t guaranteed_bytes = 0, most_bytes = 0;
};

}  // namespace kvmanager
