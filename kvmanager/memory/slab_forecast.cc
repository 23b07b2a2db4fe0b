#include "kvmanager/memory/slab_forecast.h"

#include <algorithm>
#include <iterator>

#include "absl/container/inlined_vector.h"

namespace kvmanager {

bool SlabForecast::Fits(TenantId tenant, const Account& account, absl::Span<const SlotsWanted> wanted, Room room,
                        bool reclaim, uint64_t* growth) const {
  struct Slots {
    size_t bytes;
    uint64_t free, held_bytes;
  };
  absl::InlinedVector<Slots, 8> all;
  *growth = 0;
  for (const SlotsWanted& of : wanted) {
    if (of.bytes == 0 || of.bytes > of_.slab_bytes_) return false;
    const size_t slot_bytes = SlabAllocator::RoundedSlotBytes(of.bytes);
    auto slots = std::find_if(all.begin(), all.end(), [&](const Slots& each) { return each.bytes == slot_bytes; });
    if (slots == all.end()) {
      const auto bucket = of_.buckets_.find(SlabAllocator::BucketKey(tenant, slot_bytes));
      all.push_back({slot_bytes, 0, 0});
      slots = std::prev(all.end());
      if (bucket != of_.buckets_.end()) {
        slots->free = reclaim ? bucket->second.lasting_slots : bucket->second.free_slots;
        slots->held_bytes = reclaim ? bucket->second.lasting_bytes : bucket->second.held_bytes;
      }
    }
    uint64_t missing = of.count;
    while (true) {
      const uint64_t taken = std::min(missing, slots->free);
      missing -= taken;
      slots->free -= taken;
      if (missing == 0) break;
      size_t size = 0;
      uint64_t areas = 1;
      if (room.kept > 0) {
        --room.kept;
      } else {
        const std::optional<size_t> chosen = of_.Choose(account, slot_bytes, slots->held_bytes, room);
        if (!chosen.has_value()) return false;
        size = *chosen;
        // Many at once where each next one is of the same size.
        const uint64_t per_area = of_.area_bytes(size) / slot_bytes;
        areas = std::min((missing + per_area - 1) / per_area, room.bytes / of_.area_bytes(size));
        if (size == 0) {
          areas = std::min(areas, room.slabs);
          room.slabs -= areas;
        } else {
          if (room.small[size] == 0) {
            --room.slabs;
            room.small[size] = SlabAllocator::kAreasPerSlab[size];
          }
          areas = of_.Preferred(account, slot_bytes, slots->held_bytes) == size ? 1 : std::min(areas, room.small[size]);
          room.small[size] -= areas;
        }
        room.bytes -= areas * of_.area_bytes(size);
        *growth += areas * of_.area_bytes(size);
      }
      slots->held_bytes += areas * of_.area_bytes(size);
      slots->free += areas * (of_.area_bytes(size) / slot_bytes);
    }
  }
  return true;
}

uint64_t SlabForecast::ChargeWith(TenantId tenant, const Account& account, absl::Span<const SlotsWanted> wanted,
                                  bool reclaim) const {
  Room all;
  all.slabs = of_.slabs_.size() + 1;  // more than there are: then nobody gives enough
  if (const auto kept = of_.kept_free_.find(tenant); kept != of_.kept_free_.end()) all.kept = kept->second.size();
  uint64_t growth;
  if (!Fits(tenant, account, wanted, all, reclaim, &growth)) return 2 * of_.capacity_bytes();
  return account.charge + growth - (reclaim ? ReclaimableAsWhole(account) : 0);
}

uint64_t SlabForecast::ReclaimableAsWhole(const Account& account) const {
  uint64_t bytes = 0;
  for (size_t size = 0; size < of_.sizes_; ++size) bytes += account.reclaimable[size] * of_.area_bytes(size);
  return bytes;
}

void SlabForecast::CountOthers(const Account& asker, int64_t excess, Room* room) const {
  const auto& by_excess = of_.shares_.by_excess();
  for (auto each = by_excess.rbegin(); each != by_excess.rend() && each->first > excess; ++each) {
    const Account& other = *each->second;
    if (&other == &asker) continue;
    // It gives until it has no more than the asker, in the order in which it used its blocks: what is of one size may
    // all come behind what is of others.
    const uint64_t gives = static_cast<uint64_t>(each->first - excess), all = ReclaimableAsWhole(other);
    for (size_t size = 0; size < of_.sizes_; ++size) {
      const uint64_t of_size = other.reclaimable[size] * of_.area_bytes(size), first = all - of_size;
      if (gives <= first) continue;
      const uint64_t areas = std::min<uint64_t>(other.reclaimable[size],
                                                (gives - first + of_.area_bytes(size) - 1) / of_.area_bytes(size));
      (size == 0 ? room->slabs : room->small[size]) += areas;
    }
  }
}

SlabForecast::Room SlabForecast::RoomReclaimed(TenantId tenant, const Account& account,
                                               absl::Span<const SlotsWanted> wanted) const {
  Room room;
  if (const auto kept = of_.kept_free_.find(tenant); kept != of_.kept_free_.end()) room.kept = kept->second.size();
  if (const auto bound = of_.bound_reclaimable_.find(tenant); bound != of_.bound_reclaimable_.end()) {
    room.kept += bound->second;
  }
  room.slabs = of_.free_slabs_.size() + account.reclaimable[0];
  bool small = false;
  for (size_t size = 1; size < of_.sizes_; ++size) {
    room.small[size] = of_.free_small_[size] + account.reclaimable[size];
    small |= account.reclaimable[size] > 0;
  }
  if (small) {
    // Those that join to a slab, since nobody else has a part of it.
    for (const uint32_t index : of_.cut_slabs_) {
      const SlabAllocator::Cut& cut = *of_.slabs_[index].cut;
      if (cut.lasting > 0) continue;
      if (std::any_of(cut.areas.begin(), cut.areas.end(),
                      [&](const SlabAllocator::Area& area) { return area.in_use && area.account != &account; })) {
        continue;
      }
      room.small[cut.size] -= cut.areas.size();
      ++room.slabs;
    }
  }
  CountOthers(account, ExcessOf(account, ChargeWith(tenant, account, wanted, /*reclaim=*/true)), &room);
  const uint64_t charge = account.charge - ReclaimableAsWhole(account);
  room.slabs = of_.shares_.UsableSlabs(room.slabs, account, charge);
  room.bytes = account.most_bytes > charge ? account.most_bytes - charge : 0;
  return room;
}

bool SlabForecast::CanAllocate(TenantId tenant, absl::Span<const SlotsWanted> wanted, bool reclaim) const {
  const Account& account = of_.AccountOf(tenant);
  uint64_t growth;
  if (Fits(tenant, account, wanted, of_.RoomNow(tenant, account), /*reclaim=*/false, &growth)) return true;
  return reclaim && Fits(tenant, account, wanted, RoomReclaimed(tenant, account, wanted), /*reclaim=*/true, &growth);
}

std::optional<PayerId> SlabForecast::NextToGive(TenantId tenant, absl::Span<const SlotsWanted> wanted,
                                                absl::FunctionRef<bool(PayerId)> has) const {
  const Account& account = of_.AccountOf(tenant);
  const PayerId payer = of_.PayerOf(tenant);
  const uint64_t charge = ChargeWith(tenant, account, wanted, /*reclaim=*/false);
  if (charge > account.most_bytes && has(payer)) return payer;
  const int64_t excess = ExcessOf(account, charge);
  const auto& by_excess = of_.shares_.by_excess();
  for (auto each = by_excess.rbegin(); each != by_excess.rend() && each->first > excess; ++each) {
    // Of one whose areas are bound, or hold what it must keep, nothing would come to others.
    const Account& other = *each->second;
    if (other.payer != payer && ReclaimableAsWhole(other) > 0 && has(other.payer)) return other.payer;
  }
  if (has(payer)) return payer;
  return std::nullopt;
}

}  // namespace kvmanager
