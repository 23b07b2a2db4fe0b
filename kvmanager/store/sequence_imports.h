// Receiving a sequence: slots for pages that arrive in any order, and the sequence that they become.
// On the store's thread.
#pragma once

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/sequence_table.h"

namespace kvmanager {

class SequenceImports final : public Imports {
 public:
  /// Everything outlives it and its leases, or the store has gone: then `alive` has expired.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    SequenceIndexes* indexes = nullptr;
    SequenceTable* sequences = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit SequenceImports(Parts parts) : parts_(std::move(parts)) {}

  using Imports::Import;
  absl::StatusOr<std::unique_ptr<ImportLease>> Import(const HandOffHeader& first, std::shared_ptr<const Codec> codec,
                                                      RecomputeChoice recompute) override;
  void OnRoom(absl::AnyInvocable<void()> fn) override { on_room_ = std::move(fn); }
  /// Host memory was given back, or can be evicted.
  void RoomCame();

 private:
  const Parts parts_;
  absl::AnyInvocable<void()> on_room_;
};

}  // namespace kvmanager
