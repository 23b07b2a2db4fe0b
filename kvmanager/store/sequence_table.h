// The sequences of a store: shown, forked, cropped and dropped. On the store's thread.
//
// A sequence that is dropped or cropped may leave very many blocks. Those beyond some 500 pages are given back by
// ReleaseSome.
//
// Sequences are given to others (hand-offs, arrivals) before they are visible: Hide says so, for CheckInvariants.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/store/arrival_lease.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/sequence.h"
#include "kvmanager/store/sequence_indexes.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_metrics.h"
#include "kvmanager/store/store_report.h"

namespace kvmanager {

class SequenceTable {
 public:
  static constexpr size_t kSequencesMax = StoreUse::kSequencesMax;
  static constexpr size_t kTenantSequencesMax = StoreUse::kTenantSequencesMax;
  static constexpr uint64_t kTenantSharedBlocksMax = StoreUse::kTenantSharedBlocksMax;

  /// Everything outlives it.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    SequenceIndexes* indexes = nullptr;
  };

  explicit SequenceTable(const Parts& parts) : parts_(parts) {}
  SequenceTable(const SequenceTable&) = delete;
  SequenceTable& operator=(const SequenceTable&) = delete;

  // PageStore's.
  absl::StatusOr<SequenceInfo> Describe(SequenceId sequence) const;
  std::vector<SequenceId> Ids() const;  // ascending
  absl::StatusOr<SequenceId> Fork(SequenceId sequence, std::vector<OpenCopy>* copies);
  absl::Status Crop(SequenceId sequence, uint64_t tokens, std::vector<OpenCopy>* copies);
  void Drop(SequenceId sequence);
  void OnLeftovers(std::function<void()> fn) { on_leftovers_ = std::move(fn); }
  bool ReleaseSome();

  void WriteUse(StoreUse* use) const;

  // For the store's other parts.
  absl::StatusOr<Sequence*> Find(SequenceId id) const;
  /// One that calls may use. Errors: NOT_FOUND; UNAVAILABLE for one that did not arrive whole.
  absl::StatusOr<Sequence*> FindUsable(SequenceId id) const;
  /// One that is here as a whole. Errors: FindUsable's; FAILED_PRECONDITION for one that still arrives.
  absl::StatusOr<Sequence*> FindWhole(SequenceId id) const;
  /// Whether `cache` may have one more, which begins with so many blocks: RESOURCE_EXHAUSTED.
  absl::Status CheckLimit(const Cache& cache, size_t blocks) const;
  /// What a new sequence is made of, and that one more may be: INVALID_ARGUMENT, RESOURCE_EXHAUSTED.
  absl::Status CheckNew(const Cache& cache, absl::Span<const BlockName> prefix, uint64_t prompt_tokens) const;
  static std::unique_ptr<Sequence> New(const std::shared_ptr<Cache>& cache);
  SequenceId Show(std::unique_ptr<Sequence> sequence);  // makes it visible
  void Attach(Sequence& sequence, Block* block);        // appends `block`, already held, and takes its raw holds
  void DetachLast(Sequence& sequence);                  // gives the last block back
  /// Takes the blocks from `first` on away from the sequence, and gives them back: at once if they are few, else
  /// ReleaseSome does. REQUIRES: what they hold is what `aged` says now.
  void Leave(Sequence& sequence, uint32_t first);
  /// The same with blocks of `cache` that somebody else holds, without raw holds: the last first.
  void LeaveBlocks(const std::shared_ptr<Cache>& cache, std::vector<Block*> blocks);
  /// What an append at `position` ages, pages_max pages at most. Returns how many.
  size_t Age(Sequence& sequence, uint32_t layer, uint64_t position, size_t pages_max = SIZE_MAX);

  // For CheckInvariants.
  void Hide(const Sequence* sequence) { hidden_.insert(sequence); }
  void Unhide(const Sequence* sequence) { hidden_.erase(sequence); }
  const absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>>& all() const { return sequences_; }
  const absl::flat_hash_set<const Sequence*>& hidden() const { return hidden_; }
  /// Blocks that a sequence has left, and still holds.
  struct Left {
    std::shared_ptr<Cache> cache;
    std::vector<Block*> blocks;
    std::vector<uint32_t> aged;  // [layers] as the sequence's
    EvictionRun run;             // the same
    uint64_t counted = 0;        // in shared_blocks_, until all are given back
  };
  const std::deque<Left>& left() const { return left_; }

 private:
  static constexpr size_t kPagesAtOnce = 512;  // some 0.1 ms

  /// One holder less of a block, and no raw hold of a sequence that has aged so far.
  void GiveBack(Block* block, absl::Span<const uint32_t> aged, const EvictionRun& run);
  void LeaveSoon(Left left);
  /// Gives back the last of them, kPagesAtOnce or one block more.
  void ReleaseLast(Left& left);
  static SequenceInfo InfoOf(const Sequence& sequence);
  /// Block `index` of `sequence`, with copies of the first `tokens` tokens of each layer's page.
  absl::StatusOr<Block*> CopyOpenBlock(const Sequence& sequence, uint32_t index, int tokens,
                                       std::vector<OpenCopy>* copies);

  const Parts parts_;
  SequenceId next_sequence_ = 1;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  absl::flat_hash_set<const Sequence*> hidden_;
  std::deque<Left> left_;
  std::function<void()> on_leftovers_ = [] {};
  OwnerCounts<PayerId> of_payer_;       // sequences_
  OwnerCounts<PayerId> shared_blocks_;  // with which those began; and left_
};

}  // namespace kvmanager
