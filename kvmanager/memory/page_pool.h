// Fixed slots in slabs: the daemon's host memory for pages. Sized at start; allocates no page memory afterwards.
//
// Slabs lie in memfds, mapped, fallocated and sealed at start, whose descriptors are kept: another process that gets
// one can read, not write, all pages in it, then and later, and cannot be made to stop. So fd() of a region is for
// processes that the daemon trusts with all of its pages. A process of one tenant gets a descriptor of a slab by
// ShownSlabs, where each slab has a memfd of its own: such a slab stays its tenant's, and counts as used, until the
// kernel says that nobody has it open or mapped any more.
//
// Which slots are whose is a SlabAllocator's (its invariants hold here), with small slabs where there are slabs enough;
// freed memory of one tenant is never readable by another through the daemon: of a slab that changes tenant each slot
// is zeroed when it is first handed out. Single-threaded (the store's thread), except Data(), SlabData() and regions(),
// whose pointers any thread may use while somebody keeps the slot from being freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/memory/shown_slabs.h"
#include "kvmanager/memory/slab_restore.h"
#include "kvmanager/memory/slot_pool.h"

namespace kvmanager {

class PagePool final : public SlotPool {
 public:
  struct Options {
    uint64_t pool_bytes = 0;  // >= kSlabBytesMin; rounded down to whole slabs
    /// A multiple of 2 MiB. 0: pool_bytes / 64 clamped to [2 MiB, 32 MiB], or more where that were over kRegionsMax.
    uint64_t slab_bytes = 0;
    bool huge_pages = true;  // hugetlb memfd if it can be had, else madvise(MADV_HUGEPAGE), else small pages
    bool keep = false;       // a later process may take the memory over: Region::Sharing::kKept
    /// Descriptors of an earlier pool's regions, in their order: this pool is of that memory. They are taken.
    std::vector<int> kept;
    const Clock* clock = nullptr;  // ShownSlabs'
  };
  static constexpr uint64_t kSlabBytesMin = 2 << 20;
  static constexpr uint64_t kPoolBytesMax = uint64_t{1} << 41;  // slot numbers stay below 2^32
  static constexpr uint32_t kSmallSlabsFrom = 16;               // slabs: of fewer, one that is cut is too much
  static constexpr uint64_t kRegionsMax = 1024;  // a descriptor and a mapping each, here and at whoever maps them

  /// Options::slab_bytes where it is 0.
  static uint64_t SlabBytesFor(uint64_t pool_bytes);

  /// Errors: INVALID_ARGUMENT; RESOURCE_EXHAUSTED when the host has not that much memory; with `kept`:
  /// FAILED_PRECONDITION when that is no pool of this size.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(const Options& options);

  absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes, std::vector<PageId>* unclean = nullptr) override;
  void Free(PageId id) override { allocator_.Free(id); }
  SlabAllocator::SlotPlace SlotPlaceOf(PageId id) const { return SlabRestore::PlaceOf(allocator_, id); }
  /// SlabRestore's, of a pool of kept memory. What processes still map of it stays as it is until they let go.
  std::vector<PageId> Restore(absl::Span<const SlabRestore::Slot> slots);
  uint8_t* Data(PageId id) const override;

  /// Those that processes of their tenant map. Allocate and Restore look after them too.
  ShownSlabs* shown() override { return &shown_; }

  /// A slab's memory; those with lower numbers are used first.
  absl::Span<uint8_t> SlabData(uint32_t slab) const {
    return {regions_[slab / slabs_per_region_]->data() + slab % slabs_per_region_ * slab_bytes(), slab_bytes()};
  }
  /// All of the memory; sealed against resizing, and nobody writes who receives a region's fd(). Fixed from start to
  /// end.
  absl::Span<const std::unique_ptr<Region>> regions() const { return regions_; }
  /// Handed-out slots; and whole slabs that hold none but may still be mapped.
  uint64_t used_bytes() const override {
    return slot_bytes_used() + (allocator_.kept_slabs() - shown_.cleaning()) * slab_bytes();
  }
  std::string huge_page_state() const;  // "hugetlb", "transparent" or "none"

 private:
  PagePool(const SlabAllocator::Options& options, uint64_t slabs_per_region,
           std::vector<std::unique_ptr<Region>> regions, const Clock* clock);

  const uint64_t slabs_per_region_;  // of all but the last, which may have fewer
  const std::vector<std::unique_ptr<Region>> regions_;
  ShownSlabs shown_;
};

}  // namespace kvmanager
