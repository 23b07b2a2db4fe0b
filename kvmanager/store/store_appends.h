// Appends: reserve slots, let the memory write, then commit. On the store's thread, but for what a lease writes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/store/append_lease.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_reads.h"

namespace kvmanager {

class StoreAppends final : public Appends {
 public:
  /// Everything outlives it. alive: expires with the store.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    const Clock* clock = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    SequenceIndexes* indexes = nullptr;
    SequenceTable* sequences = nullptr;
    const StoreReads* reads = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit StoreAppends(const Parts& parts) : parts_(parts) {}
  StoreAppends(const StoreAppends&) = delete;
  StoreAppends& operator=(const StoreAppends&) = delete;

  absl::Status Append(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) override;
  absl::StatusOr<std::unique_ptr<AppendLease>> Begin(CacheId cache, int layer,
                                                     absl::Span<const AppendEntry> entries) override;

 private:
  class Lease;

  /// Looks at the entries.
  absl::Status Check(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                     std::vector<Sequence*>* sequences, SlotCounts* wanted);
  /// Looks at the entries and reserves what they take.
  absl::Status Prepare(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                       std::vector<Sequence*>* sequences, Reservation* slots);
  /// What was reserved and, where the memory writes at once, written becomes part of the sequences. checksums: of the
  /// pages that are opened here, in their order, of an identity codec, where they were made already; 0: not.
  void Commit(const std::shared_ptr<Cache>& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
              absl::Span<Sequence* const> sequences, Reservation* slots, absl::Span<const uint64_t> checksums = {});
  void CommitLayer(const std::shared_ptr<Cache>& cache, uint32_t layer, absl::Span<const AppendEntry> entries,
                   absl::Span<Sequence* const> sequences, Reservation* slots, absl::Span<const uint64_t> checksums,
                   std::vector<PageRef>* to_encode);

  const Parts parts_;
  uint64_t calls_ = 0;
};

}  // namespace kvmanager
