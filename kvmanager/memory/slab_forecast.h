// Foretells what a SlabAllocator would answer, also after slots were reclaimed, and whose are to be reclaimed first. A
// view: made for a question, and not kept.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "kvmanager/memory/slab_allocator.h"

namespace kvmanager {

class SlabForecast {
 public:
  using SlotsWanted = SlabAllocator::SlotsWanted;

  explicit SlabForecast(const SlabAllocator& of) : of_(of) {}

  /// Would Allocate succeed for all of `wanted`, one behind the other in this order? With `reclaim`: after every
  /// reclaimable slot was freed that the tenant's payer may take: its own, and what others have beyond what it would
  /// have then, each of them as few slabs as that comes to. Of others' small slabs the worst case counts, so that it
  /// may say no where less than a slab is missing.
  bool CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim) const;
  /// Whose reclaimable slots are freed next for `wanted`, of those payers of whom has() says that they have some;
  /// nothing: nobody's may be.
  std::optional<PayerId> NextToGive(TenantId tenant, absl::Span<const SlotsWanted> wanted,
                                    absl::FunctionRef<bool(PayerId)> has) const;

 private:
  using Account = SlabAllocator::Account;
  using Room = SlabAllocator::Room;

  Room RoomReclaimed(TenantId tenant, const Account& account, absl::Span<const SlotsWanted> wanted) const;
  /// Whether `wanted` fits into `room`; growth: bytes of areas that it takes and that are not paid for.
  bool Fits(TenantId tenant, const Account& account, absl::Span<const SlotsWanted> wanted, Room room, bool reclaim,
            uint64_t* growth) const;
  /// What the payer would be charged with `wanted`, room for that given.
  uint64_t ChargeWith(TenantId tenant, const Account& account, absl::Span<const SlotsWanted> wanted,
                      bool reclaim) const;
  /// Of such a charge, what is beyond the guarantee: nobody with less gives any.
  static int64_t ExcessOf(const Account& account, uint64_t charge) {
    return charge <= account.guaranteed_bytes ? 0 : static_cast<int64_t>(charge - account.guaranteed_bytes);
  }
  uint64_t ReclaimableAsWhole(const Account& account) const;  // bytes of areas
  void CountOthers(const Account& asker, int64_t excess, Room* room) const;

  const SlabAllocator& of_;
};

}  // namespace kvmanager
