// Fixed slots in slabs, in one kind of memory: what the store needs of a pool, wherever its bytes are.
//
// Which slots are whose is a SlabAllocator's (its invariants hold here). Single-threaded (the store's thread), except
// Data(), whose addresses may be used while somebody keeps the slot from being freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/slab_allocator.h"
#include "kvmanager/memory/slab_forecast.h"

namespace kvmanager {

class ShownSlabs;

class SlotPool {
 public:
  using SlotsWanted = SlabAllocator::SlotsWanted;
  static constexpr size_t kSlotAlign = SlabAllocator::kSlotAlign;

  explicit SlotPool(const SlabAllocator::Options& options) : allocator_(options) {}
  virtual ~SlotPool() = default;
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  /// A slot of at least `bytes` (1..slab_bytes), 64-byte aligned, of a slab of this tenant; contents unspecified but
  /// never another tenant's. Errors: RESOURCE_EXHAUSTED.
  /// unclean: if given, the slot may also be as another tenant left it, and is then added here. Until the caller has
  /// zeroed it and says NoteCleaned it shows nobody what it did not write there; if it is freed before, it stays so.
  virtual absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes, std::vector<PageId>* unclean = nullptr) = 0;
  void NoteCleaned(PageId id) { allocator_.NoteCleaned(id); }
  virtual void Free(PageId id) = 0;
  /// Where the slot's bytes are, in this process; aborts on a stale id.
  virtual uint8_t* Data(PageId id) const = 0;

  /// Where a slot is in memory that other processes may map: its slab, and the offset from the slab's first byte.
  struct SlabPlace {
    uint32_t slab = 0;
    uint64_t offset = 0;
  };
  /// The slabs that other processes may map; nullptr: this memory is not shown.
  virtual ShownSlabs* shown() { return nullptr; }

  /// Would Allocate succeed for all of `wanted`, one behind the other in this order? With `reclaim`: after every
  /// reclaimable slot was freed that the tenant may take (SlabForecast says which).
  bool CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim = false) const {
    return SlabForecast(allocator_).CanAllocate(tenant, wanted, reclaim);
  }
  /// Whose reclaimable slots are freed next for `wanted`; SlabForecast's.
  std::optional<PayerId> NextToGive(TenantId tenant, absl::Span<const SlotsWanted> wanted,
                                    absl::FunctionRef<bool(PayerId)> has) const {
    return SlabForecast(allocator_).NextToGive(tenant, wanted, has);
  }
  /// Who pays for a tenant, before its first slot, and what payers may have; SlabAllocator's.
  void SetPayer(TenantId tenant, PayerId payer) { allocator_.SetPayer(tenant, payer); }
  void ForgetTenant(TenantId tenant) { allocator_.ForgetTenant(tenant); }
  PoolShares& shares() { return allocator_.shares(); }
  const PoolShares& shares() const { return allocator_.shares(); }
  /// Marks a handed-out slot as one that its user would free if asked to, or as no such; the mark must change, and must
  /// be taken back before the slot is freed.
  void SetReclaimable(PageId id, bool reclaimable) { allocator_.SetReclaimable(id, reclaimable); }

  /// Whether a slab, 0..slabs() - 1, has handed-out slots of this tenant.
  bool IsOf(uint32_t slab, TenantId tenant) const { return allocator_.IsOf(slab, tenant); }
  size_t SlotBytes(PageId id) const { return allocator_.PlaceOf(id).bytes; }
  bool IsCurrent(PageId id) const { return allocator_.IsCurrent(id); }  // false: freed, or never handed out

  /// The option that sizes it, as errors name it.
  const std::string& limit() const { return allocator_.limit(); }
  uint64_t capacity_bytes() const { return allocator_.capacity_bytes(); }
  uint64_t slot_bytes_used() const { return allocator_.used_bytes(); }  // handed-out slots
  /// What cannot be used for anything else: handed-out slots at least.
  virtual uint64_t used_bytes() const { return slot_bytes_used(); }
  uint64_t reclaimable_bytes() const { return allocator_.reclaimable_bytes(); }  // of slots, those marked
  uint64_t slab_bytes() const { return allocator_.slab_bytes(); }
  uint64_t free_slabs() const { return allocator_.free_slabs(); }
  /// Slots of a tenant for so many bytes that are free, in slabs that it has.
  uint64_t free_slots(TenantId tenant, size_t bytes) const { return allocator_.free_slots(tenant, bytes); }
  uint32_t slabs() const { return allocator_.slabs(); }
  virtual void CheckInvariants() const { allocator_.CheckInvariants(); }

 protected:
  SlabAllocator allocator_;
};

}  // namespace kvmanager
