// SlotTables of a store. The slots that a table names stay until every plan of that time is released (ReleaseEpochs),
// so a step costs as much as it changes, however long its sequences are. On the store's thread.
#pragma once

#include <memory>
#include <vector>

#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/slot_tables.h"

namespace kvmanager {

class TableChanges final : public SlotTables {
 public:
  /// Everything outlives it.
  struct Parts {
    const std::vector<std::unique_ptr<Tier>>* tiers = nullptr;
    const CacheTable* caches = nullptr;
    const SequenceTable* sequences = nullptr;
  };

  explicit TableChanges(const Parts& parts) : parts_(parts) {}

  absl::Status TakeChanges(SequenceId sequence, int layer, std::vector<PagePlace>* changes,
                           TableKeeper keeper) override;
  uint64_t ChangedPages(SequenceId sequence, TableKeeper keeper) const override;
  uint64_t SparseFrom(SequenceId sequence, uint64_t position, int tokens) const override;
  bool OwnsSlab(CacheId cache, int device, uint32_t slab) const override;
  void CollectReleased() override {
    for (const auto& tier : *parts_.tiers) tier->Collect();
  }
  bool AwaitsRelease(int device) const override;

 private:
  const Parts parts_;
};

}  // namespace kvmanager
