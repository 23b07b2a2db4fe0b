// Makes BlockWrites into a cache in host memory. On the store's thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/block_transfers.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

struct BlockWritesParts {
  BlockIndex* blocks = nullptr;
  StoreMetrics* metrics = nullptr;
  std::weak_ptr<const bool> alive;  // expires with the store
};

/// Reserves slots for those of `names` that `cache` does not have; the first name is block `first` of its sequence.
/// raw: [names][layers], 1 where a page comes raw. Errors: INVALID_ARGUMENT (a name twice; the name of another
/// block; a page raw that must be encoded, or the other way round), Tier::Reserve's; nothing was reserved then.
absl::StatusOr<std::unique_ptr<BlockWrites>> MakeBlockWrites(const BlockWritesParts& parts,
                                                             const std::shared_ptr<Cache>& cache, uint32_t first,
                                                             absl::Span<const BlockName> names,
                                                             absl::Span<const uint8_t> raw);

}  // namespace kvmanager
