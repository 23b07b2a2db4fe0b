// Sending a sequence: its pages are pinned as they become full, and offered as they become encoded.
//
// A page that the codec keeps raw whatever is in it, a sink, is sent like an encoded one, as soon as the codec has
// passed it. A page that the codec declines for its values is withdrawn and sent raw with the trailer.
//
// On a GPU a page is full once it is reserved, and its bytes come later. One that is encoded was written; one that
// travels as it was appended is offered when Written says so, and what the trailer brings once everything is written.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/mover.h"
#include "kvmanager/store/sequence_table.h"

namespace kvmanager {

class SequenceExports final : public Exports {
 public:
  /// Everything outlives it and its leases, or the store has gone: then `alive` has expired.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    SequenceTable* sequences = nullptr;
    Mover* mover = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit SequenceExports(Parts parts) : parts_(std::move(parts)) {}

  absl::StatusOr<std::unique_ptr<ExportLease>> Whole(SequenceId sequence, const ExportOptions& options) override;
  absl::StatusOr<std::unique_ptr<ExportLease>> Growing(SequenceId sequence, uint64_t tokens,
                                                       const ExportOptions& options) override;
  bool AwaitsWrites(SequenceId sequence) const override;
  void Written(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) override;

 private:
  /// written: what there is has been written, and nothing comes.
  absl::StatusOr<std::unique_ptr<ExportLease>> Begin(SequenceId sequence, uint64_t tokens, const ExportOptions& options,
                                                     bool written);

  const Parts parts_;
};

}  // namespace kvmanager
