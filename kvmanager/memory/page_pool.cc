#include "kvmanager/memory/page_pool.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

PagePool::PagePool(const SlabAllocator::Options& options, uint64_t slabs_per_region,
                   std::vector<std::unique_ptr<Region>> regions, const Clock* clock)
    : SlotPool(options),
      slabs_per_region_(slabs_per_region),
      regions_(std::move(regions)),
      shown_(&allocator_, slabs_per_region == 1 ? regions_ : absl::Span<const std::unique_ptr<Region>>(), clock) {}

uint64_t PagePool::SlabBytesFor(uint64_t pool_bytes) {
  const uint64_t usual = std::clamp<uint64_t>(pool_bytes / 64, kSlabBytesMin, 32 << 20) / kSlabBytesMin;
  const uint64_t least = (pool_bytes / kRegionsMax + kSlabBytesMin - 1) / kSlabBytesMin;
  return std::max(usual, least) * kSlabBytesMin;
}

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(const Options& options) {
  if (options.pool_bytes < kSlabBytesMin || options.pool_bytes > kPoolBytesMax) {
    return InvalidField("host-pool-bytes", options.pool_bytes, absl::StrCat(kSlabBytesMin, "..", kPoolBytesMax));
  }
  const uint64_t slab_bytes = options.slab_bytes == 0 ? SlabBytesFor(options.pool_bytes) : options.slab_bytes;
  if (slab_bytes % kSlabBytesMin != 0 || slab_bytes > options.pool_bytes) {
    return InvalidField("slab-bytes", slab_bytes,
                        absl::StrCat("a multiple of ", kSlabBytesMin, ", at most ", options.pool_bytes));
  }
  const uint64_t count = options.pool_bytes / slab_bytes;
  const uint64_t available = AvailableMemoryBytes(), huge_bytes = options.huge_pages ? FreeHugePageBytes() : 0;
  if (options.kept.empty() && available != 0 && count * slab_bytes > available + huge_bytes) {
    return FieldError(absl::StatusCode::kResourceExhausted, "host-pool-bytes", absl::StrCat(options.pool_bytes),
                      absl::StrCat("at most the host's available ", available + huge_bytes));
  }
  const uint64_t slabs_per_region = (count + kRegionsMax - 1) / kRegionsMax;
  std::vector<std::unique_ptr<Region>> regions((count + slabs_per_region - 1) / slabs_per_region);
  if (!options.kept.empty() && options.kept.size() != regions.size()) {
    for (const int fd : options.kept) close(fd);
    return FieldError(absl::StatusCode::kFailedPrecondition, "kept regions", absl::StrCat(options.kept.size()),
                      absl::StrCat(regions.size(), " for host-pool-bytes of ", options.pool_bytes));
  }
  // All are taken, also those behind an error.
  absl::Status taken;
  for (uint64_t i = 0; i < options.kept.size(); ++i) {
    auto region =
        Region::TakeOver(options.kept[i], std::min(slabs_per_region, count - i * slabs_per_region) * slab_bytes);
    if (!region.ok()) taken.Update(region.status());
    if (region.ok()) regions[i] = *std::move(region);
  }
  KV_RETURN_IF_ERROR(taken);
  for (uint64_t i = 0; options.kept.empty() && i < regions.size(); ++i) {
    Region::Options region;
    region.name = absl::StrCat("kvmanager-pool-", i);
    region.bytes = std::min(slabs_per_region, count - i * slabs_per_region) * slab_bytes;
    region.huge_pages = options.huge_pages;
    region.sharing = options.keep ? Region::Sharing::kKept : Region::Sharing::kReadOnly;
    KV_ASSIGN_OR_RETURN(regions[i], Region::Create(region));
  }
  SlabAllocator::Options allocator;
  allocator.slab_bytes = slab_bytes;
  allocator.slabs = static_cast<uint32_t>(count);
  allocator.small_slabs = count >= kSmallSlabsFrom;
  allocator.clean_slots = true;
  allocator.written = !options.kept.empty();
  allocator.limit = "host-pool-bytes";
  return std::unique_ptr<PagePool>(new PagePool(allocator, slabs_per_region, std::move(regions), options.clock));
}

absl::StatusOr<PageId> PagePool::Allocate(TenantId tenant, size_t bytes, std::vector<PageId>* unclean) {
  bool left = false;
  const auto clean = [&](const SlabAllocator::Place& slot) {
    left = unclean != nullptr;
    if (left) return absl::CancelledError("the caller does it");
    std::memset(SlabData(slot.slab).data() + slot.offset, 0, slot.bytes);
    return absl::OkStatus();
  };
  absl::StatusOr<PageId> id = allocator_.Allocate(tenant, bytes, clean);
  while (!id.ok() && shown_.TakeBackOne()) id = allocator_.Allocate(tenant, bytes, clean);
  if (left) unclean->push_back(*id);
  return id;
}

std::vector<PageId> PagePool::Restore(absl::Span<const SlabRestore::Slot> slots) {
  std::vector<PageId> restored = SlabRestore(&allocator_).Restore(slots);
  shown_.FindReaders();
  return restored;
}

uint8_t* PagePool::Data(PageId id) const {
  const SlabAllocator::Place place = allocator_.PlaceOf(id);
  return SlabData(place.slab).data() + place.offset;
}

std::string PagePool::huge_page_state() const {
  // The weakest of the regions': what an operator can rely on.
  auto weakest = Region::HugePages::kHugetlb;
  for (const auto& region : regions_) weakest = std::min(weakest, region->huge_pages());
  if (weakest == Region::HugePages::kHugetlb) return "hugetlb";
  return weakest == Region::HugePages::kTransparent ? "transparent" : "none";
}

}  // namespace kvmanager
