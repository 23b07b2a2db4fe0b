#include "kvmanager/memory/slab_allocator.h"

#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

SlabAllocator::SlabAllocator(const Options& options)
    : slab_bytes_(options.slab_bytes),
      clean_slots_(options.clean_slots),
      limit_(options.limit),
      slabs_(options.slabs),
      shares_(options.slab_bytes) {
  KV_CHECK(slab_bytes_ > 0 && slab_bytes_ % kSlotBytesMin == 0);
  KV_CHECK(capacity_bytes() / kSlotBytesMin < UINT32_MAX);
  while (options.small_slabs && sizes_ < kSizes && slab_bytes_ % (kAreasPerSlab[sizes_] * kSlotBytesMin) == 0) ++sizes_;
  for (uint32_t i = 0; i < options.slabs; ++i) free_slabs_.push_back(options.slabs - 1 - i);
  for (Slab& slab : slabs_) {
    slab.area.written = options.written;
    if (options.written) slab.area.tenant = kSeveral;
  }
}

size_t SlabAllocator::RoundedSlotBytes(size_t bytes) {
  return std::max(kSlotBytesMin, (bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign);
}

const SlabAllocator::Account& SlabAllocator::AccountOf(TenantId tenant) const {
  static const Account kNew;
  const Account* const account = shares_.Find(PayerOf(tenant));
  return account == nullptr ? kNew : *account;
}

size_t SlabAllocator::Preferred(const Account& account, size_t slot_bytes, uint64_t held_bytes) const {
  // Guarantees are of whole slabs, and are kept in such.
  if (account.guaranteed_bytes > 0) return 0;
  for (size_t size = sizes_ - 1; size > 0; --size) {
    if (slot_bytes <= area_bytes(size) && held_bytes < kSmallUntil * area_bytes(size)) return size;
  }
  return 0;
}

std::optional<size_t> SlabAllocator::Choose(const Account& account, size_t slot_bytes, uint64_t held_bytes,
                                            const Room& room) const {
  const auto can = [&](size_t size) {
    return slot_bytes <= area_bytes(size) && area_bytes(size) <= room.bytes && (room.slabs > 0 || room.small[size] > 0);
  };
  const size_t preferred = Preferred(account, slot_bytes, held_bytes);
  if (can(preferred)) return preferred;
  if (account.guaranteed_bytes > 0) return std::nullopt;
  for (size_t size = 0; size < sizes_; ++size) {
    if (can(size)) return size;
  }
  return std::nullopt;
}

SlabAllocator::Room SlabAllocator::RoomNow(TenantId tenant, const Account& account) const {
  Room room;
  if (const auto kept = kept_free_.find(tenant); kept != kept_free_.end()) room.kept = kept->second.size();
  room.slabs = shares_.UsableSlabs(free_slabs_.size(), account, account.charge);
  room.small = free_small_;
  room.bytes = account.most_bytes > account.charge ? account.most_bytes - account.charge : 0;
  return room;
}

void SlabAllocator::Count(const Spot& spot, bool add) {
  const Area& area = AreaAt(spot);
  Slab& slab = slabs_[spot.slab];
  const uint64_t slots = area.free_slots.size();
  Bucket& bucket = *area.bucket;
  const auto count = [add](auto& sum, uint64_t value) {
    sum = add ? static_cast<std::decay_t<decltype(sum)>>(sum + value)
              : static_cast<std::decay_t<decltype(sum)>>(sum - value);
  };
  count(bucket.free_slots, slots);
  if (area.all_reclaimable()) {
    count(slab.bound ? bound_reclaimable_[area.tenant] : area.account->reclaimable[SizeAt(spot)], 1);
  } else {
    count(bucket.lasting_slots, slots + area.reclaimable);
    count(bucket.lasting_bytes, area_bytes(SizeAt(spot)));
    if (slab.cut != nullptr) count(slab.cut->lasting, 1);
  }
}

absl::Status SlabAllocator::TakeArea(TenantId tenant, size_t slot_bytes, Clean clean) {
  Spot spot;
  bool unclean = false;
  Account* const account = shares_.Of(PayerOf(tenant));
  const BucketKey key(tenant, slot_bytes);
  if (const auto kept = kept_free_.find(tenant); kept != kept_free_.end()) {
    spot.slab = kept->second.back();
    TakeKept(spot.slab);
    --kept_slabs_;
  } else {
    const auto bucket = buckets_.find(key);
    const Room room = RoomNow(tenant, *account);
    const std::optional<size_t> size =
        Choose(*account, slot_bytes, bucket == buckets_.end() ? 0 : bucket->second.held_bytes, room);
    if (!size.has_value()) {
      if (account->charge + slot_bytes > account->most_bytes || (room.bytes < slab_bytes_ && room.slabs > 0)) {
        return FieldError(absl::StatusCode::kResourceExhausted, limit_,
                          absl::StrCat(account->charge, " in slabs of this tenant"),
                          absl::StrCat("at most ", account->most_bytes, ", its share"));
      }
      std::string value = absl::StrCat(used_bytes_, " used");
      if (kept_slabs_ > 0) absl::StrAppend(&value, " and ", kept_slabs_ * slab_bytes_, " in slabs that others may map");
      return FieldError(absl::StatusCode::kResourceExhausted, limit_, value,
                        absl::StrCat("at most ", capacity_bytes(), " in slabs of ", slab_bytes_));
    }
    const auto clean_area = [&](Area& area) -> absl::Status {
      if (!area.written || area.tenant == tenant) return absl::OkStatus();
      unclean = clean_slots_;
      if (unclean) return absl::OkStatus();
      KV_RETURN_IF_ERROR(clean(PlaceOfArea(spot)));
      area.written = false;
      return absl::OkStatus();
    };
    if (*size == 0) {
      spot.slab = free_slabs_.back();
      KV_RETURN_IF_ERROR(clean_area(slabs_[spot.slab].area));
      free_slabs_.pop_back();
    } else {
      const bool cuts = free_small_[*size] == 0;
      if (cuts) CutSlab(free_slabs_.back(), *size);
      spot.slab = *cut_free_[*size].begin();
      Cut& cut = *slabs_[spot.slab].cut;
      spot.area = cut.free.back();
      if (absl::Status status = clean_area(cut.areas[spot.area]); !status.ok()) {
        if (cuts) Join(spot.slab);
        return status;
      }
      cut.free.pop_back();
      --free_small_[*size];
      if (cut.free.empty()) cut_free_[*size].erase(spot.slab);
    }
    shares_.Add(account, area_bytes(*size));
  }
  OpenArea(spot, tenant, slot_bytes, account, unclean);
  return absl::OkStatus();
}

void SlabAllocator::OpenArea(const Spot& spot, TenantId tenant, size_t slot_bytes, Account* account, bool unclean) {
  Area& area = AreaAt(spot);
  area.in_use = true;
  area.tenant = tenant;
  area.account = account;
  area.slot_bytes = slot_bytes;
  area.bucket = &buckets_[BucketKey(tenant, slot_bytes)];
  const size_t size = SizeAt(spot);
  const uint32_t slots = static_cast<uint32_t>(area_bytes(size) / slot_bytes);
  area.generation.assign(slots, area.generation_base);
  if (unclean) area.unclean.assign(slots, true);
  area.free_slots.resize(slots);
  for (uint32_t i = 0; i < slots; ++i) area.free_slots[i] = slots - 1 - i;
  area.bucket->held_bytes += area_bytes(size);
  area.bucket->with_free.insert(NumberOf(spot));
}

absl::StatusOr<PageId> SlabAllocator::Allocate(TenantId tenant, size_t bytes, Clean clean) {
  if (bytes == 0 || bytes > slab_bytes_) {
    return FieldError(absl::StatusCode::kResourceExhausted, "page bytes", absl::StrCat(bytes),
                      absl::StrCat("1..", slab_bytes_));
  }
  const size_t slot_bytes = RoundedSlotBytes(bytes);
  auto found = buckets_.find(BucketKey(tenant, slot_bytes));
  const bool is_new = found == buckets_.end() || found->second.free_slots == 0;
  if (is_new) {
    KV_RETURN_IF_ERROR(TakeArea(tenant, slot_bytes, clean));
    found = buckets_.find(BucketKey(tenant, slot_bytes));
  }
  Bucket& bucket = found->second;
  const uint32_t number = *bucket.with_free.begin();
  const Spot spot = SpotOf(number);
  Area& area = AreaAt(spot);
  if (!is_new) Count(spot, false);  // a new area counts for nothing yet
  const uint32_t slot = area.free_slots.back();
  area.free_slots.pop_back();
  // A stack that was long is cut when little of it is left: what a slot takes is then its generation alone.
  const size_t capacity = area.free_slots.capacity();
  if (capacity > kFreeSlotsKept && area.free_slots.size() <= capacity / 4) area.free_slots.shrink_to_fit();
  area.written = true;
  const uint32_t generation = ++area.generation[slot];
  used_bytes_ += slot_bytes;
  if (area.free_slots.empty()) bucket.with_free.erase(number);
  Count(spot, true);
  const PageId id{number + slot, generation};
  if (!area.unclean.empty() && area.unclean[slot] && clean(PlaceOf(id)).ok()) area.unclean[slot] = false;
  return id;
}

void SlabAllocator::CutSlab(uint32_t index, size_t size) {
  KV_CHECK(free_slabs_.back() == index);
  free_slabs_.pop_back();
  Slab& slab = slabs_[index];
  slab.cut = std::make_unique<Cut>();
  slab.cut->size = size;
  Area area;
  area.written = slab.area.written;
  area.tenant = slab.area.tenant;
  area.generation_base = slab.area.generation_base;
  slab.cut->areas.resize(kAreasPerSlab[size], area);
  for (uint32_t i = 0; i < kAreasPerSlab[size]; ++i) slab.cut->free.push_back(kAreasPerSlab[size] - 1 - i);
  free_small_[size] += kAreasPerSlab[size];
  cut_slabs_.insert(index);
  cut_free_[size].insert(index);
}

void SlabAllocator::Join(uint32_t index) {
  Slab& slab = slabs_[index];
  const std::unique_ptr<Cut> cut = std::move(slab.cut);
  KV_CHECK(cut->free.size() == cut->areas.size() && cut->lasting == 0);
  slab.area.written = false;
  for (const Area& area : cut->areas) {
    slab.area.generation_base = std::max(slab.area.generation_base, area.generation_base);
    if (!area.written) continue;
    slab.area.tenant = slab.area.written && slab.area.tenant != area.tenant ? kSeveral : area.tenant;
    slab.area.written = true;
  }
  free_small_[cut->size] -= cut->areas.size();
  cut_slabs_.erase(index);
  cut_free_[cut->size].erase(index);
  free_slabs_.push_back(index);
}

void SlabAllocator::SetReclaimable(PageId id, bool reclaimable) {
  Spot spot;
  KV_CHECK(Find(id, &spot));
  Area& area = AreaAt(spot);
  KV_CHECK(reclaimable ? area.reclaimable < area.used_slots() : area.reclaimable > 0);
  const bool was_whole = area.all_reclaimable();
  const uint32_t after = area.reclaimable + (reclaimable ? 1 : -1);
  if (was_whole || after == area.used_slots()) {
    Count(spot, false);
    area.reclaimable = after;
    Count(spot, true);
    return;
  }
  area.reclaimable = after;
  area.bucket->lasting_slots += reclaimable ? 1 : -1;
}

uint64_t SlabAllocator::reclaimable_bytes() const {
  uint64_t bytes = 0;
  for (const Slab& slab : slabs_) {
    bytes += slab.area.reclaimable * slab.area.slot_bytes;
    if (slab.cut == nullptr) continue;
    for (const Area& area : slab.cut->areas) bytes += area.reclaimable * area.slot_bytes;
  }
  return bytes;
}

void SlabAllocator::Free(PageId id) {
  Spot spot;
  KV_CHECK(Find(id, &spot));
  Area& area = AreaAt(spot);
  Count(spot, false);
  ++area.generation[spot.slot];
  area.free_slots.push_back(spot.slot);
  used_bytes_ -= area.slot_bytes;
  KV_CHECK(area.reclaimable <= area.used_slots());
  const uint32_t number = NumberOf(spot);
  if (area.free_slots.size() < area.generation.size()) {
    if (area.free_slots.size() == 1) area.bucket->with_free.insert(number);
    return Count(spot, true);
  }
  GiveBack(spot);
}

void SlabAllocator::GiveBack(const Spot& spot) {
  Area& area = AreaAt(spot);
  Slab& slab = slabs_[spot.slab];
  const size_t size = SizeAt(spot);
  area.bucket->with_free.erase(NumberOf(spot));
  area.bucket->held_bytes -= area_bytes(size);
  if (area.bucket->held_bytes == 0) buckets_.erase(BucketKey(area.tenant, area.slot_bytes));
  area.bucket = nullptr;
  // Behind its last slot the area may have bytes that no slot had.
  const bool all_cleaned = area.generation.size() * area.slot_bytes == area_bytes(size) &&
                           std::find(area.unclean.begin(), area.unclean.end(), true) == area.unclean.end();
  if (!area.unclean.empty() && !all_cleaned) area.tenant = kSeveral;
  area.unclean.clear();
  area.generation_base = *std::max_element(area.generation.begin(), area.generation.end());
  area.in_use = false;
  area.slot_bytes = 0;
  area.generation.clear();
  area.free_slots.clear();
  if (slab.bound) {
    kept_free_[area.tenant].push_back(spot.slab);
    ++kept_slabs_;
    return;
  }
  shares_.Remove(area.account, area_bytes(size));
  area.account = nullptr;
  if (slab.cut == nullptr) {
    free_slabs_.push_back(spot.slab);
    return;
  }
  slab.cut->free.push_back(spot.area);
  ++free_small_[size];
  cut_free_[size].insert(spot.slab);
  if (slab.cut->free.size() == slab.cut->areas.size()) Join(spot.slab);
}

void SlabAllocator::TakeKept(uint32_t slab) {
  const auto kept = kept_free_.find(slabs_[slab].area.tenant);
  KV_CHECK(kept != kept_free_.end());
  const auto place = std::find(kept->second.begin(), kept->second.end(), slab);
  KV_CHECK(place != kept->second.end());
  kept->second.erase(place);
  if (kept->second.empty()) kept_free_.erase(kept);
}

SlabAllocator::Spot SlabAllocator::SpotOf(uint32_t number) const {
  Spot spot;
  spot.slab = number / slots_per_area(0);
  spot.slot = number % slots_per_area(0);
  if (const Cut* const cut = slabs_[spot.slab].cut.get()) {
    spot.area = spot.slot / slots_per_area(cut->size);
    spot.slot %= slots_per_area(cut->size);
  }
  return spot;
}

uint32_t SlabAllocator::NumberOf(const Spot& spot) const {
  return spot.slab * slots_per_area(0) + spot.area * slots_per_area(SizeAt(spot));
}

SlabAllocator::Place SlabAllocator::PlaceOfArea(const Spot& spot) const {
  const uint64_t bytes = area_bytes(SizeAt(spot));
  return {spot.slab, spot.area * bytes, bytes};
}

bool SlabAllocator::Find(PageId id, Spot* spot) const {
  if (!id.valid() || id.slot >= slabs_.size() * slots_per_area(0)) return false;
  *spot = SpotOf(id.slot);
  const Area& area = AreaAt(*spot);
  if (spot->slot >= area.generation.size()) return false;
  const uint32_t generation = area.generation[spot->slot];
  return generation == id.generation && generation % 2 == 1;
}

SlabAllocator::Place SlabAllocator::PlaceOf(PageId id) const {
  Spot spot;
  KV_CHECK(Find(id, &spot));
  const Area& area = AreaAt(spot);
  const uint64_t offset = uint64_t{spot.slot} * area.slot_bytes;
  return Place{spot.slab, spot.area == 0 ? offset : PlaceOfArea(spot).offset + offset, area.slot_bytes};
}

void SlabAllocator::NoteCleaned(PageId id) {
  Spot spot;
  KV_CHECK(Find(id, &spot));
  std::vector<bool>& unclean = AreaAt(spot).unclean;
  if (!unclean.empty()) unclean[spot.slot] = false;
}

bool SlabAllocator::IsCurrent(PageId id) const {
  Spot spot;
  return Find(id, &spot);
}

void SlabAllocator::CheckInvariants() const {
  uint64_t used_bytes = 0, kept_slabs = 0;
  absl::flat_hash_map<TenantId, uint32_t> bound_reclaimable;
  std::array<uint64_t, kSizes> free_small{};
  absl::flat_hash_map<BucketKey, Bucket> buckets;
  absl::flat_hash_map<const Account*, Account> accounts;
  std::vector<bool> listed_free(slabs_.size(), false), listed_kept(slabs_.size(), false);
  for (uint32_t index : free_slabs_) {
    KV_CHECK(index < slabs_.size() && !listed_free[index] && !slabs_[index].bound && !slabs_[index].withdrawn);
    listed_free[index] = true;
  }
  for (const auto& [tenant, kept] : kept_free_) {
    KV_CHECK(!kept.empty());
    for (uint32_t index : kept) {
      KV_CHECK(!listed_kept[index] && slabs_[index].bound && !slabs_[index].withdrawn);
      KV_CHECK(slabs_[index].area.tenant == tenant);
      listed_kept[index] = true;
      accounts[slabs_[index].area.account].charge += slab_bytes_;
    }
  }
  const auto check_area = [&](const Spot& spot, const Area& area) {
    if (!area.in_use) {
      KV_CHECK(area.slot_bytes == 0 && area.reclaimable == 0 && area.generation.empty() && area.free_slots.empty());
      KV_CHECK(area.unclean.empty());
      KV_CHECK(area.bucket == nullptr && (area.account != nullptr) == listed_kept[spot.slab]);
      return;
    }
    std::vector<bool> is_free(area.generation.size(), false);
    for (uint32_t slot : area.free_slots) {
      KV_CHECK(slot < is_free.size() && !is_free[slot]);
      is_free[slot] = true;
    }
    uint64_t handed_out = 0;
    for (uint32_t slot = 0; slot < is_free.size(); ++slot) {
      KV_CHECK((area.generation[slot] % 2 == 1) == !is_free[slot]);
      handed_out += !is_free[slot];
    }
    KV_CHECK(area.unclean.empty() || (clean_slots_ && area.unclean.size() == area.generation.size()));
    KV_CHECK(handed_out > 0 && area.reclaimable <= handed_out && area.written);
    used_bytes += handed_out * area.slot_bytes;
    const BucketKey key(area.tenant, area.slot_bytes);
    const auto bucket = buckets_.find(key);
    KV_CHECK(bucket != buckets_.end() && area.bucket == &bucket->second);
    KV_CHECK(bucket->second.with_free.count(NumberOf(spot)) == (area.free_slots.empty() ? 0 : 1));
    Bucket& sums = buckets[key];
    const uint64_t bytes = area_bytes(SizeAt(spot));
    sums.free_slots += area.free_slots.size();
    sums.held_bytes += bytes;
    accounts[area.account].charge += bytes;
    if (area.reclaimable < handed_out) {
      sums.lasting_slots += area.free_slots.size() + area.reclaimable;
      sums.lasting_bytes += bytes;
    } else if (!slabs_[spot.slab].bound) {
      ++accounts[area.account].reclaimable[SizeAt(spot)];
    } else {
      ++bound_reclaimable[area.tenant];
    }
  };
  for (uint32_t index = 0; index < slabs_.size(); ++index) {
    const Slab& slab = slabs_[index];
    KV_CHECK(InUse(index) + listed_free[index] + listed_kept[index] + slab.withdrawn == 1);
    KV_CHECK(!slab.withdrawn || slab.bound);
    KV_CHECK(!slab.withheld || slab.withdrawn);
    if (slab.bound && !slab.withdrawn) ++accounts[slab.area.account].bound;
    kept_slabs += slab.bound && !slab.area.in_use;
    check_area({index, 0, 0}, slab.area);
    KV_CHECK(cut_slabs_.contains(index) == (slab.cut != nullptr));
    if (slab.cut == nullptr) continue;
    const Cut& cut = *slab.cut;
    KV_CHECK(!slab.bound && !slab.area.in_use && cut.size < sizes_ && cut.areas.size() == kAreasPerSlab[cut.size]);
    std::vector<bool> listed(cut.areas.size(), false);
    for (const uint32_t free : cut.free) {
      KV_CHECK(!listed[free] && !cut.areas[free].in_use);
      listed[free] = true;
    }
    uint32_t lasting = 0;
    for (uint32_t i = 0; i < cut.areas.size(); ++i) {
      KV_CHECK(cut.areas[i].in_use == !listed[i]);
      check_area({index, i, 0}, cut.areas[i]);
      lasting += cut.areas[i].in_use && !cut.areas[i].all_reclaimable();
    }
    KV_CHECK(lasting == cut.lasting && cut.free.size() < cut.areas.size());
    KV_CHECK(cut_free_[cut.size].contains(index) == !cut.free.empty());
    free_small[cut.size] += cut.free.size();
  }
  KV_CHECK(used_bytes == used_bytes_ && kept_slabs == kept_slabs_);
  for (const auto& [tenant, count] : bound_reclaimable_) KV_CHECK(bound_reclaimable[tenant] == count);
  KV_CHECK(bound_reclaimable.size() == bound_reclaimable_.size());
  KV_CHECK(free_small == free_small_ && buckets.size() == buckets_.size());
  for (const auto& [key, bucket] : buckets_) {
    const Bucket& sums = buckets[key];
    KV_CHECK(sums.free_slots == bucket.free_slots && sums.held_bytes == bucket.held_bytes);
    KV_CHECK(sums.lasting_slots == bucket.lasting_slots && sums.lasting_bytes == bucket.lasting_bytes);
  }
  for (const auto& [payer, account] : shares_.accounts()) {
    const Account& sums = accounts[&account];
    KV_CHECK(account.charge == sums.charge && account.reclaimable == sums.reclaimable && account.bound == sums.bound);
  }
  shares_.CheckInvariants();
}

}  // namespace kvmanager
