#include "kvmanager/memory/slab_restore.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

using Slot = SlabRestore::Slot;

constexpr uint64_t kSlabBytes = 2 << 20;

SlabAllocator::Options Pool(uint32_t slabs, bool written) {
  SlabAllocator::Options options;
  options.slab_bytes = kSlabBytes;
  options.slabs = slabs;
  options.small_slabs = true;
  options.clean_slots = true;
  options.written = written;
  options.limit = "test-pool-bytes";
  return options;
}

// Allocates, and counts the slots that were to be cleaned.
class Cleaner {
 public:
  PageId Allocate(SlabAllocator* allocator, TenantId tenant, size_t bytes) {
    const auto id = allocator->Allocate(tenant, bytes, [this](const SlabAllocator::Place&) {
      ++cleaned;
      return absl::OkStatus();
    });
    return id.value_or(PageId());
  }
  int cleaned = 0;
};

std::vector<Slot> Sorted(std::vector<Slot> slots) {
  std::sort(slots.begin(), slots.end(), [](const Slot& a, const Slot& b) { return a.place.number < b.place.number; });
  return slots;
}

TEST(SlabRestore, ASlotIsWhereItWasAndTheOthersAreNobodys) {
  SlabAllocator before(Pool(32, false));
  Cleaner cleaner;
  const PageId first = cleaner.Allocate(&before, 1, 4096), second = cleaner.Allocate(&before, 1, 4096);
  const auto place = before.PlaceOf(second);
  SlabAllocator after(Pool(32, true));
  const auto ids = SlabRestore(&after).Restore({{{7, SlabRestore::PlaceOf(before, second)}}});
  ASSERT_TRUE(ids[0].valid());
  EXPECT_EQ(after.PlaceOf(ids[0]).slab, place.slab);
  EXPECT_EQ(after.PlaceOf(ids[0]).offset, place.offset);
  EXPECT_EQ(after.used_bytes(), 4096u);
  after.CheckInvariants();
  // The first one's bytes are still there, of whoever had it.
  cleaner.cleaned = 0;
  const PageId again = cleaner.Allocate(&after, 7, 4096);
  EXPECT_EQ(after.PlaceOf(again).offset, before.PlaceOf(first).offset);
  EXPECT_EQ(cleaner.cleaned, 1);
  // As are those of slabs that had no slot.
  cleaner.cleaned = 0;
  cleaner.Allocate(&after, 9, kSlabBytes);
  EXPECT_EQ(cleaner.cleaned, 1);
  after.CheckInvariants();
}

TEST(SlabRestore, RefusesWhatCannotBe) {
  SlabAllocator before(Pool(32, false));
  Cleaner cleaner;
  const auto small = SlabRestore::PlaceOf(before, cleaner.Allocate(&before, 1, 4096));
  const auto large = SlabRestore::PlaceOf(before, cleaner.Allocate(&before, 1, kSlabBytes));
  ASSERT_NE(small.size, large.size);
  const auto with = [](SlabAllocator::SlotPlace place, auto change) {
    change(place);
    return place;
  };
  const uint32_t of_slab = kSlabBytes / SlabAllocator::kSlotBytesMin;
  const std::vector<std::pair<const char*, SlabAllocator::SlotPlace>> wrong = {
      {"no such size", with(small, [](auto& p) { p.size = SlabAllocator::kSizes; })},
      {"beyond the pool", with(large, [&](auto& p) { p.number = 32 * of_slab; })},
      {"the last number", with(large, [](auto& p) { p.number = UINT32_MAX; })},
      {"no bytes", with(small, [](auto& p) { p.slot_bytes = 0; })},
      {"not rounded", with(small, [](auto& p) { p.slot_bytes += 1; })},
      {"larger than its area", with(small, [](auto& p) { p.slot_bytes = kSlabBytes; })},
      {"beyond its area", with(small, [](auto& p) { p.number += 2; })},
      {"the largest", with(large, [](auto& p) { p.slot_bytes = UINT64_MAX - 63; })},
  };
  for (const auto& [what, place] : wrong) {
    SlabAllocator after(Pool(32, true));
    EXPECT_FALSE(SlabRestore(&after).Restore({{{1, place}}})[0].valid()) << what;
    EXPECT_EQ(after.used_bytes(), 0u) << what;
    EXPECT_EQ(after.free_slabs(), 32u) << what;
    after.CheckInvariants();
  }
  // Two that cannot both be: of other tenants, sizes or slabs' sizes, and one slot twice.
  const std::vector<std::pair<const char*, Slot>> clashes = {
      {"another tenant", {2, small}},
      {"another slot size", {1, with(small, [](auto& p) { p.slot_bytes = 1024; })}},
      {"the same", {1, small}},
      {"a whole slab", {1, with(large, [&](auto& p) { p.number = small.number; })}},
      {"another small slab", {1, with(small, [&](auto& p) { p.size = 1, p.slot_bytes = 4096; })}},
  };
  for (const auto& [what, other] : clashes) {
    SlabAllocator after(Pool(32, true));
    const auto ids = SlabRestore(&after).Restore({{{1, small}, other}});
    EXPECT_TRUE(ids[0].valid()) << what;
    EXPECT_FALSE(ids[1].valid()) << what;
    after.CheckInvariants();
    after.Free(ids[0]);
    EXPECT_EQ(after.free_slabs(), 32u) << what;
    after.CheckInvariants();
  }
}

TEST(SlabRestore, APayerGetsNoMoreThanItsMost) {
  SlabAllocator before(Pool(8, false));
  Cleaner cleaner;
  std::vector<Slot> slots;
  for (int i = 0; i < 4; ++i)
    slots.push_back({1, SlabRestore::PlaceOf(before, cleaner.Allocate(&before, 1, kSlabBytes))});
  SlabAllocator after(Pool(8, true));
  after.SetPayer(1, 5);
  after.shares().SetQuota(5, {.guaranteed_bytes = 0, .most_bytes = 3 * kSlabBytes});
  const auto ids = SlabRestore(&after).Restore(Sorted(slots));
  EXPECT_EQ(std::count_if(ids.begin(), ids.end(), [](const PageId& id) { return id.valid(); }), 3);
  after.CheckInvariants();
}

// What an allocator of many tenants and sizes had is the same behind it; what is made up is taken or refused, and all
// can be freed.
TEST(SlabRestore, AtRandom) {
  std::mt19937 random(11);
  const size_t sizes[] = {1000, 4096, 5000, 70000, 300000, kSlabBytes};
  for (int round = 0; round < 100; ++round) {
    const uint32_t slabs = round % 2 == 0 ? 24 : 64;
    SlabAllocator before(Pool(slabs, round % 3 == 0));
    Cleaner cleaner;
    std::vector<std::pair<TenantId, PageId>> held;
    for (int step = 0; step < 2000; ++step) {
      if (!held.empty() && random() % 5 < 2) {
        std::swap(held[random() % held.size()], held.back());
        before.Free(held.back().second);
        held.pop_back();
        continue;
      }
      const TenantId tenant = 1 + random() % 3;
      const PageId id = cleaner.Allocate(&before, tenant, sizes[random() % std::size(sizes)]);
      if (id.valid()) held.emplace_back(tenant, id);
    }
    std::vector<Slot> slots;
    for (const auto& [tenant, id] : held) {
      if (random() % 4 > 0) slots.push_back({tenant + 10, SlabRestore::PlaceOf(before, id)});
    }
    const bool honest = round % 2 == 0;
    for (Slot& slot : slots) {
      if (honest || random() % 4 > 0) continue;
      if (random() % 2 == 0) slot.place.number = random() % (slabs * kSlabBytes / SlabAllocator::kSlotBytesMin);
      if (random() % 4 == 0) slot.place.size = random() % 4;
      if (random() % 4 == 0) slot.place.slot_bytes = 64 * (random() % 300);
      if (random() % 4 == 0) slot.tenant = 10 + random() % 4;
    }
    slots = Sorted(std::move(slots));
    SlabAllocator after(Pool(slabs, true));
    const auto ids = SlabRestore(&after).Restore(slots);
    after.CheckInvariants();
    std::map<std::pair<uint32_t, uint64_t>, uint64_t> ends;  // by slab and begin
    for (size_t i = 0; i < slots.size(); ++i) {
      if (honest) {
        ASSERT_TRUE(ids[i].valid());
      }
      if (!ids[i].valid()) continue;
      ASSERT_EQ(SlabRestore::PlaceOf(after, ids[i]), slots[i].place);
      const auto place = after.PlaceOf(ids[i]);
      ASSERT_TRUE(ends.emplace(std::pair(place.slab, place.offset), place.offset + place.bytes).second);
    }
    for (auto it = ends.begin(); it != ends.end() && std::next(it) != ends.end(); ++it) {
      const auto next = std::next(it);
      if (it->first.first != next->first.first) continue;
      ASSERT_LE(it->second, next->first.second);
    }
    if (honest) {
      for (const auto& [tenant, id] : held) {
        const auto same =
            std::find_if(slots.begin(), slots.end(), [&](const Slot& slot) { return slot.place.number == id.slot; });
        if (same == slots.end()) continue;
        const auto was = before.PlaceOf(id), is = after.PlaceOf(ids[same - slots.begin()]);
        ASSERT_EQ(std::tie(was.slab, was.offset, was.bytes), std::tie(is.slab, is.offset, is.bytes));
      }
    }
    // It goes on as any allocator.
    std::vector<PageId> more;
    for (int i = 0; i < 300; ++i) {
      const PageId id = cleaner.Allocate(&after, 10 + random() % 5, sizes[random() % std::size(sizes)]);
      if (id.valid()) more.push_back(id);
    }
    after.CheckInvariants();
    for (const PageId& id : ids) {
      if (id.valid()) after.Free(id);
    }
    for (const PageId& id : more) after.Free(id);
    after.CheckInvariants();
    EXPECT_EQ(after.free_slabs(), slabs);
    EXPECT_EQ(after.used_bytes(), 0u);
  }
}

}  // namespace
}  // namespace kvmanager
