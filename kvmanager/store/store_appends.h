// Appends: reserve slots, let the memory write, then commit. On the store's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/store/append_lease.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_reads.h"

namespace kvmanager {

class AppendInPieces;

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
    TierOwner* owner = nullptr;  // of the caches' tiers
    std::weak_ptr<const bool> alive;
  };

  explicit StoreAppends(const Parts& parts);
  ~StoreAppends() override;
  StoreAppends(const StoreAppends&) = delete;
  StoreAppends& operator=(const StoreAppends&) = delete;

  absl::Status Append(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) override;
  AppendWork Measure(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) const override;
  using Appends::Begin;
  absl::StatusOr<std::unique_ptr<AppendLease>> Begin(CacheId cache, int layer, absl::Span<const AppendEntry> entries,
                                                     size_t pages_at_once) override;

  /// `fn` is called when a lease goes that had begun to commit, and FinishSome is to go on.
  void OnLeftovers(std::function<void()> fn) { on_leftovers_ = std::move(fn); }
  /// Some 0.1 ms of it. False: that was all.
  bool FinishSome();

  // For AppendInPieces.
  const Parts& parts() const { return parts_; }
  /// Looks at the entries, and counts the slots that they take.
  absl::Status Check(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                     std::vector<Sequence*>* sequences, SlotCounts* wanted);
  /// That an entry goes on where its sequence is.
  static absl::Status CheckPlace(const Sequence& sequence, LayerRange layers, absl::Span<const AppendEntry> entries,
                                 size_t i);

  /// Checksums of one page's forms, where they were made already; 0: not.
  struct PageSums {
    uint64_t raw = 0, activations = 0;
  };
  /// One layer of an append whose slots are reserved and, where the memory writes at once, written.
  struct Written {
    const std::shared_ptr<Cache>& cache;
    uint32_t layer;
    absl::Span<const AppendEntry> entries;
    absl::Span<Sequence* const> sequences;  // nullptr: it has gone, and its slots go back
    Reservation* slots;                     // of the pages from the first one on that is committed
    absl::Span<const PageSums> sums;        // the same; empty: none was made
  };
  /// The next pages, from `*at` on, become the sequences'. Their tokens begin where the sequences are, aged.
  /// to_encode: gets the pages that are to be encoded.
  void CommitPages(const Written& written, size_t pages, AppendPlace* at, std::vector<PageRef>* to_encode);
  /// After the last page of an entry.
  void EndEntry(Sequence& sequence, LayerRange layers);
  void FinishLater(std::unique_ptr<AppendInPieces> append);

 private:
  /// Looks at the entries and reserves what they take.
  absl::Status Prepare(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                       std::vector<Sequence*>* sequences, Reservation* slots);
  /// What was reserved and, where the memory writes at once, written becomes part of the sequences.
  void Commit(const std::shared_ptr<Cache>& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
              absl::Span<Sequence* const> sequences, Reservation* slots);
  /// The page of the token at `position` < end. Returns the position behind it.
  uint64_t CommitPage(const Written& written, uint32_t entry, uint64_t position, PageSums sums,
                      std::vector<PageRef>* to_encode);

  const Parts parts_;
  uint64_t calls_ = 0;
  std::deque<std::unique_ptr<AppendInPieces>> unfinished_;
  std::function<void()> on_leftovers_ = [] {};
};

}  // namespace kvmanager
