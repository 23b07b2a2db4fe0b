// Sending a sequence: who may, and what is done of it in pieces. Each is an ExportedSequence (exported_sequence.h), or
// goes by way of the host (host_export.h). On the store's thread.
//
// What a hand-off that has gone leaves pinned, and what one has to do that nobody calls it for, is done by LongCalls::
// ReleaseSome, some 500 pages at a time.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/export_holds.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/mover.h"
#include "kvmanager/store/sequence_table.h"

namespace kvmanager {

class ExportedSequence;

/// Something that a hand-off has to do, in pieces. It leaves the list (SequenceExports::Forget) when destroyed.
class ExportWork {
 public:
  virtual ~ExportWork() = default;
  /// Does a piece. False: that was all for now.
  virtual bool DoSome() = 0;
  /// Tells its owner what is new.
  virtual void Tell() = 0;
};

class SequenceExports final : public Exports {
 public:
  static constexpr size_t kPagesAtOnce = 512;         // some 0.1 ms
  static constexpr size_t kBytesAtOnce = 512 * 1024;  // that are copied or hashed: likewise

  /// Everything outlives it and its leases, or the store has gone: then `alive` has expired.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    SequenceTable* sequences = nullptr;
    Mover* mover = nullptr;
    TierOwner* owner = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit SequenceExports(Parts parts) : parts_(std::move(parts)) {}

  absl::StatusOr<std::unique_ptr<ExportBeginning>> BeginWhole(SequenceId sequence,
                                                              const ExportOptions& options) override;
  absl::StatusOr<std::unique_ptr<ExportBeginning>> BeginGrowing(SequenceId sequence, uint64_t tokens,
                                                                const ExportOptions& options) override;
  bool AwaitsWrites(SequenceId sequence) const override;
  void Written(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) override;

  // LongCalls'.
  void OnLeftovers(std::function<void()> fn) { on_leftovers_ = std::move(fn); }
  bool ReleaseSome();
  bool GoOnSome();

  // For hand-offs.
  const Parts& parts() const { return parts_; }
  /// A lease of its cache less once all is given back: much of it later.
  void GiveBack(ExportHolds holds);
  /// Has `work` done by GoOnSome. Not while it is.
  void Later(ExportWork* work);
  void Forget(ExportWork* work);

  /// Pages of hand-offs that are sent, listed or not, until what they held is given back.
  const OwnerCounts<PayerId>& pages() const { return pages_; }
  /// For CheckInvariants.
  const std::deque<ExportHolds>& left() const { return left_; }

 private:
  /// written: what there is has been written, and nothing comes.
  absl::StatusOr<std::unique_ptr<ExportedSequence>> Begin(const Sequence& sequence, uint64_t tokens,
                                                          const ExportOptions& options, bool written);
  absl::Status CheckRoom(PayerId payer, uint64_t pages) const;
  void Closed(const ExportHolds& holds);

  const Parts parts_;
  OwnerCounts<PayerId> pages_;
  std::deque<ExportHolds> left_;
  std::deque<ExportWork*> work_;
  std::function<void()> on_leftovers_ = [] {};
};

}  // namespace kvmanager
