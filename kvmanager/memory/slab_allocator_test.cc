#include "kvmanager/memory/slab_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint64_t kSlabBytes = 64 << 10;

SlabAllocator::Options Slabs(uint32_t slabs) {
  SlabAllocator::Options options;
  options.slab_bytes = kSlabBytes;
  options.slabs = slabs;
  options.limit = "test-pool-bytes";
  return options;
}

absl::Status NothingToClean(uint32_t slab) { return absl::OkStatus(); }

bool CanAllocate(const SlabAllocator& allocator, TenantId tenant, size_t bytes, uint64_t count, bool reclaim = false) {
  const SlabAllocator::SlotsWanted wanted{bytes, count};
  return allocator.CanAllocate(tenant, {&wanted, 1}, reclaim);
}

TEST(SlabAllocator, CleansOnceWhenASlabChangesTenant) {
  SlabAllocator allocator(Slabs(1));
  std::vector<uint32_t> cleaned;
  const auto clean = [&](uint32_t slab) {
    cleaned.push_back(slab);
    return absl::OkStatus();
  };
  for (const TenantId tenant : {1, 1, 2, 2, 1}) {
    const auto id = allocator.Allocate(tenant, 4096, clean);
    ASSERT_TRUE(id.ok());
    allocator.Free(*id);
  }
  EXPECT_EQ(cleaned, (std::vector<uint32_t>{0, 0}));
}

TEST(SlabAllocator, WhatCannotBeCleanedStaysFree) {
  SlabAllocator allocator(Slabs(1));
  const auto first = allocator.Allocate(1, 4096, NothingToClean);
  ASSERT_TRUE(first.ok());
  allocator.Free(*first);
  const auto refuse = [](uint32_t) { return absl::UnavailableError("the device is gone"); };
  EXPECT_EQ(allocator.Allocate(2, 4096, refuse).status().code(), absl::StatusCode::kUnavailable);
  allocator.CheckInvariants();
  EXPECT_EQ(allocator.free_slabs(), 1u);
  int cleanings = 0;
  EXPECT_TRUE(allocator
                  .Allocate(2, 4096,
                            [&](uint32_t) {
                              ++cleanings;
                              return absl::OkStatus();
                            })
                  .ok());
  EXPECT_EQ(cleanings, 1);
}

TEST(SlabAllocator, BoundSlabsStayTheirTenantsUntilRestored) {
  SlabAllocator allocator(Slabs(1));
  const auto id = allocator.Allocate(1, kSlabBytes, NothingToClean);
  ASSERT_TRUE(id.ok());
  allocator.Bind(0);
  allocator.Free(*id);
  EXPECT_EQ(allocator.free_slabs(), 0u);
  EXPECT_EQ(allocator.kept_slabs(), 1u);
  EXPECT_FALSE(CanAllocate(allocator, 2, 1024, 1));
  const auto refused = allocator.Allocate(2, 1024, NothingToClean);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(refused.status().message()).find("others may map"), std::string::npos);
  EXPECT_TRUE(CanAllocate(allocator, 1, 1024, kSlabBytes / 1024));
  const auto again = allocator.Allocate(1, 1024, NothingToClean);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(allocator.kept_slabs(), 0u);
  allocator.Free(*again);
  allocator.Withdraw(0);
  allocator.CheckInvariants();
  EXPECT_FALSE(CanAllocate(allocator, 1, 1024, 1));
  EXPECT_FALSE(allocator.Allocate(1, 1024, NothingToClean).ok());
  allocator.Restore(0);
  EXPECT_EQ(allocator.kept_slabs(), 0u);
  EXPECT_FALSE(allocator.IsCurrent(*again));
  EXPECT_TRUE(allocator.Allocate(2, 1024, [](uint32_t) { return absl::InternalError("already clean"); }).ok());
  allocator.CheckInvariants();
}

// Random operations against a model of who may use which slab: a slab never changes tenant while bound, nor uncleaned.
TEST(SlabAllocator, RandomOperationsAgainstAModel) {
  struct ModelSlab {
    int slots = 0;
    bool bound = false, withdrawn = false;
    TenantId written_by = 0;  // 0: nobody since it was cleaned
  };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    SlabAllocator allocator(Slabs(5));
    std::vector<ModelSlab> slabs(5);
    std::map<PageId, TenantId> held;
    std::map<PageId, bool> reclaimable;
    const size_t sizes[] = {1, 5000, 20000, 40000, kSlabBytes};
    for (int step = 0; step < 2000; ++step) {
      const uint32_t slab = random() % slabs.size();
      ModelSlab& model = slabs[slab];
      switch (random() % 8) {
        case 0:
        case 1:
        case 2: {
          const TenantId tenant = 1 + random() % 3;
          const size_t bytes = sizes[random() % std::size(sizes)];
          const bool foretold = CanAllocate(allocator, tenant, bytes, 1);
          const auto id = allocator.Allocate(tenant, bytes, [&](uint32_t cleaned) {
            EXPECT_NE(slabs[cleaned].written_by, tenant);
            EXPECT_FALSE(slabs[cleaned].bound);
            slabs[cleaned].written_by = 0;
            return absl::OkStatus();
          });
          ASSERT_EQ(id.ok(), foretold);
          if (!id.ok()) break;
          ModelSlab& used = slabs[allocator.PlaceOf(*id).slab];
          ASSERT_FALSE(used.withdrawn);
          ASSERT_TRUE(used.written_by == 0 || used.written_by == tenant);
          used.written_by = tenant;
          ++used.slots;
          held[*id] = tenant;
          if (random() % 3 == 0) {
            allocator.SetReclaimable(*id, true);
            reclaimable[*id] = true;
          }
          break;
        }
        case 3:
        case 4:
        case 5: {
          if (held.empty()) break;
          const auto it = std::next(held.begin(), random() % held.size());
          --slabs[allocator.PlaceOf(it->first).slab].slots;
          if (reclaimable.erase(it->first) > 0) allocator.SetReclaimable(it->first, false);
          allocator.Free(it->first);
          held.erase(it);
          break;
        }
        case 6:
          if (model.slots > 0) {
            allocator.Bind(slab);
            model.bound = true;
          }
          break;
        case 7:
          if (model.withdrawn) {
            allocator.Restore(slab);
            model = ModelSlab();
          } else if (model.bound && model.slots == 0) {
            allocator.Withdraw(slab);
            model.withdrawn = true;
          }
          break;
      }
      allocator.CheckInvariants();
      for (uint32_t i = 0; i < slabs.size(); ++i) ASSERT_EQ(allocator.InUse(i), slabs[i].slots > 0);
    }
    // What reclaiming gives is foretold with bound slabs too.
    const TenantId tenant = 1 + random() % 3;
    uint64_t count = 0;
    while (CanAllocate(allocator, tenant, 20000, count + 1, /*reclaim=*/true)) ++count;
    for (const auto& [id, marked] : reclaimable) {
      allocator.SetReclaimable(id, false);
      allocator.Free(id);
    }
    for (uint64_t i = 0; i <= count; ++i) {
      ASSERT_EQ(allocator.Allocate(tenant, 20000, NothingToClean).ok(), i < count);
    }
  }
}

}  // namespace
}  // namespace kvmanager
