#include "kvmanager/memory/slab_allocator.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {

SlabAllocator::SlabAllocator(const Options& options)
    : slab_bytes_(options.slab_bytes), limit_(options.limit), slabs_(options.slabs) {
  KV_CHECK(slab_bytes_ > 0 && slab_bytes_ % kSlotBytesMin == 0);
  KV_CHECK(capacity_bytes() / kSlotBytesMin < UINT32_MAX);
  for (uint32_t i = 0; i < options.slabs; ++i) free_slabs_.push_back(options.slabs - 1 - i);
}

size_t SlabAllocator::RoundedSlotBytes(size_t bytes) {
  return std::max(kSlotBytesMin, (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign);
}

absl::StatusOr<PageId> SlabAllocator::Allocate(TenantId tenant, size_t bytes, Clean clean) {
  if (bytes == 0 || bytes > slab_bytes_) {
    return FieldError(absl::StatusCode::kResourceExhausted, "page bytes", absl::StrCat(bytes),
                      absl::StrCat("1..", slab_bytes_));
  }
  const size_t slot_bytes = RoundedSlotBytes(bytes);
  auto found = buckets_.find(BucketKey(tenant, slot_bytes));
  if (found == buckets_.end()) {
    uint32_t index;
    if (const auto kept = kept_free_.find(tenant); kept != kept_free_.end()) {
      index = kept->second.back();
      TakeKept(index);
      --kept_slabs_;
    } else if (free_slabs_.empty()) {
      std::string value = absl::StrCat(used_bytes_, " used");
      if (kept_slabs_ > 0) absl::StrAppend(&value, " and ", kept_slabs_ * slab_bytes_, " in slabs that others may map");
      return FieldError(absl::StatusCode::kResourceExhausted, limit_, value,
                        absl::StrCat("at most ", capacity_bytes(), " in slabs of ", slab_bytes_));
    } else {
      index = free_slabs_.back();
      Slab& slab = slabs_[index];
      if (slab.written && slab.tenant != tenant) {
        KV_RETURN_IF_ERROR(clean(index));
        slab.written = false;
      }
      free_slabs_.pop_back();
    }
    Slab& slab = slabs_[index];
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

uint64_t SlabAllocator::FreeSlots(TenantId tenant, size_t slot_bytes, bool reclaim) const {
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

bool SlabAllocator::CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim) const {
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
  if (const auto kept = kept_free_.find(tenant); kept != kept_free_.end()) slabs += kept->second.size();
  if (slabs_wanted <= slabs || !reclaim) return slabs_wanted <= slabs;
  for (const Slab& slab : slabs_) {
    slabs += slab.in_use && slab.used_slots() == slab.reclaimable && (!slab.bound || slab.tenant == tenant);
  }
  return slabs_wanted <= slabs;
}

void SlabAllocator::SetReclaimable(PageId id, bool reclaimable) {
  uint32_t slot;
  KV_CHECK(Find(id, &slot) != nullptr);
  Slab& slab = slabs_[id.slot / slots_per_slab_max()];
  KV_CHECK(reclaimable ? slab.reclaimable < slab.used_slots() : slab.reclaimable > 0);
  slab.reclaimable += reclaimable ? 1 : -1;
}

uint64_t SlabAllocator::reclaimable_bytes() const {
  uint64_t bytes = 0;
  for (const Slab& slab : slabs_) bytes += slab.reclaimable * slab.slot_bytes;
  return bytes;
}

void SlabAllocator::Free(PageId id) {
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
  if (slab.bound) {
    kept_free_[slab.tenant].push_back(index);
    ++kept_slabs_;
  } else {
    free_slabs_.push_back(index);
  }
}

void SlabAllocator::Bind(uint32_t slab) {
  KV_CHECK(slab < slabs_.size() && !slabs_[slab].withdrawn && (slabs_[slab].in_use || slabs_[slab].bound));
  slabs_[slab].bound = true;
}

void SlabAllocator::TakeKept(uint32_t slab) {
  const auto kept = kept_free_.find(slabs_[slab].tenant);
  KV_CHECK(kept != kept_free_.end());
  const auto place = std::find(kept->second.begin(), kept->second.end(), slab);
  KV_CHECK(place != kept->second.end());
  kept->second.erase(place);
  if (kept->second.empty()) kept_free_.erase(kept);
}

void SlabAllocator::Withdraw(uint32_t slab) {
  KV_CHECK(slab < slabs_.size() && slabs_[slab].bound && !slabs_[slab].in_use && !slabs_[slab].withdrawn);
  TakeKept(slab);
  slabs_[slab].withdrawn = true;
}

void SlabAllocator::Restore(uint32_t slab) {
  KV_CHECK(slab < slabs_.size() && slabs_[slab].withdrawn);
  slabs_[slab].withdrawn = slabs_[slab].bound = slabs_[slab].written = false;
  --kept_slabs_;
  free_slabs_.push_back(slab);
}

const SlabAllocator::Slab* SlabAllocator::Find(PageId id, uint32_t* index) const {
  const uint32_t slab_index = id.slot / slots_per_slab_max();
  if (!id.valid() || slab_index >= slabs_.size()) return nullptr;
  const Slab& slab = slabs_[slab_index];
  *index = id.slot % slots_per_slab_max();
  if (*index >= slab.generation.size()) return nullptr;
  const uint32_t generation = slab.generation[*index];
  return generation == id.generation && generation % 2 == 1 ? &slab : nullptr;
}

SlabAllocator::Place SlabAllocator::PlaceOf(PageId id) const {
  uint32_t slot;
  const Slab* slab = Find(id, &slot);
  KV_CHECK(slab != nullptr);
  return Place{id.slot / slots_per_slab_max(), uint64_t{slot} * slab->slot_bytes, slab->slot_bytes};
}

bool SlabAllocator::IsCurrent(PageId id) const {
  uint32_t slot;
  return Find(id, &slot) != nullptr;
}

void SlabAllocator::CheckInvariants() const {
  uint64_t used_bytes = 0, kept_slabs = 0;
  absl::flat_hash_map<BucketKey, uint64_t> free_slots;
  std::vector<bool> listed_free(slabs_.size(), false), listed_kept(slabs_.size(), false);
  for (uint32_t index : free_slabs_) {
    KV_CHECK(index < slabs_.size() && !listed_free[index] && !slabs_[index].bound && !slabs_[index].withdrawn);
    listed_free[index] = true;
  }
  for (const auto& [tenant, kept] : kept_free_) {
    KV_CHECK(!kept.empty());
    for (uint32_t index : kept) {
      KV_CHECK(!listed_kept[index] && slabs_[index].bound && !slabs_[index].withdrawn);
      KV_CHECK(slabs_[index].tenant == tenant);
      listed_kept[index] = true;
    }
  }
  for (uint32_t index = 0; index < slabs_.size(); ++index) {
    const Slab& slab = slabs_[index];
    KV_CHECK(slab.in_use + listed_free[index] + listed_kept[index] + slab.withdrawn == 1);
    if (!slab.in_use) {
      KV_CHECK(slab.slot_bytes == 0 && slab.reclaimable == 0 && slab.generation.empty() && slab.free_slots.empty());
      kept_slabs += slab.bound;
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
  KV_CHECK(used_bytes == used_bytes_ && kept_slabs == kept_slabs_);
  KV_CHECK(free_slots.size() == buckets_.size());
  for (const auto& [key, bucket] : buckets_) KV_CHECK(free_slots[key] == bucket.free_slots);
}

}  // namespace kvmanager
