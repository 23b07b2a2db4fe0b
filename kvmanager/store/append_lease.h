// Appends of a store: at once, or in pieces that workers write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// An append that is under way, in pieces of some 0.1 ms: first ReserveNext until it is false, then WriteNext, then
/// CommitNext. Meanwhile its sequences refuse other appends, and crops. Nothing of it is visible before CommitNext;
/// once that has begun, it goes to its end, by LongCalls::ReleaseSome if the lease goes before. Destroying it earlier,
/// on the store's thread and with no piece running, gives the slots back. It may outlive the store, and then does
/// nothing.
class AppendLease {
 public:
  virtual ~AppendLease() = default;
  /// Reserves slots for the next pages. False: that was all, or status() is an error. On the store's thread.
  virtual bool ReserveNext() = 0;
  /// Zeroes the next slots that may hold bytes of other tenants, or copies and checks the next pages from what the
  /// entries point to: some 64 KiB. False: that was all, or status() is an error. Any thread, one at a time.
  virtual bool WriteNext() = 0;
  /// The tokens of the next pages become the sequences'. False: that was all, or status() is an error, and then nothing
  /// has become anybody's. A sequence that goes between two pieces is left out. Also called once, and refused, when an
  /// earlier piece has failed. On the store's thread.
  virtual bool CommitNext() = 0;
  /// Errors: of Appends::Append.
  virtual absl::Status status() const = 0;
};

/// What an append does to pages, beside copying.
struct AppendWork {
  uint64_t opened = 0;  // pages
  uint64_t aged = 0;    // pages that are read encoded from now on (reading_rule.h)
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
  /// What such an append would do; nothing of entries that are wrong.
  virtual AppendWork Measure(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) const = 0;
  static constexpr size_t kPagesAtOnce = 128;  // some 0.1 ms
  /// An append in pieces of so many pages, in host memory: what the entries point to must stay until all is written.
  /// Errors: Append's, but for want of room and for what is found by looking at values.
  virtual absl::StatusOr<std::unique_ptr<AppendLease>> Begin(CacheId cache, int layer,
                                                             absl::Span<const AppendEntry> entries,
                                                             size_t pages_at_once) = 0;
  absl::StatusOr<std::unique_ptr<AppendLease>> Begin(CacheId cache, int layer, absl::Span<const AppendEntry> entries) {
    return Begin(cache, layer, entries, kPagesAtOnce);
  }
};

}  // namespace kvmanager
