// Makes PrefixMatches. On the store's thread.
#pragma once

#include <memory>
#include <vector>

#include "kvmanager/base/ids.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/prefix_match.h"

namespace kvmanager {

/// Everything outlives it, unless `alive` has expired.
struct PrefixMatchParts {
  const CacheTable* caches = nullptr;
  BlockIndex* blocks = nullptr;
  const BlockDisk* disk = nullptr;  // nullptr: there is none
  StoreMetrics* metrics = nullptr;
  std::weak_ptr<const bool> alive;
};

std::unique_ptr<PrefixMatch> MakePrefixMatch(PrefixMatchParts parts, CacheId cache, std::vector<BlockName> names);

}  // namespace kvmanager
