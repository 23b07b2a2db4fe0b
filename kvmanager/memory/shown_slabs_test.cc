#include "kvmanager/memory/shown_slabs.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kvmanager/memory/pool_testing.h"

namespace kvmanager {
namespace {

using testing::IsFilledWith;
using testing::kMiB;
using testing::MakePool;

std::unique_ptr<Region> MapShown(PagePool& pool, uint32_t slab) {
  const auto fd = pool.shown()->Show(slab);
  EXPECT_TRUE(fd.ok()) << fd.status();
  auto mapped = Region::Map(*fd, pool.slab_bytes(), /*writable=*/false);
  EXPECT_TRUE(mapped.ok()) << mapped.status();
  return *std::move(mapped);
}

TEST(ShownSlabs, AShownSlabStaysItsTenantsUntilNobodyMapsIt) {
  const auto pool = MakePool(4 * kMiB);  // two slabs, neither cut
  const PageId id = pool->Allocate(1, kMiB).value(), other = pool->Allocate(2, kMiB).value();
  std::memset(pool->Data(id), 7, kMiB);
  const auto place = pool->shown()->Showable(id);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(pool->SlabData(place->slab).data() + place->offset, pool->Data(id));
  auto mapped = MapShown(*pool, place->slab), twice = MapShown(*pool, place->slab);
  EXPECT_TRUE(IsFilledWith(mapped->data() + place->offset, kMiB, 7));
  EXPECT_FALSE(Region::Map(pool->shown()->Show(place->slab).value(), pool->slab_bytes(), /*writable=*/true).ok());
  EXPECT_EQ(pool->shown()->count(), 1u);
  // Free for its tenant alone, and used until then.
  pool->Free(id);
  pool->CheckInvariants();
  EXPECT_EQ(pool->used_bytes(), kMiB + pool->slab_bytes());
  EXPECT_FALSE(pool->CanAllocate(2, {{2 * kMiB, 1}}));
  EXPECT_FALSE(pool->Allocate(2, 2 * kMiB).ok());
  const PageId again = pool->Allocate(1, kMiB).value();
  EXPECT_EQ(pool->shown()->Showable(again)->slab, place->slab);
  pool->Free(again);
  mapped.reset();
  EXPECT_FALSE(pool->Allocate(2, 2 * kMiB).ok());
  twice.reset();
  // Allocate looks.
  const PageId taken = pool->Allocate(2, 2 * kMiB).value();
  EXPECT_TRUE(IsFilledWith(pool->Data(taken), 2 * kMiB, 0));
  EXPECT_EQ(pool->shown()->count(), 0u);
  EXPECT_EQ(pool->used_bytes(), 3 * kMiB);
  pool->Free(taken);
  pool->Free(other);
  pool->CheckInvariants();
  EXPECT_EQ(pool->free_slabs(), 2u);
}

TEST(ShownSlabs, ASlabWithBytesOfAnotherTenantIsNotShown) {
  const auto pool = MakePool(2 * kMiB);
  const PageId first = pool->Allocate(1, kMiB).value();
  std::memset(pool->Data(first), 7, kMiB);
  pool->Free(first);
  const PageId second = pool->Allocate(2, 4096).value();  // its slot was cleaned, the others are not
  EXPECT_FALSE(pool->shown()->Showable(second).has_value());
  EXPECT_EQ(pool->shown()->Show(0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool->shown()->Show(1).status().code(), absl::StatusCode::kFailedPrecondition);
  // Nor is one that is cut.
  const auto cut = MakePool(64 * kMiB);
  EXPECT_FALSE(cut->shown()->Showable(cut->Allocate(1, 4096).value()).has_value());
}

TEST(ShownSlabs, ShownSlabsOfOneAreHalfOfThePoolWhileOthersHaveSome) {
  const auto pool = MakePool(8 * kMiB);
  std::vector<PageId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(pool->Allocate(1, 2 * kMiB).value());
  std::vector<std::unique_ptr<Region>> mapped;
  for (int i = 0; i < 2; ++i) mapped.push_back(MapShown(*pool, pool->shown()->Showable(ids[i])->slab));
  const PageId other = pool->Allocate(2, 4096).value();
  const auto refused = pool->shown()->Show(pool->shown()->Showable(ids[2])->slab);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  // Those that are shown already are shown again.
  mapped.push_back(MapShown(*pool, pool->shown()->Showable(ids[1])->slab));
  pool->Free(other);
  mapped.push_back(MapShown(*pool, pool->shown()->Showable(ids[2])->slab));
}

// Slabs that are bound ahead of need.

std::unique_ptr<Region> MapBound(PagePool& pool, TenantId tenant, uint32_t slab) {
  const auto fd = pool.shown()->ShowBound(tenant, slab);
  EXPECT_TRUE(fd.ok()) << fd.status();
  auto mapped = Region::Map(*fd, pool.slab_bytes(), /*writable=*/false);
  EXPECT_TRUE(mapped.ok()) << mapped.status();
  return *std::move(mapped);
}

TEST(ShownSlabs, BoundSlabsAreUsedByTheirTenantAndFirst) {
  const auto pool = MakePool(36 * kMiB);  // with small slabs
  const auto bound = pool->shown()->Bind(1, 5 * kMiB);
  ASSERT_TRUE(bound.ok()) << bound.status();
  ASSERT_EQ(bound->size(), 2u);
  pool->CheckInvariants();
  EXPECT_EQ(pool->used_bytes(), 4 * kMiB);
  EXPECT_EQ(pool->free_slabs(), 16u);
  EXPECT_EQ(pool->shares().Find(1)->charge, 4 * kMiB);
  EXPECT_EQ(pool->shown()->ShowBound(2, (*bound)[0]).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool->shown()->ShowBound(1, 17).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool->shown()->ShowBound(1, 18).status().code(), absl::StatusCode::kFailedPrecondition);
  std::vector<std::unique_ptr<Region>> mapped;
  for (const uint32_t slab : *bound) mapped.push_back(MapBound(*pool, 1, slab));
  // Not a small slab.
  const PageId other = pool->Allocate(2, 4096).value(), own = pool->Allocate(1, 4096).value();
  const auto place = pool->shown()->Showable(own);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(std::count(bound->begin(), bound->end(), place->slab), 1);
  EXPECT_FALSE(pool->shown()->Showable(other).has_value());
  std::memset(pool->Data(own), 7, 4096);
  const size_t i = place->slab == (*bound)[0] ? 0 : 1;
  EXPECT_TRUE(IsFilledWith(mapped[i]->data() + place->offset, 4096, 7));
  // All that are bound are named again, and no more than asked for are.
  EXPECT_EQ(pool->shown()->Bind(1, 0)->size(), 2u);
  EXPECT_EQ(pool->shown()->Bind(1, 6 * kMiB)->size(), 3u);
  mapped.clear();
  pool->Free(own);
  pool->Free(other);
  pool->shown()->TakeBack();
  pool->CheckInvariants();
  EXPECT_EQ(pool->free_slabs(), 18u);
}

TEST(ShownSlabs, SlabsThatATenantHasAreBoundBeforeFreeOnes) {
  const auto pool = MakePool(8 * kMiB);
  const PageId mine = pool->Allocate(1, 4096).value(), theirs = pool->Allocate(2, 4096).value();
  const uint32_t slab = pool->shown()->Showable(mine)->slab;
  EXPECT_EQ(*pool->shown()->Bind(1, 2 * kMiB), std::vector<uint32_t>{slab});
  // The free slab that another tenant wrote is not among those of the third.
  const PageId gone = pool->Allocate(2, 2 * kMiB).value();
  const uint32_t written = pool->shown()->Showable(gone)->slab;
  pool->Free(gone);
  const auto bound = pool->shown()->Bind(3, 8 * kMiB).value();
  EXPECT_EQ(bound.size(), 1u);
  EXPECT_EQ(std::count(bound.begin(), bound.end(), written), 0);
  const PageId again = pool->Allocate(3, 2 * kMiB).value();
  EXPECT_EQ(pool->shown()->Showable(again)->slab, bound[0]);
  pool->Free(theirs);
  pool->CheckInvariants();
}

TEST(ShownSlabs, HowManySlabsMayBeBound) {
  // 7/8 while nobody else has some, else half.
  ManualClock clock;
  const auto pool = MakePool(32 * kMiB, /*huge_pages=*/false, &clock);
  const auto take_back = [&] {
    clock.AdvanceNs(ShownSlabs::kMapWithinNs);
    pool->shown()->TakeBack();
  };
  EXPECT_EQ(pool->shown()->Bind(1, 64 * kMiB)->size(), 14u);
  take_back();
  const PageId other = pool->Allocate(2, 4096).value();
  EXPECT_EQ(pool->shown()->Bind(1, 64 * kMiB)->size(), 8u);
  EXPECT_EQ(pool->shown()->Bind(3, 64 * kMiB)->size(), 7u);  // one is cut
  take_back();
  pool->Free(other);
  // Within the payer's most, and without what others are guaranteed.
  pool->SetPayer(4, 4);
  pool->SetPayer(5, 4);
  pool->shares().SetQuota(4, {.guaranteed_bytes = 0, .most_bytes = 7 * kMiB});
  EXPECT_EQ(pool->shown()->Bind(4, 4 * kMiB)->size(), 2u);
  EXPECT_EQ(pool->shown()->Bind(5, 64 * kMiB)->size(), 1u);
  take_back();
  pool->shares().SetQuota(6, {.guaranteed_bytes = 20 * kMiB});
  EXPECT_EQ(pool->shown()->Bind(1, 64 * kMiB)->size(), 6u);
  // Its guarantee is more than half, but for the slab that another wrote.
  EXPECT_EQ(pool->shown()->Bind(6, 64 * kMiB)->size(), 9u);
  take_back();
  pool->CheckInvariants();
  EXPECT_EQ(pool->free_slabs(), 16u);
}

TEST(ShownSlabs, ManySlabsAreBoundInPieces) {
  const auto pool = MakePool(128 * kMiB);
  ShownSlabs& shown = *pool->shown();
  std::vector<PageId> own;
  for (int i = 0; i < 20; ++i) own.push_back(pool->Allocate(1, 2 * kMiB).value());
  auto binding = shown.BeginBind(1, 84 * kMiB).value();
  int pieces = 1;
  for (size_t before = 0; shown.BindSome(&binding); before = shown.count(), ++pieces) {
    EXPECT_LE(shown.count() - before, ShownSlabs::kBindsOfPiece);
    pool->CheckInvariants();
  }
  EXPECT_EQ(pieces, 3);
  EXPECT_EQ(shown.BoundTo(1).size(), 42u);
  // Who binds looks first for what nobody maps, in pieces too.
  binding = shown.BeginBind(2, 0).value();
  pieces = 1;
  for (size_t before = 42; shown.BindSome(&binding); before = shown.count(), ++pieces) {
    EXPECT_LE(before - shown.count(), ShownSlabs::kLooksOfPiece);
  }
  EXPECT_EQ(pieces, 7);
  EXPECT_EQ(shown.count(), 0u);
  for (const PageId id : own) pool->Free(id);
}

TEST(ShownSlabs, BoundSlabsThatNobodyMapsAreTakenBack) {
  ManualClock clock;
  const auto pool = MakePool(8 * kMiB, /*huge_pages=*/false, &clock);
  const auto bound = pool->shown()->Bind(1, 4 * kMiB).value();
  ASSERT_EQ(bound.size(), 2u);
  clock.AdvanceNs(ShownSlabs::kMapWithinNs - 1);
  pool->shown()->TakeBack();
  EXPECT_EQ(pool->shown()->count(), 2u);
  const auto mapped = MapBound(*pool, 1, bound[0]);
  clock.AdvanceNs(1);
  pool->shown()->TakeBack();
  EXPECT_EQ(pool->shown()->count(), 1u);
  EXPECT_EQ(pool->shown()->ShowBound(1, bound[1]).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(pool->free_slabs(), 3u);
  // One that was mapped is so as soon as nobody maps it any more.
  const auto again = pool->shown()->Bind(1, 4 * kMiB).value();
  for (const uint32_t slab : again) MapBound(*pool, 1, slab);
  pool->shown()->TakeBack();
  EXPECT_EQ(pool->shown()->count(), 1u);
}

TEST(ShownSlabs, WhoIsShortOfMemoryLooksAtThemNowAndThen) {
  ManualClock clock;
  const auto pool = MakePool(64 * kMiB, /*huge_pages=*/false, &clock);
  const auto bound = pool->shown()->Bind(1, 40 * kMiB).value();
  std::vector<std::unique_ptr<Region>> mapped;
  for (const uint32_t slab : bound) mapped.push_back(MapBound(*pool, 1, slab));
  EXPECT_FALSE(pool->shown()->TakeBackOne());
  mapped.pop_back();
  EXPECT_TRUE(pool->shown()->TakeBackOne());  // it had not looked at all of them
  EXPECT_FALSE(pool->shown()->TakeBackOne());
  EXPECT_FALSE(pool->shown()->TakeBackOne());
  mapped.clear();
  EXPECT_FALSE(pool->shown()->TakeBackOne());
  clock.AdvanceNs(ShownSlabs::kQuietNs);
  for (size_t i = 1; i < bound.size(); ++i) EXPECT_TRUE(pool->shown()->TakeBackOne());
  EXPECT_FALSE(pool->shown()->TakeBackOne());
  EXPECT_EQ(pool->free_slabs(), 32u);
  // So does who binds again and again.
  EXPECT_EQ(pool->shown()->Bind(1, 2 * kMiB)->size(), 1u);
  EXPECT_EQ(pool->shown()->BeginBind(1, 0)->looks, 1u);
  EXPECT_EQ(pool->shown()->Bind(1, 0)->size(), 1u);
  EXPECT_EQ(pool->shown()->BeginBind(1, 0)->looks, 0u);
  clock.AdvanceNs(ShownSlabs::kQuietNs);
  EXPECT_EQ(pool->shown()->BeginBind(1, 0)->looks, 1u);
}

TEST(ShownSlabs, NobodyGivesWhatLiesInBoundSlabs) {
  const auto pool = MakePool(8 * kMiB);
  const auto bound = pool->shown()->Bind(1, 6 * kMiB).value();
  ASSERT_EQ(bound.size(), 3u);
  std::vector<std::unique_ptr<Region>> mapped;
  for (const uint32_t slab : bound) mapped.push_back(MapBound(*pool, 1, slab));
  std::vector<PageId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(pool->Allocate(1, 2 * kMiB).value());
  const PageId other = pool->Allocate(2, kMiB).value();
  for (const PageId id : ids) pool->SetReclaimable(id, true);
  pool->SetReclaimable(other, true);
  const SlotPool::SlotsWanted wanted{2 * kMiB, 1};
  EXPECT_TRUE(pool->CanAllocate(2, {&wanted, 1}, /*reclaim=*/true));
  EXPECT_EQ(pool->NextToGive(2, {&wanted, 1}, [](PayerId) { return true; }), 2u);
  for (const PageId id : ids) pool->SetReclaimable(id, false);
  pool->SetReclaimable(other, false);
}

TEST(ShownSlabs, SlabsThatHoldNothingAreRecalledWhileOthersLackSome) {
  ManualClock clock;
  const auto pool = MakePool(32 * kMiB, /*huge_pages=*/false, &clock);
  std::vector<std::unique_ptr<Region>> mapped;
  const auto bound = pool->shown()->Bind(1, 64 * kMiB).value();
  ASSERT_EQ(bound.size(), 14u);
  for (const uint32_t slab : bound) mapped.push_back(MapBound(*pool, 1, slab));
  const PageId used = pool->Allocate(1, 4096).value();
  clock.AdvanceNs(ShownSlabs::kMapWithinNs);
  // Two are free.
  EXPECT_EQ(pool->shown()->Recalled(2).size(), 0u);
  const PageId one = pool->Allocate(2, 2 * kMiB).value();
  EXPECT_EQ(pool->shown()->Recalled(2).size(), 13u);
  const auto recalled = pool->shown()->Recalled(2);
  EXPECT_EQ(std::count(recalled.begin(), recalled.end(), pool->shown()->Showable(used)->slab), 0);
  // Who has them keeps half of the pool, and all while nobody else has memory.
  EXPECT_EQ(pool->shown()->Recalled(1).size(), 6u);
  pool->Free(one);
  const PageId own = pool->Allocate(1, 2 * kMiB).value();
  EXPECT_EQ(pool->shown()->Recalled(1).size(), 0u);
  pool->Free(own);
  // Not those that are bound lately.
  mapped.clear();
  pool->shown()->TakeBack();
  EXPECT_EQ(pool->shown()->Bind(1, 64 * kMiB)->size(), 14u);
  const PageId two = pool->Allocate(2, 4 * kMiB / 2).value();
  EXPECT_EQ(pool->shown()->Recalled(2).size(), 0u);
  pool->Free(two);
  pool->Free(used);
  pool->CheckInvariants();
}

TEST(ShownSlabs, ALaterDaemonLeavesWhatIsStillMappedToItsTenant) {
  PagePool::Options options;
  options.pool_bytes = 6 * kMiB;
  options.slab_bytes = 2 * kMiB;
  options.keep = true;
  auto pool = PagePool::Create(options).value();
  const PageId kept = pool->Allocate(1, kMiB).value(), gone = pool->Allocate(1, 2 * kMiB).value();
  const uint32_t kept_slab = pool->shown()->Showable(kept)->slab, gone_slab = pool->shown()->Showable(gone)->slab;
  auto of_kept = MapShown(*pool, kept_slab), of_gone = MapShown(*pool, gone_slab);
  const SlabAllocator::SlotPlace place = pool->SlotPlaceOf(kept);
  for (const auto& region : pool->regions()) options.kept.push_back(dup(region->keeper_fd()));
  pool.reset();
  pool = PagePool::Create(options).value();
  ASSERT_TRUE(pool->Restore({{{1, place}}})[0].valid());
  pool->CheckInvariants();
  EXPECT_EQ(pool->shown()->count(), 2u);
  // One slab is free; nobody gets the one of which nothing was restored, and only its tenant the other.
  EXPECT_TRUE(pool->CanAllocate(2, {{2 * kMiB, 1}}));
  EXPECT_FALSE(pool->CanAllocate(2, {{2 * kMiB, 2}}));
  EXPECT_FALSE(pool->CanAllocate(1, {{2 * kMiB, 2}}));
  of_kept.reset();
  of_gone.reset();
  pool->shown()->TakeBack();
  pool->CheckInvariants();
  EXPECT_EQ(pool->shown()->count(), 0u);
  EXPECT_TRUE(pool->CanAllocate(2, {{2 * kMiB, 2}}));
}

// Whose they are is not known any more, so they are taken for everybody's.
TEST(ShownSlabs, WhatIsStillMappedAfterARestartCountsAsBound) {
  PagePool::Options options;
  options.pool_bytes = 16 * kMiB;  // eight slabs
  options.slab_bytes = 2 * kMiB;
  options.keep = true;
  auto pool = PagePool::Create(options).value();
  std::vector<std::unique_ptr<Region>> mapped;
  const std::vector<uint32_t> bound = pool->shown()->Bind(1, 6 * kMiB).value();
  for (const uint32_t slab : bound) mapped.push_back(MapBound(*pool, 1, slab));
  ASSERT_EQ(mapped.size(), 3u);
  for (const auto& region : pool->regions()) options.kept.push_back(dup(region->keeper_fd()));
  pool.reset();
  pool = PagePool::Create(options).value();
  pool->Restore({});
  pool->shares().SetQuota(2, {.most_bytes = 8 * kMiB});
  pool->shares().SetQuota(3, {.guaranteed_bytes = 4 * kMiB});
  // What earlier daemons' tenants wrote may be bound once it is clean.
  while (const auto slab = pool->shown()->BeginCleaning()) {
    std::memset(pool->SlabData(*slab).data(), 0, pool->slab_bytes());
    pool->shown()->EndCleaning(*slab);
  }
  EXPECT_EQ(pool->free_slabs(), 5u);
  EXPECT_EQ(pool->shown()->Bind(1, 16 * kMiB)->size(), 1u);  // half
  EXPECT_EQ(pool->shown()->Bind(3, 16 * kMiB)->size(), 2u);  // its guarantee
  pool->CheckInvariants();
  mapped.clear();
  while (pool->shown()->count() > 0) pool->shown()->TakeBack();
  EXPECT_EQ(pool->shown()->Bind(1, 16 * kMiB)->size(), 5u);
  pool->CheckInvariants();
}

// Tenants allocate, free, map and unmap at random: through its mappings none ever sees a byte of another.
TEST(ShownSlabs, AMappingNeverShowsAByteOfAnotherTenant) {
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    const auto pool = MakePool((round % 2 == 0 ? 12 : 36) * kMiB);  // with small slabs from 32 MiB on
    struct Held {
      PageId id;
      TenantId tenant;
    };
    struct Mapped {
      std::unique_ptr<Region> memory;
      TenantId tenant;
    };
    std::vector<Held> held;
    std::vector<Mapped> mapped;
    for (int step = 0; step < 300; ++step) {
      const TenantId tenant = 1 + random() % 3;
      switch (random() % 8) {
        case 0:
        case 1: {
          const size_t bytes = 64 * 1024 << random() % 5;
          const auto id = pool->Allocate(tenant, bytes);
          if (!id.ok()) break;
          EXPECT_TRUE(IsFilledWith(pool->Data(*id), bytes, 0) || pool->Data(*id)[0] == tenant);
          std::memset(pool->Data(*id), static_cast<int>(tenant), bytes);
          held.push_back({*id, tenant});
          break;
        }
        case 2:
          if (held.empty()) break;
          std::swap(held[random() % held.size()], held.back());
          pool->Free(held.back().id);
          held.pop_back();
          break;
        case 3: {
          if (held.empty()) break;
          const Held& of = held[random() % held.size()];
          const auto place = pool->shown()->Showable(of.id);
          if (!place.has_value()) break;
          const auto fd = pool->shown()->Show(place->slab);
          if (!fd.ok()) break;  // half of the pool
          mapped.push_back({Region::Map(*fd, pool->slab_bytes(), /*writable=*/false).value(), of.tenant});
          break;
        }
        case 4:
          if (mapped.empty()) break;
          std::swap(mapped[random() % mapped.size()], mapped.back());
          mapped.pop_back();
          break;
        case 5: {
          const auto bound = pool->shown()->Bind(tenant, random() % 12 * kMiB);
          ASSERT_TRUE(bound.ok());
          for (const uint32_t slab : *bound) {
            const auto fd = pool->shown()->ShowBound(tenant, slab);
            ASSERT_TRUE(fd.ok()) << fd.status();
            mapped.push_back({Region::Map(*fd, pool->slab_bytes(), /*writable=*/false).value(), tenant});
          }
          break;
        }
        case 6:
          while (mapped.size() > 8) {
            std::swap(mapped[random() % mapped.size()], mapped.back());
            mapped.pop_back();
          }
          break;
        default:
          pool->shown()->TakeBack();
      }
      if (step % 20 != 0) continue;
      pool->CheckInvariants();
      for (const Mapped& each : mapped) {
        for (size_t at = 0; at < each.memory->bytes(); at += 512) {
          const uint8_t byte = each.memory->data()[at];
          ASSERT_TRUE(byte == 0 || byte == each.tenant) << round << " " << step;
        }
      }
    }
    mapped.clear();
    for (const Held& each : held) pool->Free(each.id);
    pool->shown()->TakeBack();
    pool->CheckInvariants();
    EXPECT_EQ(pool->used_bytes(), 0u);
    EXPECT_EQ(pool->free_slabs(), pool->slabs());
  }
}

}  // namespace
}  // namespace kvmanager
