#include "kvmanager/memory/page_pool.h"

#include <algorithm>
#include <cstring>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(const Options& options) {
  if (options.pool_bytes < kSlabBytesMin || options.pool_bytes > kPoolBytesMax) {
    return InvalidField("host-pool-bytes", options.pool_bytes, absl::StrCat(kSlabBytesMin, "..", kPoolBytesMax));
  }
  uint64_t slab_bytes = options.slab_bytes;
  if (slab_bytes == 0) {
    slab_bytes = std::clamp<uint64_t>(options.pool_bytes / 64, kSlabBytesMin, 32 << 20) / kSlabBytesMin * kSlabBytesMin;
  }
  if (slab_bytes % kSlabBytesMin != 0 || slab_bytes > options.pool_bytes) {
    return InvalidField("slab-bytes", slab_bytes,
                        absl::StrCat("a multiple of ", kSlabBytesMin, ", at most ", options.pool_bytes));
  }
  const uint64_t count = options.pool_bytes / slab_bytes;
  const uint64_t available = AvailableMemoryBytes(), huge_bytes = options.huge_pages ? FreeHugePageBytes() : 0;
  if (available != 0 && count * slab_bytes > available + huge_bytes) {
    return FieldError(absl::StatusCode::kResourceExhausted, "host-pool-bytes", absl::StrCat(options.pool_bytes),
                      absl::StrCat("at most the host's available ", available + huge_bytes));
  }
  std::unique_ptr<PagePool> pool(new PagePool);
  pool->slab_bytes_ = slab_bytes;
  pool->slabs_.resize(count);
  for (uint64_t i = 0; i < count; ++i) {
    Region::Options region;
    region.name = absl::StrCat("kvmanager-slab-", i);
    region.bytes = slab_bytes;
    region.huge_pages = options.huge_pages;
    region.sharing = Region::Sharing::kReadOnly;
    region.keep_descriptor = false;
    KV_ASSIGN_OR_RETURN(pool->slabs_[i].region, Region::Create(region));
    pool->free_slabs_.push_back(static_cast<uint32_t>(count - 1 - i));
  }
  return pool;
}

size_t PagePool::RoundedSlotBytes(size_t bytes) {
  return std::max(kSlotBytesMin, (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign);
}

absl::StatusOr<PageId> PagePool::Allocate(TenantId tenant, size_t bytes) {
  if (bytes == 0 || bytes > slab_bytes_) {
    return FieldError(absl::StatusCode::kResourceExhausted, "page bytes", absl::StrCat(bytes),
                      absl::StrCat("1..", slab_bytes_));
  }
  const size_t slot_bytes = RoundedSlotBytes(bytes);
  auto found = buckets_.find(BucketKey(tenant, slot_bytes));
  if (found == buckets_.end()) {
    if (free_slabs_.empty()) {
      return FieldError(absl::StatusCode::kResourceExhausted, "host-pool-bytes", absl::StrCat(used_bytes_, " used"),
                        absl::StrCat("at most ", capacity_bytes(), " in slabs of ", slab_bytes_));
    }
    const uint32_t index = free_slabs_.back();
    free_slabs_.pop_back();
    Slab& slab = slabs_[index];
    if (slab.written && slab.tenant != tenant) {
      std::memset(slab.region->data(), 0, slab_bytes_);
      slab.written = false;
    }
    slab.in_use = true;
    slab.tenant = tenant;
    slab.slot_bytes = slot_bytes;
    const uint32_t slots = static_cast<uint32_t>(slab_bytes_ / slot_bytes);
    slab.generation.assign(slots, slab.generation_base);
    slab.free_slots.resize(slots);
    for (uint32_t i = 0; i < slots; ++i) slab.free_slots[i] = slots - 1 - i;
    found = buckets_.emplace(BucketKey(tenant, slot_bytes), Bucket()).first;
    found->second.slabs.insert(index);
    found->second.free_slots += slots;
  }
  Bucket& bucket = found->second;
  const uint32_t index = *bucket.slabs.begin();
  Slab& slab = slabs_[index];
  const uint32_t slot = slab.free_slots.back();
  slab.free_slots.pop_back();
  slab.written = true;
  const uint32_t generation = ++slab.generation[slot];
  used_bytes_ += slot_bytes;
  if (slab.free_slots.empty()) bucket.slabs.erase(index);
  if (--bucket.free_slots == 0) buckets_.erase(found);
  return PageId{index * slots_per_slab_max() + slot, generation};
}

uint64_t PagePool::FreeSlots(TenantId tenant, size_t slot_bytes, bool reclaim) const {
  if (!reclaim) {
    const auto found = buckets_.find(BucketKey(tenant, slot_bytes));
    return found == buckets_.end() ? 0 : found->second.free_slots;
  }
  uint64_t free_slots = 0;
  for (const Slab& slab : slabs_) {
    if (!slab.in_use || slab.tenant != tenant || slab.slot_bytes != slot_bytes) continue;
    if (slab.used_slots() > slab.reclaimable) free_slots += slab.free_slots.size() + slab.reclaimable;
  }
  return free_slots;
}

bool PagePool::CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim) const {
  uint64_t slabs_wanted = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].bytes == 0 || wanted[i].bytes > slab_bytes_) return false;
    const size_t slot_bytes = RoundedSlotBytes(wanted[i].bytes);
    uint64_t count = 0;
    bool counted = false;
    for (size_t j = 0; j < wanted.size(); ++j) {
      if (RoundedSlotBytes(wanted[j].bytes) != slot_bytes) continue;
      counted |= j < i;
      count += wanted[j].count;
    }
    if (counted || count == 0) continue;
    const uint64_t free_slots = FreeSlots(tenant, slot_bytes, reclaim);
    const uint64_t slots_per_slab = slab_bytes_ / slot_bytes;
    if (count > free_slots) slabs_wanted += (count - free_slots + slots_per_slab - 1) / slots_per_slab;
  }
  uint64_t slabs = free_slabs_.size();
  if (slabs_wanted <= slabs || !reclaim) return slabs_wanted <= slabs;
  for (const Slab& slab : slabs_) slabs += slab.in_use && slab.used_slots() == slab.reclaimable;
  return slabs_wanted <= slabs;
}

void PagePool::SetReclaimable(PageId id, bool reclaimable) {
  uint32_t slot;
  KV_CHECK(Find(id, &slot) != nullptr);
  Slab& slab = slabs_[id.slot / slots_per_slab_max()];
  KV_CHECK(reclaimable ? slab.reclaimable < slab.used_slots() : slab.reclaimable > 0);
  slab.reclaimable += reclaimable ? 1 : -1;
}

uint64_t PagePool::reclaimable_bytes() const {
  uint64_t bytes = 0;
  for (const Slab& slab : slabs_) bytes += slab.reclaimable * slab.slot_bytes;
  return bytes;
}

void PagePool::Free(PageId id) {
  uint32_t slot;
  KV_CHECK(Find(id, &slot) != nullptr);
  const uint32_t index = id.slot / slots_per_slab_max();
  Slab& slab = slabs_[index];
  ++slab.generation[slot];
  slab.free_slots.push_back(slot);
  used_bytes_ -= slab.slot_bytes;
  KV_CHECK(slab.reclaimable <= slab.used_slots());
  const BucketKey key(slab.tenant, slab.slot_bytes);
  Bucket& bucket = buckets_[key];
  bucket.slabs.insert(index);
  ++bucket.free_slots;
  if (slab.free_slots.size() < slab.generation.size()) return;
  bucket.slabs.erase(index);
  bucket.free_slots -= slab.free_slots.size();
  if (bucket.free_slots == 0) buckets_.erase(key);
  slab.generation_base = *std::max_element(slab.generation.begin(), slab.generation.end());
  slab.in_use = false;
  slab.slot_bytes = 0;
  slab.generation.clear();
  slab.free_slots.clear();
  free_slabs_.push_back(index);
}

const PagePool::Slab* PagePool::Find(PageId id, uint32_t* index) const {
  const uint32_t slab_index = id.slot / slots_per_slab_max();
  if (!id.valid() || slab_index >= slabs_.size()) return nullptr;
  const Slab& slab = slabs_[slab_index];
  *index = id.slot % slots_per_slab_max();
  if (*index >= slab.generation.size()) return nullptr;
  const uint32_t generation = slab.generation[*index];
  return generation == id.generation && generation % 2 == 1 ? &slab : nullptr;
}

uint8_t* PagePool::Data(PageId id) const {
  uint32_t slot;
  const Slab* slab = Find(id, &slot);
  KV_CHECK(slab != nullptr);
  return slab->region->data() + slot * slab->slot_bytes;
}

size_t PagePool::SlotBytes(PageId id) const {
  uint32_t slot;
  const Slab* slab = Find(id, &slot);
  KV_CHECK(slab != nullptr);
  return slab->slot_bytes;
}

bool PagePool::IsCurrent(PageId id) const {
  uint32_t slot;
  return Find(id, &slot) != nullptr;
}

uint64_t PagePool::capacity_bytes() const { return slabs_.size() * slab_bytes_; }
uint64_t PagePool::used_bytes() const { return used_bytes_; }
uint64_t PagePool::slab_bytes() const { return slab_bytes_; }
uint64_t PagePool::free_slabs() const { return free_slabs_.size(); }

std::string PagePool::huge_page_state() const {
  // The weakest of the slabs': what an operator can rely on.
  auto weakest = Region::HugePages::kHugetlb;
  for (const Slab& slab : slabs_) weakest = std::min(weakest, slab.region->huge_pages());
  if (weakest == Region::HugePages::kHugetlb) return "hugetlb";
  return weakest == Region::HugePages::kTransparent ? "transparent" : "none";
}

void PagePool::CheckInvariants() const {
  uint64_t used_bytes = 0;
  absl::flat_hash_map<BucketKey, uint64_t> free_slots;
  std::vector<bool> listed_free(slabs_.size(), false);
  for (uint32_t index : free_slabs_) {
    KV_CHECK(index < slabs_.size() && !listed_free[index]);
    listed_free[index] = true;
  }
  for (uint32_t index = 0; index < slabs_.size(); ++index) {
    const Slab& slab = slabs_[index];
    KV_CHECK(slab.in_use != listed_free[index]);
    if (!slab.in_use) {
      KV_CHECK(slab.slot_bytes == 0 && slab.reclaimable == 0 && slab.generation.empty() && slab.free_slots.empty());
      continue;
    }
    std::vector<bool> is_free(slab.generation.size(), false);
    for (uint32_t slot : slab.free_slots) {
      KV_CHECK(slot < is_free.size() && !is_free[slot]);
      is_free[slot] = true;
    }
    uint64_t handed_out = 0;
    for (uint32_t slot = 0; slot < is_free.size(); ++slot) {
      KV_CHECK((slab.generation[slot] % 2 == 1) == !is_free[slot]);
      handed_out += !is_free[slot];
    }
    KV_CHECK(handed_out > 0 && slab.reclaimable <= handed_out);
    used_bytes += handed_out * slab.slot_bytes;
    const BucketKey key(slab.tenant, slab.slot_bytes);
    if (slab.free_slots.empty()) continue;
    free_slots[key] += slab.free_slots.size();
    const auto bucket = buckets_.find(key);
    KV_CHECK(bucket != buckets_.end() && bucket->second.slabs.count(index) == 1);
  }
  KV_CHECK(used_bytes == used_bytes_);
  KV_CHECK(free_slots.size() == buckets_.size());
  for (const auto& [key, bucket] : buckets_) KV_CHECK(free_slots[key] == bucket.free_slots);
}

}  // namespace kvmanager
