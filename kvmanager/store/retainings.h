// Makes Retainings. On the store's thread.
#pragma once

#include <memory>
#include <vector>

#include "kvmanager/base/ids.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/retaining.h"

namespace kvmanager {

/// Everything outlives it, unless `alive` has expired.
struct RetainingParts {
  const CacheTable* caches = nullptr;
  const std::vector<std::unique_ptr<Tier>>* tiers = nullptr;
  BlockDisk* disk = nullptr;  // nullptr: there is none
  std::weak_ptr<const bool> alive;
};

/// CacheDirectory::BeginRetain, of what was checked.
std::unique_ptr<Retaining> MakeRetaining(RetainingParts parts, CacheId cache, std::vector<BlockName> names,
                                         const Retention& retention);

}  // namespace kvmanager
