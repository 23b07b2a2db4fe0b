// Appends of a store: at once, or in pieces that workers write.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// An append that is under way: its slots are reserved, and the sequences are as they were. Destroying it, on the
/// store's thread and with no piece running, gives the slots back. It may outlive the store, and then does nothing.
class AppendLease {
 public:
  virtual ~AppendLease() = default;
  /// Zeroes the next slots that may hold bytes of other tenants, or copies and checks the next pages from what the
  /// entries point to: some 64 KiB. False: that was all. Any thread, one at a time.
  virtual bool WriteNext() = 0;
  /// Everything is written: the tokens become the sequences'. Once, on the store's thread. Errors: of Appends::Append.
  virtual absl::Status Commit() = 0;
};

/// On the store's thread.
class Appends {
 public:
  virtual ~Appends() = default;
  /// Appends to layers of which every entry's position must be the token count. In host memory K and V of one layer are
  /// copied here, and the copy is checked for NaN and infinity. On a GPU kernels write them later, and whether they are
  /// finite is known later, too: a sequence is published only after that was checked. Pages that this fills are given
  /// to the executor before it returns; on a GPU their bytes will be there in the order of submission. Slots of indexes
  /// are taken here, and the jobs of indexes given to the executor (Train). Errors: NOT_FOUND (sequence),
  /// FAILED_PRECONDITION (position, naming the expected one), INVALID_ARGUMENT (tokens; NaN or Inf in K or V with
  /// entry, side, token, head, channel, or in X; X for a cache that keeps no activations), RESOURCE_EXHAUSTED: naming
  /// the pool's limit and the tenant's largest caches, where evicting every evictable block would not make room, or
  /// what was evicted has to be waited for (SlotTables::AwaitsRelease); kLeasePagesMax, where reading the entries would
  /// pin too much.
  virtual absl::Status Append(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) = 0;
  /// The same in pieces, in host memory: what the entries point to must stay as long as the lease. What else happens to
  /// the sequences meanwhile may make Commit fail. Errors: Append's, but for what is found by looking at values.
  virtual absl::StatusOr<std::unique_ptr<AppendLease>> Begin(CacheId cache, int layer,
                                                             absl::Span<const AppendEntry> entries) = 0;
};

}  // namespace kvmanager
