// Makes BlockReads of a cache in host memory. On the store's thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/block_transfers.h"
#include "kvmanager/store/lease_pages.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

/// alive: expires with the store, with which the rest goes.
struct BlockReadParts {
  BlockIndex* blocks = nullptr;
  LeasePages* pages = nullptr;  // counts those of mapped reads
  StoreMetrics* metrics = nullptr;
  std::weak_ptr<const bool> alive;
};

/// Finds `names`, the first of which is block `first` of its sequence, as far as they are stored as a whole, their
/// pages fit `room` and kTransferPagesMax. Errors, of mapped ones: RESOURCE_EXHAUSTED (pages under leases).
absl::StatusOr<std::unique_ptr<BlockReads>> MakeBlockReads(const BlockReadParts& parts,
                                                           const std::shared_ptr<Cache>& cache, uint32_t first,
                                                           absl::Span<const BlockName> names, const ReadRoom& room);

}  // namespace kvmanager
