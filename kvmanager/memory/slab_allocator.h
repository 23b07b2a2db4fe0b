// Which slots of which slabs are whose: the bookkeeping that a pool of host memory and one of device memory share.
//
// Knows no addresses: a pool owns the memory and one of these. While in use a slab belongs to one tenant and holds
// slots of one size; a slab whose last slot is freed becomes free for any tenant and size, unless it is bound: then for
// its tenant alone. Single-threaded.
//
// Invariants: 1. A slot is free or handed out, never both. 2. PageId generations of a slot only grow, so a stale id is
// recognised. 3. used_bytes() is the sum of handed-out slots' sizes. 4. A slab has a slot size iff one of its slots is
// handed out. 5. Before a slab that one tenant wrote goes to another it was cleaned. 6. No slab has more reclaimable
// slots than handed-out ones. 7. A bound slab never changes tenant; a withdrawn one is bound, free and nobody's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"

namespace kvmanager {

/// A tenant's number in a pool; the store hands them out.
using TenantId = uint32_t;

class SlabAllocator {
 public:
  static constexpr size_t kSlotAlign = 64;
  static constexpr size_t kSlotBytesMin = 1024;

  struct Options {
    uint64_t slab_bytes = 0;  // a multiple of kSlotBytesMin
    uint32_t slabs = 0;       // slabs * slab_bytes / kSlotBytesMin < 2^32
    std::string limit;        // the field that errors name
  };
  explicit SlabAllocator(const Options& options);

  /// Called before a slab that another tenant wrote is used: makes its bytes nobody's. On an error the slab stays free.
  using Clean = absl::FunctionRef<absl::Status(uint32_t slab)>;
  /// A slot of at least `bytes` (1..slab_bytes) of a slab of this tenant. Errors: RESOURCE_EXHAUSTED; clean's.
  absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes, Clean clean);
  struct SlotsWanted {
    size_t bytes = 0;  // as Allocate's
    uint64_t count = 0;
  };
  /// Would Allocate succeed for all of `wanted`, in any order? With `reclaim`: after every reclaimable slot was freed;
  /// then it looks at every slab.
  bool CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim) const;
  void Free(PageId id);
  /// Marks a handed-out slot as one that its user would free if asked to, or as no such; the mark must change, and must
  /// be taken back before the slot is freed.
  void SetReclaimable(PageId id, bool reclaimable);
  /// Bytes that a slot for `bytes` takes.
  static size_t RoundedSlotBytes(size_t bytes);

  struct Place {
    uint32_t slab = 0;
    uint64_t offset = 0;  // from the slab's first byte
    size_t bytes = 0;
  };
  Place PlaceOf(PageId id) const;   // aborts on a stale id
  bool IsCurrent(PageId id) const;  // false: freed, or never handed out
  bool InUse(uint32_t slab) const { return slabs_[slab].in_use; }
  /// Whose slots a slab holds.
  bool IsOf(uint32_t slab, TenantId tenant) const { return slabs_[slab].in_use && slabs_[slab].tenant == tenant; }

  /// Binds a slab that is in use, or bound already, to its tenant.
  void Bind(uint32_t slab);
  /// Takes a bound slab that is free away from its tenant; nobody can use it.
  void Withdraw(uint32_t slab);
  /// Gives a withdrawn slab, whose bytes are nobody's now, to whoever asks.
  void Restore(uint32_t slab);

  const std::string& limit() const { return limit_; }  // the field that errors name
  uint64_t capacity_bytes() const { return slabs_.size() * slab_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }  // handed-out slots
  uint64_t reclaimable_bytes() const;                  // of them, those marked; looks at every slab
  uint64_t slab_bytes() const { return slab_bytes_; }
  uint32_t slabs() const { return static_cast<uint32_t>(slabs_.size()); }
  uint64_t free_slabs() const { return free_slabs_.size(); }  // for any tenant
  uint64_t kept_slabs() const { return kept_slabs_; }         // without a handed-out slot, but bound or withdrawn
  void CheckInvariants() const;

 private:
  struct Slab {
    bool in_use = false;
    bool written = false;  // by `tenant`, since it was last cleaned
    bool bound = false;    // to `tenant`
    bool withdrawn = false;
    TenantId tenant = 0;               // of the last use, kept while free: another tenant's use cleans first
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

  uint32_t slots_per_slab_max() const { return static_cast<uint32_t>(slab_bytes_ / kSlotBytesMin); }
  /// In slabs of this tenant and slot size. With `reclaim`: after reclaiming, slabs that then are free not among them.
  uint64_t FreeSlots(TenantId tenant, size_t slot_bytes, bool reclaim) const;
  const Slab* Find(PageId id, uint32_t* index) const;  // nullptr: not current
  void TakeKept(uint32_t slab);                        // from its tenant's list

  const uint64_t slab_bytes_;
  const std::string limit_;
  uint64_t used_bytes_ = 0;
  uint64_t kept_slabs_ = 0;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_slabs_;                                // a stack
  absl::flat_hash_map<TenantId, std::vector<uint32_t>> kept_free_;  // bound, not withdrawn; stacks, none empty
  absl::flat_hash_map<BucketKey, Bucket> buckets_;
};

}  // namespace kvmanager
