// Which slots of which slabs are whose: the bookkeeping that a pool of host memory and one of device memory share.
//
// Knows no addresses: a pool owns the memory and one of these. Tenants have areas: slabs, and, where Options says so,
// small slabs, into which a slab is cut, all of one size. While in use an area belongs to one tenant and holds slots of
// one size; an area whose last slot is freed becomes free for any tenant and size, unless its slab is bound
// (slab_bindings.h): then for its tenant alone. The first slots of a size come from small slabs, so that a tenant of
// few slots holds little; who has filled some gets larger ones, and at last slabs. Where the size that comes next
// cannot be had, another is taken.
//
// Tenants have payers (pool_shares.h), who are charged for whole areas. Single-threaded.
//
// Invariants: 1. A slot is free or handed out, never both. 2. PageId generations of a slot only grow, so a stale id is
// recognised. 3. used_bytes() is the sum of handed-out slots' sizes. 4. An area has a slot size iff one of its slots is
// handed out. 5. Before an area that one tenant wrote goes to another it was cleaned, or its slots are unclean until
// they were. 6. No area has more reclaimable slots than handed-out ones. 7. A bound slab never
// changes tenant, and is never cut; a withdrawn one is bound, free and nobody's. 8. A slab is cut iff one of its small
// slabs is in use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/pool_shares.h"

namespace kvmanager {

/// A tenant's number in a pool; the store hands them out.
using TenantId = uint32_t;

class SlabAllocator {
 public:
  static constexpr size_t kSlotAlign = 64;
  static constexpr size_t kSlotBytesMin = 1024;
  static constexpr size_t kSizes = PoolShares::kSizes;
  static constexpr std::array<uint32_t, kSizes> kAreasPerSlab = {1, 16, 256};
  static constexpr uint64_t kSmallUntil = 8;  // a tenant's small slabs of a size, for slots of a size

  struct Options {
    uint64_t slab_bytes = 0;   // a multiple of kSlotBytesMin
    uint32_t slabs = 0;        // slabs * slab_bytes / kSlotBytesMin < 2^32
    bool small_slabs = false;  // of sizes that are multiples of kSlotBytesMin
    bool clean_slots = false;  // not areas
    bool written = false;      // an earlier allocator's tenants wrote the memory
    std::string limit;         // the field that errors name
  };
  explicit SlabAllocator(const Options& options);

  struct Place {
    uint32_t slab = 0;
    uint64_t offset = 0;  // from the slab's first byte
    size_t bytes = 0;
  };
  /// Called before an area that another tenant wrote is used: makes its bytes nobody's. On an error it stays free.
  /// With Options::clean_slots it is called for each slot of such an area, when that is handed out. On an error the
  /// slot is handed out even so, unclean: it may hold another tenant's bytes until its user says NoteCleaned; if it is
  /// freed before, it stays so.
  using Clean = absl::FunctionRef<absl::Status(const Place& area)>;
  /// A slot of at least `bytes` (1..slab_bytes) of an area of this tenant. Errors: RESOURCE_EXHAUSTED; clean's.
  absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes, Clean clean);
  void NoteCleaned(PageId id);
  struct SlotsWanted {
    size_t bytes = 0;  // as Allocate's
    uint64_t count = 0;
  };
  void Free(PageId id);
  /// Marks a handed-out slot as one that its user would free if asked to, or as no such; the mark must change, and must
  /// be taken back before the slot is freed.
  void SetReclaimable(PageId id, bool reclaimable);
  /// Bytes that a slot for `bytes` takes.
  static size_t RoundedSlotBytes(size_t bytes);

  Place PlaceOf(PageId id) const;  // aborts on a stale id
  /// Where a slot is, for a later allocator of the same memory (SlabRestore).
  struct SlotPlace {
    uint32_t number = 0;  // as PageId::slot
    uint32_t size = 0;    // of its area: index of kAreasPerSlab
    uint64_t slot_bytes = 0;
    friend bool operator==(const SlotPlace&, const SlotPlace&) = default;
  };
  bool IsCurrent(PageId id) const;  // false: freed, or never handed out
  bool InUse(uint32_t slab) const { return slabs_[slab].area.in_use || slabs_[slab].cut != nullptr; }
  /// Whose slots a slab that is not cut holds.
  bool IsOf(uint32_t slab, TenantId tenant) const {
    return slabs_[slab].area.in_use && slabs_[slab].area.tenant == tenant;
  }

  /// Who pays for a tenant, before its first slot. A tenant of whom nothing was said pays for itself: its number is its
  /// payer's.
  void SetPayer(TenantId tenant, PayerId payer) { payers_[tenant] = payer; }
  void ForgetTenant(TenantId tenant) {
    payers_.erase(tenant);
    if (const auto bound = bound_reclaimable_.find(tenant); bound != bound_reclaimable_.end() && bound->second == 0) {
      bound_reclaimable_.erase(bound);
    }
  }
  PoolShares& shares() { return shares_; }
  const PoolShares& shares() const { return shares_; }

  const std::string& limit() const { return limit_; }  // the field that errors name
  uint64_t capacity_bytes() const { return slabs_.size() * slab_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }  // handed-out slots
  uint64_t reclaimable_bytes() const;                  // of them, those marked; looks at every slab
  uint64_t slab_bytes() const { return slab_bytes_; }
  uint32_t slabs() const { return static_cast<uint32_t>(slabs_.size()); }
  uint64_t free_slabs() const { return free_slabs_.size(); }  // for any tenant
  /// Slots for so many bytes that are free in a tenant's areas.
  uint64_t free_slots(TenantId tenant, size_t bytes) const {
    const auto bucket = buckets_.find(BucketKey(tenant, RoundedSlotBytes(bytes)));
    return bucket == buckets_.end() ? 0 : bucket->second.free_slots;
  }
  uint64_t kept_slabs() const { return kept_slabs_; }  // without a handed-out slot, but bound or withdrawn
  void CheckInvariants() const;

 private:
  friend class SlabBindings;
  friend class SlabForecast;
  friend class SlabRestore;
  using Account = PoolShares::Account;
  static constexpr TenantId kSeveral = UINT32_MAX;  // tenants wrote it
  static constexpr size_t kFreeSlotsKept = 64;      // of an area: a stack of these is not cut

  /// Areas of one tenant and slot size.
  struct Bucket {
    std::set<uint32_t> with_free;  // areas with a free slot: lowest first, so that higher ones drain
    uint64_t free_slots = 0;
    uint64_t held_bytes = 0;  // of areas
    // Of areas that are not reclaimable as a whole: slots that are free or reclaimable, and their bytes.
    uint64_t lasting_slots = 0, lasting_bytes = 0;
  };
  using BucketKey = std::pair<TenantId, size_t>;
  using Buckets = absl::node_hash_map<BucketKey, Bucket>;

  /// A slab or a small slab. Its number is that of its first slot.
  struct Area {
    bool in_use = false;
    bool written = false;              // by `tenant`, since it was last cleaned
    TenantId tenant = 0;               // of the last use, kept while free: another tenant's use cleans first
    size_t slot_bytes = 0;             // while in use
    uint32_t generation_base = 0;      // of slots that a later use makes; above every generation handed out so far
    std::vector<uint32_t> generation;  // [slot] current one; odd while handed out
    std::vector<uint32_t> free_slots;  // a stack
    std::vector<bool> unclean;         // [slot] others' bytes may be in it; empty: in none
    uint32_t reclaimable = 0;          // slots; which ones their user knows
    Bucket* bucket = nullptr;          // while in use
    Account* account = nullptr;        // while in use or bound
    uint32_t used_slots() const { return static_cast<uint32_t>(generation.size() - free_slots.size()); }
    bool all_reclaimable() const { return used_slots() == reclaimable; }
  };
  struct Cut {
    size_t size = 0;  // of its areas: index of kAreasPerSlab
    std::vector<Area> areas;
    std::vector<uint32_t> free;  // a stack
    uint32_t lasting = 0;        // areas in use that are not reclaimable as a whole
  };
  struct Slab {
    Area area;  // the whole, while not cut
    bool bound = false;
    bool withdrawn = false;
    bool withheld = false;
    std::unique_ptr<Cut> cut;
  };
  /// Where a slot is.
  struct Spot {
    uint32_t slab = 0;
    uint32_t area = 0;  // of a slab that is cut
    uint32_t slot = 0;  // of the area
  };
  /// What may be taken.
  struct Room {
    uint64_t kept = 0;                     // slabs, of this tenant alone and paid for
    uint64_t slabs = 0;                    // free
    std::array<uint64_t, kSizes> small{};  // free ones of slabs that are cut, by size; [0] is not used
    uint64_t bytes = UINT64_MAX;           // of areas, until the payer has its most
  };

  uint32_t slots_per_area(size_t size) const {
    return static_cast<uint32_t>(slab_bytes_ / kSlotBytesMin / kAreasPerSlab[size]);
  }
  uint64_t area_bytes(size_t size) const { return slab_bytes_ / kAreasPerSlab[size]; }
  PayerId PayerOf(TenantId tenant) const {
    const auto found = payers_.find(tenant);
    return found == payers_.end() ? tenant : found->second;
  }
  const Account& AccountOf(TenantId tenant) const;

  // Which area comes next.
  size_t Preferred(const Account& account, size_t slot_bytes, uint64_t held_bytes) const;
  std::optional<size_t> Choose(const Account& account, size_t slot_bytes, uint64_t held_bytes, const Room& room) const;
  Room RoomNow(TenantId tenant, const Account& account) const;

  // Areas.
  bool Find(PageId id, Spot* spot) const;  // false: not current
  Area& AreaAt(const Spot& spot) {
    Slab& slab = slabs_[spot.slab];
    return slab.cut == nullptr ? slab.area : slab.cut->areas[spot.area];
  }
  const Area& AreaAt(const Spot& spot) const { return const_cast<SlabAllocator*>(this)->AreaAt(spot); }
  size_t SizeAt(const Spot& spot) const { return slabs_[spot.slab].cut == nullptr ? 0 : slabs_[spot.slab].cut->size; }
  Spot SpotOf(uint32_t number) const;
  uint32_t NumberOf(const Spot& spot) const;
  Place PlaceOfArea(const Spot& spot) const;
  /// Adds what an area counts for in sums, or takes it away.
  void Count(const Spot& spot, bool add);
  absl::Status TakeArea(TenantId tenant, size_t slot_bytes, Clean clean);
  /// All of its slots are free, and count for nothing yet.
  void OpenArea(const Spot& spot, TenantId tenant, size_t slot_bytes, Account* account, bool unclean);
  void CutSlab(uint32_t slab, size_t size);
  void GiveBack(const Spot& spot);
  void Join(uint32_t slab);      // its small slabs are all free
  void TakeKept(uint32_t slab);  // from its tenant's list

  const uint64_t slab_bytes_;
  const bool clean_slots_;
  const std::string limit_;
  size_t sizes_ = 1;  // of areas in use here
  uint64_t used_bytes_ = 0;
  uint64_t kept_slabs_ = 0;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> free_slabs_;  // a stack
  std::set<uint32_t> cut_slabs_;
  std::array<std::set<uint32_t>, kSizes> cut_free_;                 // slabs that are cut, with a free small slab
  std::array<uint64_t, kSizes> free_small_{};                       // small slabs, by size
  absl::flat_hash_map<TenantId, std::vector<uint32_t>> kept_free_;  // bound, not withdrawn; stacks, none empty
  absl::flat_hash_map<TenantId, uint32_t> bound_reclaimable_;       // bound slabs that are reclaimable as a whole
  Buckets buckets_;
  absl::flat_hash_map<TenantId, PayerId> payers_;
  PoolShares shares_;
};

}  // namespace kvmanager
