// Sequences that begin with the blocks found by a prefix, taken in pieces. On the store's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/long_call.h"
#include "kvmanager/store/sequence_indexes.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

class SequenceBeginnings {
 public:
  /// Everything outlives it. alive: expires with the store.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    SequenceIndexes* indexes = nullptr;
    SequenceTable* sequences = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit SequenceBeginnings(Parts parts) : parts_(std::move(parts)) {}
  SequenceBeginnings(const SequenceBeginnings&) = delete;
  SequenceBeginnings& operator=(const SequenceBeginnings&) = delete;

  /// PageStore's.
  absl::StatusOr<std::unique_ptr<SequenceBeginning>> Begin(CacheId cache, std::vector<BlockName> prefix,
                                                           uint64_t prompt_tokens);

 private:
  class Beginning;

  const Parts parts_;
};

}  // namespace kvmanager
