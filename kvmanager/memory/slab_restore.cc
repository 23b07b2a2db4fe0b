#include "kvmanager/memory/slab_restore.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {

SlabAllocator::SlotPlace SlabRestore::PlaceOf(const SlabAllocator& allocator, PageId id) {
  Spot spot;
  KV_CHECK(allocator.Find(id, &spot));
  return {id.slot, static_cast<uint32_t>(allocator.SizeAt(spot)), allocator.AreaAt(spot).slot_bytes};
}

bool SlabRestore::CanBe(const SlabAllocator::SlotPlace& place) const {
  const uint32_t of_slab = of_.slots_per_area(0);
  if (place.size >= of_.sizes_ || place.number / of_slab >= of_.slabs_.size()) return false;
  if (place.slot_bytes == 0 || place.slot_bytes > of_.area_bytes(place.size)) return false;
  if (place.slot_bytes != SlabAllocator::RoundedSlotBytes(place.slot_bytes)) return false;
  const uint32_t slot = place.number % of_slab % of_.slots_per_area(place.size);
  return slot < of_.area_bytes(place.size) / place.slot_bytes;
}

bool SlabRestore::FindArea(const Slot& slot, Spot* spot) {
  const SlabAllocator::SlotPlace& place = slot.place;
  if (!CanBe(place)) return false;
  spot->slab = place.number / of_.slots_per_area(0);
  const uint32_t in_slab = place.number % of_.slots_per_area(0);
  spot->area = in_slab / of_.slots_per_area(place.size);
  spot->slot = in_slab % of_.slots_per_area(place.size);
  SlabAllocator::Slab& slab = of_.slabs_[spot->slab];
  const bool is_cut = slab.cut != nullptr;
  if (is_cut ? slab.cut->size != place.size : slab.area.in_use && place.size > 0) return false;
  if (is_cut || slab.area.in_use) {
    const SlabAllocator::Area& area = of_.AreaAt(*spot);
    if (area.in_use) return area.tenant == slot.tenant && area.slot_bytes == place.slot_bytes;
  }
  SlabAllocator::Account* const account = of_.shares_.Of(of_.PayerOf(slot.tenant));
  const uint64_t bytes = of_.area_bytes(place.size);
  if (account->charge + bytes > account->most_bytes) return false;
  if (!is_cut) {
    // The last of the stack is the one that is taken.
    const auto free = std::find(of_.free_slabs_.begin(), of_.free_slabs_.end(), spot->slab);
    KV_CHECK(free != of_.free_slabs_.end());
    std::iter_swap(free, of_.free_slabs_.end() - 1);
    if (place.size == 0) {
      of_.free_slabs_.pop_back();
    } else {
      of_.CutSlab(spot->slab, place.size);
    }
  }
  if (place.size > 0) {
    SlabAllocator::Cut& cut = *slab.cut;
    std::erase(cut.free, spot->area);
    --of_.free_small_[place.size];
    if (cut.free.empty()) of_.cut_free_[place.size].erase(spot->slab);
  }
  of_.shares_.Add(account, bytes);
  of_.OpenArea(*spot, slot.tenant, place.slot_bytes, account, /*unclean=*/true);
  return true;
}

void SlabRestore::Close(const Spot& spot) {
  SlabAllocator::Area& area = of_.AreaAt(spot);
  std::erase_if(area.free_slots, [&](uint32_t slot) { return area.generation[slot] % 2 == 1; });
  area.written = true;
  of_.used_bytes_ += area.used_slots() * area.slot_bytes;
  if (area.free_slots.empty()) area.bucket->with_free.erase(of_.NumberOf(spot));
  of_.Count(spot, true);
}

std::vector<PageId> SlabRestore::Restore(absl::Span<const Slot> slots) {
  KV_CHECK(of_.free_slabs_.size() == of_.slabs_.size());
  std::vector<PageId> ids(slots.size());
  Spot open;
  bool is_open = false;
  for (size_t i = 0; i < slots.size(); ++i) {
    KV_CHECK(i == 0 || slots[i - 1].place.number <= slots[i].place.number);
    Spot spot;
    if (!FindArea(slots[i], &spot)) continue;
    if (is_open && (open.slab != spot.slab || open.area != spot.area)) Close(open);
    open = spot;
    is_open = true;
    SlabAllocator::Area& area = of_.AreaAt(spot);
    uint32_t& generation = area.generation[spot.slot];
    if (generation % 2 == 1) continue;  // it is given twice
    ++generation;
    area.unclean[spot.slot] = false;
    ids[i] = {slots[i].place.number, generation};
  }
  if (is_open) Close(open);
  std::sort(of_.free_slabs_.rbegin(), of_.free_slabs_.rend());
  return ids;
}

}  // namespace kvmanager
