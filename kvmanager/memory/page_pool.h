// Fixed slots in slabs: the daemon's host memory for pages. Sized at start; allocates no page memory afterwards.
//
// A slab is one memfd, mapped, fallocated and sealed at start; its descriptor is closed then. Which slots are whose is
// a SlabAllocator's (its invariants hold here); freed memory of one tenant is never readable by another: a slab is
// zeroed before it changes tenant. Single-threaded (the store's thread), except Data() and SlabData(), whose pointers
// any thread may use while somebody keeps the slot from being freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/memory/slab_allocator.h"

namespace kvmanager {

class PagePool {
 public:
  struct Options {
    uint64_t pool_bytes = 0;  // >= kSlabBytesMin; rounded down to whole slabs
    uint64_t slab_bytes = 0;  // 0: pool_bytes / 64 clamped to [2 MiB, 32 MiB]; a multiple of 2 MiB
    bool huge_pages = true;   // hugetlb memfd if it can be had, else madvise(MADV_HUGEPAGE), else small pages
  };
  using SlotsWanted = SlabAllocator::SlotsWanted;
  static constexpr uint64_t kSlabBytesMin = 2 << 20;
  static constexpr size_t kSlotAlign = SlabAllocator::kSlotAlign;
  static constexpr uint64_t kPoolBytesMax = uint64_t{1} << 41;  // slot numbers stay below 2^32

  /// Errors: INVALID_ARGUMENT; RESOURCE_EXHAUSTED when the host has not that much memory.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(const Options& options);

  /// A slot of at least `bytes` (1..slab_bytes), 64-byte aligned, of a slab of this tenant; contents unspecified but
  /// never another tenant's. Errors: RESOURCE_EXHAUSTED.
  absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes);
  /// Would Allocate succeed for all of `wanted`, in any order? With `reclaim`: after every reclaimable slot was freed;
  /// then it looks at every slab.
  bool CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim = false) const {
    return allocator_.CanAllocate(tenant, wanted, reclaim);
  }
  bool CanAllocate(TenantId tenant, size_t bytes, size_t count) const {
    const SlotsWanted wanted{bytes, count};
    return CanAllocate(tenant, {&wanted, 1});
  }
  void Free(PageId id) { allocator_.Free(id); }
  /// Marks a handed-out slot as one that its user would free if asked to, or as no such; the mark must change, and must
  /// be taken back before the slot is freed.
  void SetReclaimable(PageId id, bool reclaimable) { allocator_.SetReclaimable(id, reclaimable); }
  /// Bytes that a slot for `bytes` takes.
  static size_t RoundedSlotBytes(size_t bytes) { return SlabAllocator::RoundedSlotBytes(bytes); }

  uint8_t* Data(PageId id) const;  // aborts on a stale id
  size_t SlotBytes(PageId id) const { return allocator_.PlaceOf(id).bytes; }
  bool IsCurrent(PageId id) const { return allocator_.IsCurrent(id); }  // false: freed, or never handed out

  uint64_t capacity_bytes() const { return allocator_.capacity_bytes(); }
  uint64_t used_bytes() const { return allocator_.used_bytes(); }                // handed-out slots
  uint64_t reclaimable_bytes() const { return allocator_.reclaimable_bytes(); }  // of them, those marked
  uint64_t slab_bytes() const { return allocator_.slab_bytes(); }
  uint64_t free_slabs() const { return allocator_.free_slabs(); }
  uint32_t slabs() const { return allocator_.slabs(); }
  /// A slab's memory; those with lower numbers are used first.
  absl::Span<uint8_t> SlabData(uint32_t slab) const { return {regions_[slab]->data(), slab_bytes()}; }
  std::string huge_page_state() const;  // "hugetlb", "transparent" or "none"
  void CheckInvariants() const { allocator_.CheckInvariants(); }

 private:
  PagePool(const SlabAllocator::Options& options, std::vector<std::unique_ptr<Region>> regions);

  SlabAllocator allocator_;
  const std::vector<std::unique_ptr<Region>> regions_;  // [slab]
};

}  // namespace kvmanager
