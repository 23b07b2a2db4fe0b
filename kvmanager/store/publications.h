// Names for blocks of sequences, given in pieces. On the store's thread.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/long_call.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

class Publications {
 public:
  /// Everything outlives it. alive: expires with the store.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    BlockIndex* blocks = nullptr;
    SequenceTable* sequences = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit Publications(Parts parts) : parts_(std::move(parts)) {}
  Publications(const Publications&) = delete;
  Publications& operator=(const Publications&) = delete;

  /// PageStore's.
  absl::StatusOr<std::unique_ptr<Publication>> Begin(SequenceId sequence, std::vector<BlockName> names);

 private:
  class Impl;

  const Parts parts_;
};

}  // namespace kvmanager
