// Appends: reserve slots, let the memory write, then commit. On the store's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_reads.h"

namespace kvmanager {

class StoreAppends {
 public:
  /// Everything outlives it.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    const Clock* clock = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    SequenceIndexes* indexes = nullptr;
    SequenceTable* sequences = nullptr;
    const StoreReads* reads = nullptr;
  };

  explicit StoreAppends(const Parts& parts) : parts_(parts) {}
  StoreAppends(const StoreAppends&) = delete;
  StoreAppends& operator=(const StoreAppends&) = delete;

  /// PageStore's.
  absl::Status Append(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries);

 private:
  /// Looks at the entries. pages: that their queries would read.
  absl::Status Check(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                     std::vector<Sequence*>* sequences, SlotCounts* wanted, uint64_t* pages);
  /// What was reserved and, where the memory writes at once, written becomes part of the sequences.
  void Commit(const std::shared_ptr<Cache>& cache, uint32_t layer, absl::Span<const AppendEntry> entries,
              absl::Span<Sequence* const> sequences, Reservation* slots, std::vector<PageRef>* to_encode);

  const Parts parts_;
  uint64_t calls_ = 0;
};

}  // namespace kvmanager
