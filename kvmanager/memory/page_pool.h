// Fixed slots in slabs: the daemon's host memory for pages. Sized at start; allocates no page memory afterwards.
//
// A slab is one memfd, mapped, fallocated and sealed at start; its descriptor is closed then. While in use it belongs
// to one tenant and holds slots of one size; a slab whose last slot is freed becomes free for any tenant and size.
// Single-threaded (the store's thread), except Data(), whose pointers any thread may use while somebody keeps the slot
// from being freed.
//
// Invariants: 1. A slot is free or handed out, never both. 2. PageId generations of a slot only grow, so a stale id is
// recognised. 3. used_bytes() is the sum of handed-out slots' sizes. 4. A slab has a tenant and a slot size iff one of
// its slots is handed out. 5. Freed memory of one tenant is never readable by another: slots are zeroed before they
// change tenant. 6. No slab has more reclaimable slots than handed-out ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/region.h"

namespace kvmanager {

/// A tenant's number in this pool; the store hands them out.
using TenantId = uint32_t;

class PagePool {
 public:
  struct Options {
    uint64_t pool_bytes = 0;  // >= kSlabBytesMin; rounded down to whole slabs
    uint64_t slab_bytes = 0;  // 0: pool_bytes / 64 clamped to [2 MiB, 32 MiB]; a multiple of 2 MiB
    bool huge_pages = true;   // hugetlb memfd if it can be had, else madvise(MADV_HUGEPAGE), else small pages
  };
  static constexpr uint64_t kSlabBytesMin = 2 << 20;
  static constexpr size_t kSlotAlign = 64;
  static constexpr size_t kSlotBytesMin = 1024;
  static constexpr uint64_t kPoolBytesMax = uint64_t{1} << 41;  // slot numbers stay below 2^32

  /// Errors: INVALID_ARGUMENT; RESOURCE_EXHAUSTED when the host has not that much memory.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(const Options& options);

  /// A slot of at least `bytes` (1..slab_bytes), 64-byte aligned, of a slab of this tenant; contents unspecified but
  /// never another tenant's. Errors: RESOURCE_EXHAUSTED.
  absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes);
  struct SlotsWanted {
    size_t bytes = 0;  // as Allocate's
    uint64_t count = 0;
  };
  /// Would Allocate succeed for all of `wanted`, in any order? With `reclaim`: after every reclaimable slot was freed;
  /// then it looks at every slab.
  bool CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim = false) const;
  bool CanAllocate(TenantId tenant, size_t bytes, size_t count) const {
    const SlotsWanted wanted{bytes, count};
    return CanAllocate(tenant, {&wanted, 1});
  }
  void Free(PageId id);
  /// Marks a handed-out slot as one that its user would free if asked to, or as no such; the mark must change, and must
  /// be taken back before the slot is freed.
  void SetReclaimable(PageId id, bool reclaimable);
  /// Bytes that a slot for `bytes` takes.
  static size_t RoundedSlotBytes(size_t bytes);

  uint8_t* Data(PageId id) const;  // aborts on a stale id
  size_t SlotBytes(PageId id) const;
  bool IsCurrent(PageId id) const;  // false: freed, or never handed out

  uint64_t capacity_bytes() const;
  uint64_t used_bytes() const;         // handed-out slots
  uint64_t reclaimable_bytes() const;  // of them, those marked; looks at every slab
  uint64_t slab_bytes() const;
  uint64_t free_slabs() const;
  std::string huge_page_state() const;  // "hugetlb", "transparent" or "none"
  void CheckInvariants() const;

 private:
  struct Slab {
    std::unique_ptr<Region> region;
    bool in_use = false;
    bool written = false;              // by `tenant`, since it was last zeroed
    TenantId tenant = 0;               // of the last use, kept while free: another tenant's use zeroes first
    size_t slot_bytes = 0;             // while in use
    uint32_t generation_base = 0;      // of slots that a later use makes; above every generation handed out so far
    std::vector<uint32_t> generation;  // [slot] current one; odd while handed out
    std::vector<uint32_t> free_slots;  // a stack
    uint32_t reclaimable = 0;          // slots; which ones their user knows
    uint32_t used_slots() const { return static_cast<uint32_t>(generation.size() - free_slots.size()); }
  };
  /// Slabs of one tenant and slot size that have a free slot.
  struct Bucket {
    std::set<uint32_t> slabs;  // lowest first, so that higher ones drain
    uint64_t free_slots = 0;
  };
  using BucketKey = std::pair<TenantId, size_t>;

  PagePool() = default;
  uint32_t slots_per_slab_max() const { return static_cast<uint32_t>(slab_bytes_ / kSlotBytesMin); }
  /// In slabs of this tenant and slot size. With `reclaim`: after reclaiming, slabs that then are free not among them.
  uint64_t FreeSlots(TenantId tenant, size_t slot_bytes, bool reclaim) const;
  const Slab* Find(PageId id, uint32_t* index) const;  // nullptr: not current

  uint64_t slab_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_slabs_;  // a stack
  absl::flat_hash_map<BucketKey, Bucket> buckets_;
};

}  // namespace kvmanager
