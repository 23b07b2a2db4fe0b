#include "kvmanager/memory/device_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/slab_bindings.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<DevicePool>> DevicePool::Create(std::unique_ptr<SlabMemory> memory) {
  SlabAllocator::Options options;
  options.slab_bytes = memory->slab_bytes();
  options.slabs = memory->slabs();
  options.limit = "device-pool-bytes";
  const uint64_t pool_bytes = options.slab_bytes * options.slabs;
  if (options.slabs == 0 || options.slab_bytes % SlabAllocator::kSlotBytesMin != 0 ||
      pool_bytes > SlabMemory::kBytesMax) {
    return InvalidField(options.limit, pool_bytes, absl::StrCat("at least one slab, at most ", SlabMemory::kBytesMax));
  }
  for (uint32_t slab = 0; slab < options.slabs; ++slab) {
    const absl::Status made = memory->Make(slab);
    if (absl::IsResourceExhausted(made)) {
      return WithDetail(
          absl::ResourceExhaustedError(absl::StrCat("device-pool-bytes is ", pool_bytes, ", but the GPU gave only ",
                                                    slab, " slabs of ", options.slab_bytes,
                                                    " bytes: ", made.message())),
          ErrorDetail{options.limit, absl::StrCat(pool_bytes), absl::StrCat("at most ", slab * options.slab_bytes)});
    }
    KV_RETURN_IF_ERROR(made);
  }
  return std::unique_ptr<DevicePool>(new DevicePool(std::move(memory), options));
}

absl::StatusOr<PageId> DevicePool::Allocate(TenantId tenant, size_t bytes, std::vector<PageId>*) {
  const auto zero = [this](const SlabAllocator::Place& area) { return memory_->Zero(area.slab); };
  absl::StatusOr<PageId> id = allocator_.Allocate(tenant, bytes, zero);
  if (id.ok() || lost_.empty()) return id;
  RemakeLost();
  return allocator_.Allocate(tenant, bytes, zero);
}

void DevicePool::Free(PageId id) {
  const uint32_t slab = SlabOf(id);
  allocator_.Free(id);
  RemakeIfForsaken(slab);
}

uint8_t* DevicePool::Data(PageId id) const {
  const SlabAllocator::Place place = allocator_.PlaceOf(id);
  return memory_->data() + place.slab * slab_bytes() + place.offset;
}

uint32_t DevicePool::SlotUnit(PageId id) const {
  const SlabAllocator::Place place = allocator_.PlaceOf(id);
  return static_cast<uint32_t>((place.slab * slab_bytes() + place.offset) / kSlotUnitBytes);
}

absl::StatusOr<int> DevicePool::Export(uint32_t slab) {
  KV_CHECK(slab < slabs() && allocator_.InUse(slab));
  KV_ASSIGN_OR_RETURN(const int fd, memory_->Export(slab));
  SlabBindings(&allocator_).Bind(slab);
  exports_[slab].exported = true;
  ++exports_[slab].importers;
  return fd;
}

void DevicePool::ImporterGone(uint32_t slab) {
  KV_CHECK(slab < slabs() && exports_[slab].importers > 0);
  --exports_[slab].importers;
  RemakeIfForsaken(slab);
  RemakeLost();
}

void DevicePool::RemakeIfForsaken(uint32_t slab) {
  if (!exports_[slab].exported || exports_[slab].importers > 0 || allocator_.InUse(slab)) return;
  SlabBindings(&allocator_).Withdraw(slab);
  memory_->Unmake(slab);
  exports_[slab].exported = false;
  ++exports_[slab].generation;
  if (memory_->Make(slab).ok()) {
    SlabBindings(&allocator_).Restore(slab);
  } else {
    lost_.push_back(slab);
  }
}

void DevicePool::RemakeLost() {
  while (!lost_.empty() && memory_->Make(lost_.back()).ok()) {
    SlabBindings(&allocator_).Restore(lost_.back());
    lost_.pop_back();
  }
}

void DevicePool::CheckInvariants() const {
  SlotPool::CheckInvariants();
  uint64_t kept = lost_.size();
  for (uint32_t slab = 0; slab < slabs(); ++slab) {
    KV_CHECK(exports_[slab].exported || exports_[slab].importers == 0);
    // Kept by importers, or it would have been made anew.
    const bool is_kept = exports_[slab].exported && !allocator_.InUse(slab);
    KV_CHECK(!is_kept || exports_[slab].importers > 0);
    kept += is_kept;
    KV_CHECK(std::count(lost_.begin(), lost_.end(), slab) <= (exports_[slab].exported ? 0 : 1));
  }
  KV_CHECK(kept == allocator_.kept_slabs());
}

}  // namespace kvmanager
