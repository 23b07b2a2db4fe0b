// Indexes of sequences (codecs/sequence_index.h): made, copied, cropped and dropped with them; their jobs and, where
// they take any, their slots. On the store's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/sequence.h"
#include "kvmanager/store/slot_tables.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

class SequenceIndexes {
 public:
  /// Everything outlives it. alive: expires with the store.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;  // whose waiters wait for jobs of indexes, too
    std::weak_ptr<const bool> alive;
  };

  explicit SequenceIndexes(Parts parts) : parts_(std::move(parts)) {}
  SequenceIndexes(const SequenceIndexes&) = delete;
  SequenceIndexes& operator=(const SequenceIndexes&) = delete;

  /// A new index for a sequence of `cache` that has `tokens` tokens, if the codec has indexes.
  void Make(Sequence& sequence, const IndexFacts& facts, uint64_t tokens);
  void Copy(const Sequence& from, Sequence& to);
  void Crop(Sequence& sequence, uint64_t tokens);
  void Drop(Sequence& sequence);
  /// Begins what `layer`'s next queries will need.
  void Advance(Sequence& sequence, uint32_t layer);
  void AdvanceAll(Sequence& sequence);  // every layer
  /// Adds to `wait` what queries `first` .. `last` of `layer` wait for; it is begun.
  void Need(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last, IndexJobs* wait);
  /// After its step. sequence: nullptr if it has gone.
  void TakeBack(Sequence* sequence, TokenSelector& selector);

  /// Where indexes take slots: those that an append (or none, of 0 tokens) of entries at `position` needs so that
  /// queries before `end` can choose; and their giving.
  void CountSlots(const Sequence& sequence, LayerRange layers, uint64_t position, int tokens, uint64_t end,
                  SlotCounts* wanted) const;
  void GiveSlots(Sequence& sequence, LayerRange layers, uint64_t position, int tokens, uint64_t end,
                 Reservation* slots);
  /// Those places that changed, for a table.
  static void AddChanges(const Sequence& sequence, uint32_t layer, Sequence::Changes& changed,
                         std::vector<PagePlace>* changes);

 private:
  void BeginJobs(const Sequence& sequence, const IndexJobs& jobs);
  void EndJob(IndexJob& job, absl::Span<const PageRef> pins, absl::Status status);
  std::shared_ptr<const IndexMemory> NewIndexMemory(Tier* tier, PageId slot);
  /// Chunks of a sequence of `tokens` tokens of which none changes any more, whoever else has them.
  static void KeepFullChunks(const Cache& cache, uint64_t tokens, Sequence& sequence);
  void CountIndexBytes(Sequence& sequence);

  const Parts parts_;
};

}  // namespace kvmanager
