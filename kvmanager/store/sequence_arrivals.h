// Sequences that come from another memory: a prefix that a GPU's cache fetches from the host, a sequence that is copied
// from one memory to the other. First the lease waits until what is to be copied is encoded, then until it is there.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/arrival_lease.h"
#include "kvmanager/store/block_moves.h"
#include "kvmanager/store/sequence_table.h"

namespace kvmanager {

class SequenceArrivals {
 public:
  /// Everything outlives it and its leases, or the store has gone: then `alive` has expired.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    SequenceIndexes* indexes = nullptr;
    SequenceTable* sequences = nullptr;
    BlockMoves* moves = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit SequenceArrivals(Parts parts) : parts_(std::move(parts)) {}

  /// PageStore's.
  absl::StatusOr<std::unique_ptr<ArrivalLease>> Fetch(CacheId cache, absl::Span<const BlockName> prefix,
                                                      uint64_t prompt_tokens);
  absl::StatusOr<std::unique_ptr<ArrivalLease>> Copy(SequenceId sequence, int device);

 private:
  const Parts parts_;
};

}  // namespace kvmanager
