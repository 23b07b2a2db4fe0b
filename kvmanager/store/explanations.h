// Makes Explanations. On the store's thread.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/explanation.h"

namespace kvmanager {

/// Everything outlives it, unless `alive` has expired.
struct ExplanationParts {
  const CacheTable* caches = nullptr;
  const GoneBlocks* gone = nullptr;
  const BlockDisk* disk = nullptr;  // nullptr: there is none
  const Clock* clock = nullptr;
  std::weak_ptr<const bool> alive;
};

/// StoreReport::BeginExplain.
absl::StatusOr<std::unique_ptr<Explanation>> MakeExplanation(ExplanationParts parts, CacheId cache,
                                                             std::vector<BlockName> names);

}  // namespace kvmanager
