// Fixed slots in slabs of device memory that other processes can map: PagePool's counterpart on the GPU.
//
// All slabs are made at start. Which slots are whose is a SlabAllocator's (its invariants hold here). A slab that was
// never exported is zeroed before it changes tenant, and the call waits for that (about 0.1 ms per 256 MiB). An export
// cannot be revoked, so an exported slab never changes tenant: it stays its tenant's, and counts as used, until nothing
// lies in it and its importers are gone, which the caller reports; then its memory is let go and made anew.
//
// Whether work on the GPU still touches a slot is not known here: a slot that plans may name is freed when
// ReleaseEpochs returns it. Single-threaded (the store's thread), except Data(), whose addresses any stream may use
// while somebody keeps the slot from being freed.
//
// Invariants, beside SlabAllocator's: 1. A slab is bound to its tenant iff it was exported since its memory was made.
// 2. A slab has memory unless it is lost: unmade, and could not be made again. 3. A lost slab is withdrawn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/memory/slab_memory.h"
#include "kvmanager/memory/slot_pool.h"

namespace kvmanager {

class DevicePool final : public SlotPool {
 public:
  static constexpr uint64_t kSlotUnitBytes = SlabMemory::kSlotUnitBytes;
  static_assert(SlabAllocator::kSlotAlign % kSlotUnitBytes == 0);

  /// Makes all slabs of `memory`, none of which is made yet. Errors: RESOURCE_EXHAUSTED naming device-pool-bytes;
  /// INVALID_ARGUMENT when slots could not be named by 32 bits.
  static absl::StatusOr<std::unique_ptr<DevicePool>> Create(std::unique_ptr<SlabMemory> memory);

  absl::StatusOr<PageId> Allocate(TenantId tenant, size_t bytes, std::vector<PageId>* unclean = nullptr) override;
  void Free(PageId id) override;
  uint8_t* Data(PageId id) const override;  // on the device
  /// A slot's name in plans, the same for every process that maps the pool: its distance from data() in kSlotUnitBytes.
  uint32_t SlotUnit(PageId id) const;
  uint32_t SlabOf(PageId id) const { return allocator_.PlaceOf(id).slab; }

  /// A descriptor of a slab that is in use, for one importer of its tenant. The caller closes it once it is sent, and
  /// reports ImporterGone() when that importer's process cannot map or use it any more. Errors: UNAVAILABLE.
  absl::StatusOr<int> Export(uint32_t slab);
  void ImporterGone(uint32_t slab);
  uint32_t importers(uint32_t slab) const { return exports_[slab].importers; }
  /// How often the slab's memory was made anew.
  uint32_t generation(uint32_t slab) const { return exports_[slab].generation; }

  /// Tries again to make lost slabs; Allocate and ImporterGone do so too.
  void RemakeLost();

  uint8_t* data() const { return memory_->data(); }
  /// Handed-out slots; and whole slabs that hold none but may still be mapped by importers, or are lost.
  uint64_t used_bytes() const override { return slot_bytes_used() + kept_bytes(); }
  uint64_t kept_bytes() const { return allocator_.kept_slabs() * slab_bytes(); }
  uint64_t lost_slabs() const { return lost_.size(); }
  void CheckInvariants() const override;

 private:
  struct Exports {
    bool exported = false;  // since its memory was made
    uint32_t importers = 0;
    uint32_t generation = 0;
  };

  DevicePool(std::unique_ptr<SlabMemory> memory, const SlabAllocator::Options& options)
      : SlotPool(options), memory_(std::move(memory)), exports_(options.slabs) {}
  void RemakeIfForsaken(uint32_t slab);

  const std::unique_ptr<SlabMemory> memory_;
  std::vector<Exports> exports_;  // [slab]
  std::vector<uint32_t> lost_;
};

}  // namespace kvmanager
