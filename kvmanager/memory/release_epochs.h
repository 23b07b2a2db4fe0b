// When a slot that plans may still name can be used again.
//
// A plan names slots; kernels read them long after the host made it. Each plan gets an epoch; a slot that is superseded
// or freed is retired at the epoch of the newest plan. Whoever runs plans (a stream of the daemon or of a client's
// process) is a *holder* with one release counter in memory that the daemon owns: behind its kernels, in stream order,
// it stores there the epoch of the newest plan that it will not run again. A slot is reusable once every plan that
// could name it is released.
//
// A counter is written by another process and believed only as far as it can be right: a value that goes backwards, or
// names no plan of its holder, releases nothing. A holder that lies about its own plans harms nobody else: it maps the
// slabs of its own tenant alone, and slabs that it maps never change tenant. A holder whose process died is removed
// once its pidfd says so, not before: until then its kernels may run.
//
// Single-threaded (the store's thread); counters alone are shared.
//
// Invariants: 1. Epochs of plans only grow, across all holders. 2. A holder's plans are released in the order in which
// they were made. 3. A slot retired at epoch E is returned by Collect() once, iff no unreleased plan has epoch <= E.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/ids.h"

namespace kvmanager {

/// In memory that a GPU can write: the newest released plan's epoch; zero at first.
struct alignas(64) ReleaseCounter {
  std::atomic<uint64_t> released{0};
};
static_assert(sizeof(ReleaseCounter) == 64 && std::atomic<uint64_t>::is_always_lock_free);

class ReleaseEpochs {
 public:
  using HolderId = uint32_t;
  static constexpr uint32_t kHoldersMax = 4096;
  static constexpr uint32_t kOpenPlansMax = 4096;  // of one holder

  /// `counter` is zero, and outlives the holder. Errors: RESOURCE_EXHAUSTED.
  absl::StatusOr<HolderId> AddHolder(const ReleaseCounter* counter);
  /// Nothing of this holder runs any more, nor will: its plans count as released.
  void RemoveHolder(HolderId holder);

  /// Reads the holder's counter, as Collect() does: before somebody else writes it.
  void Refresh(HolderId holder) { ReadCounter(&Live(holder)); }
  /// Would OpenPlan succeed?
  bool HasRoom(HolderId holder);
  /// The epoch of a plan that this holder now makes; it names no slot retired before. Errors: RESOURCE_EXHAUSTED when
  /// the holder has kOpenPlansMax unreleased plans.
  absl::StatusOr<uint64_t> OpenPlan(HolderId holder);

  /// No plan from now on names this slot.
  void Retire(PageId slot);
  /// Reads the counters; appends the retired slots that are reusable now, in the order in which they were retired.
  void Collect(std::vector<PageId>* reusable);

  uint64_t newest_epoch() const { return newest_epoch_; }
  uint64_t retired_slots() const { return retired_.size(); }  // not yet reusable
  /// Of a live holder: plans that it has not released, as of the last Collect() or OpenPlan().
  uint32_t open_plans(HolderId holder) const;

 private:
  struct Holder {
    const ReleaseCounter* counter = nullptr;  // nullptr: no holder has this number
    std::vector<uint64_t> open;               // [kOpenPlansMax] a ring of epochs, oldest at `first`
    uint32_t first = 0;
    uint32_t count = 0;
    uint64_t newest = 0;
    uint64_t oldest() const { return open[first]; }
  };
  struct Retired {
    PageId slot;
    uint64_t epoch = 0;
  };
  void ReadCounter(Holder* holder);
  Holder& Live(HolderId holder);

  uint64_t newest_epoch_ = 0;
  std::vector<Holder> holders_;
  std::vector<HolderId> free_holders_;  // a stack
  std::deque<Retired> retired_;         // epochs ascend
};

}  // namespace kvmanager
