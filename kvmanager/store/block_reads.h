// Makes BlockReads of a cache in host memory. On the store's thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/block_transfers.h"

namespace kvmanager {

/// Finds `names`, the first of which is block `first` of its sequence, as far as they are stored as a whole, their
/// pages fit `bytes_max` when each is rounded up to `align`, and kTransferPagesMax. alive: expires with the store.
std::unique_ptr<BlockReads> MakeBlockReads(BlockIndex* blocks, const std::shared_ptr<Cache>& cache, uint32_t first,
                                           absl::Span<const BlockName> names, uint64_t bytes_max, uint64_t align,
                                           std::weak_ptr<const bool> alive);

}  // namespace kvmanager
