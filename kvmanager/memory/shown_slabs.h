// The slabs of a PagePool that processes of their tenant map for reading, or may map soon.
//
// Only where each slab has a region of its own: else there are none. A slab that is shown is bound to its tenant
// (slab_bindings.h) until the kernel says that nobody has it open or mapped any more. Owned by the pool, whose thread
// is this one's.
//
// Invariant: the slabs listed here are exactly those that are bound or withheld, each once; those that are being
// cleaned are not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/memory/slab_bindings.h"
#include "kvmanager/memory/slot_pool.h"

namespace kvmanager {

class ShownSlabs {
 public:
  static constexpr size_t kLooksMax = 16;                       // slabs that one TakeBack looks at: less than 0.1 ms
  static constexpr size_t kBindLooks = 128, kLooksOfPiece = 8;  // that Bind looks at first, and in one piece of it
  static constexpr size_t kBindsOfPiece = 16;                   // that one piece binds
  static constexpr int64_t kQuietNs = 100'000'000;              // after TakeBackOne looked at all in vain, or Bind did
  static constexpr int64_t kMapWithinNs = 10'000'000'000;       // what was bound ahead of need is mapped by then
  static constexpr uint64_t kFreeBesideCleaning = 1;            // slabs that whoever needs one finds meanwhile
  static constexpr size_t kRecallsMax = 64;                     // slabs that one Recalled names
  static constexpr uint64_t kAloneNumerator = 7, kParts = 8;    // of the pool, for a payer who has all that is used

  /// regions: [slabs], or empty: nothing is shown. clock: nullptr: no time passes between Bind and TakeBack, and what
  /// is shown was so for long. All outlive this.
  ShownSlabs(SlabAllocator* allocator, absl::Span<const std::unique_ptr<Region>> regions, const Clock* clock)
      : allocator_(*allocator), regions_(regions), clock_(clock) {}
  ShownSlabs(const ShownSlabs&) = delete;
  ShownSlabs& operator=(const ShownSlabs&) = delete;

  /// Where a slot is, if a process of its tenant may be shown all of its slab.
  std::optional<SlotPool::SlabPlace> Showable(PageId id) const;
  /// A descriptor to read a slab by in which a handed-out slot is Showable; the caller's. Errors: FAILED_PRECONDITION
  /// (one payer's slabs that are shown would be more than half of the pool, and its guarantee, while others have some;
  /// or the slab is not to be shown); UNAVAILABLE.
  absl::StatusOr<int> Show(uint32_t slab);

  // Ahead of need.
  /// Binds slabs to a tenant until all of its bound ones are `bytes`, rounded down to slabs, or it can have no more:
  /// first those that it has and that may be shown, then free ones. Its payer may have as many as Show would bind, and
  /// 7/8 of the pool while nobody else has some. Those that nobody maps within kMapWithinNs are taken back. Returns all
  /// slabs that ShowBound shows. Errors: FAILED_PRECONDITION (nothing is shown here).
  absl::StatusOr<std::vector<uint32_t>> Bind(TenantId tenant, uint64_t bytes);
  /// The same in pieces, between which others may do anything.
  struct Binding {
    TenantId tenant = 0;
    uint64_t bytes = 0;
    size_t looks = 0;  // that are left
  };
  absl::StatusOr<Binding> BeginBind(TenantId tenant, uint64_t bytes) const;
  /// Less than 0.1 ms. False: that was the last piece.
  bool BindSome(Binding* binding);
  std::vector<uint32_t> BoundTo(TenantId tenant) const;  // what Bind returns
  /// A descriptor to read a slab by that is bound to this tenant, in use or not; the caller's. Errors:
  /// FAILED_PRECONDITION, UNAVAILABLE.
  absl::StatusOr<int> ShowBound(TenantId tenant, uint32_t slab);

  /// While fewer than an eighth of the slabs are free: some that hold nothing, but are bound since more than
  /// kMapWithinNs, which processes should let go; in turns, at most kRecallsMax. Of those of `tenant`, who asks, only
  /// what its payer would not be bound any more.
  std::vector<uint32_t> Recalled(TenantId tenant);
  /// Looks whether some of the slabs that are shown are read by nobody any more, the next kLooksMax of them; these are
  /// as others. To be called now and then.
  void TakeBack();
  /// The same of those that hold nothing, until one is as others. False: none is, of the next kLooksMax, or none was
  /// just now.
  bool TakeBackOne();
  /// The pool's slots were restored: slabs that processes map since before stay whose they are, or nobody's.
  void FindReaders();

  // Free slabs that a tenant wrote, which others are not shown before they are clean (slab_cleaner.h).
  /// Whether a tenant lacked clean slabs since this was asked last.
  bool TakeLacking() { return std::exchange(lacks_, false); }
  /// A slab that is nobody's from now on, to be zeroed. Nothing: all are clean, or too few are free beside those that
  /// guarantees lack, but for the guarantee of who lacked clean slabs last.
  std::optional<uint32_t> BeginCleaning();
  void EndCleaning(uint32_t slab);
  uint64_t cleaning() const { return cleaning_; }  // slabs

  size_t count() const { return shown_.size(); }

 private:
  struct Shown {
    uint32_t slab = 0;
    int64_t since_ns = 0;
    bool ahead = false;  // nobody was given a descriptor yet
  };

  int64_t NowNs() const { return clock_ == nullptr ? INT64_MAX : clock_->NowNs(); }
  bool IsRecent(const Shown& shown) const {
    return clock_ != nullptr && clock_->NowNs() - shown.since_ns < kMapWithinNs;
  }
  bool HasOthers(const PoolShares::Account& account) const;
  /// Bytes that may be bound to tenants of a payer while others have memory.
  uint64_t MostBeside(const PoolShares::Account& account) const;
  /// Whether one slab more may be so, of `most` bytes: who reads the withheld ones is not known, so they count for all.
  bool MayBind(const PoolShares::Account& account, uint64_t most) const;
  /// The same of one that is free, by what the payer may have at most.
  bool MayBindFree(const PoolShares::Account& account) const;
  void NoteLacking(const PoolShares::Account& account) const {
    lacks_ = true;
    lacking_ = account.payer;
  }
  void Add(uint32_t slab, bool ahead) { shown_.push_back({slab, NowNs(), ahead}); }
  void LookAt(size_t looks);
  /// Looks at the next one of shown_. True: it is as others.
  bool TakeBackNext();

  SlabAllocator& allocator_;
  const absl::Span<const std::unique_ptr<Region>> regions_;
  const Clock* const clock_;
  std::vector<Shown> shown_;
  size_t look_ = 0;              // of shown_, the next to be looked at
  uint64_t looked_in_vain_ = 0;  // by TakeBackOne, since it took one back or was quiet
  int64_t quiet_until_ns_ = INT64_MIN;
  size_t recall_ = 0;      // of shown_, the next to be recalled
  uint64_t withheld_ = 0;  // of shown_: nobody's, as processes map them since before the pool's slots were restored
  mutable bool lacks_ = false;
  mutable PayerId lacking_ = 0;  // of whom, last
  uint64_t cleaning_ = 0;
};

/// ShownSlabs::TakeBackOne of a pool that perhaps shows none.
inline bool TakeBackSlab(SlotPool* pool) { return pool->shown() != nullptr && pool->shown()->TakeBackOne(); }

}  // namespace kvmanager
