#include "kvmanager/memory/page_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <set>

#include "kvmanager/memory/pool_testing.h"

namespace kvmanager {
namespace {

using testing::IsFilledWith;
using testing::kMiB;
using testing::MakePool;

TEST(PagePool, RefusesBadSizes) {
  const auto code = [](uint64_t pool_bytes, uint64_t slab_bytes) {
    PagePool::Options options;
    options.pool_bytes = pool_bytes;
    options.slab_bytes = slab_bytes;
    return PagePool::Create(options).status().code();
  };
  EXPECT_EQ(code(0, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(2 * kMiB - 1, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(4 * kMiB, 3 * kMiB), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(4 * kMiB, 6 * kMiB), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(PagePool::kPoolBytesMax + 1, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(PagePool::kPoolBytesMax, 0), absl::StatusCode::kResourceExhausted);
  auto pool = MakePool(4 * kMiB);
  EXPECT_FALSE(pool->Allocate(1, 0).ok());
  EXPECT_FALSE(pool->Allocate(1, 2 * kMiB + 1).ok());
  EXPECT_FALSE(pool->CanAllocate(1, {{2 * kMiB + 1, 0}}));
}

TEST(PagePool, HugePagesFallBack) {
  auto pool = MakePool(4 * kMiB, /*huge_pages=*/true);
  const std::string state = pool->huge_page_state();
  EXPECT_TRUE(state == "hugetlb" || state == "transparent" || state == "none") << state;
  auto id = pool->Allocate(1, 2 * kMiB);
  ASSERT_TRUE(id.ok());
  std::memset(pool->Data(*id), 1, 2 * kMiB);
}

TEST(PagePool, ExhaustsExactlyWhereCanAllocateSays) {
  auto pool = MakePool(4 * kMiB);
  const size_t bytes = 300 * 1024;  // 6 to a slab
  EXPECT_TRUE(pool->CanAllocate(1, {{bytes, 12}}));
  EXPECT_FALSE(pool->CanAllocate(1, {{bytes, 13}}));
  std::vector<PageId> ids;
  for (int i = 0; i < 12; ++i) {
    auto id = pool->Allocate(1, bytes);
    ASSERT_TRUE(id.ok());
    ids.push_back(*id);
  }
  const auto refused = pool->Allocate(1, bytes);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(refused.status().message()).find("host-pool-bytes"), std::string::npos);
  for (PageId id : ids) pool->Free(id);
  EXPECT_EQ(pool->used_bytes(), 0u);
  EXPECT_EQ(pool->free_slabs(), 2u);
}

TEST(PagePool, LargePoolsHaveAMemfdForEachSlab) {
  for (const uint64_t pool_bytes : {64 * kMiB, uint64_t{40} << 30, PagePool::kPoolBytesMax}) {
    const uint64_t slab_bytes = PagePool::SlabBytesFor(pool_bytes);
    EXPECT_LE(pool_bytes / slab_bytes, PagePool::kRegionsMax) << pool_bytes;
    EXPECT_GE(pool_bytes / slab_bytes, 32u) << pool_bytes;
    EXPECT_EQ(slab_bytes % PagePool::kSlabBytesMin, 0u);
  }
}

TEST(PagePool, ManySlabsKeepFewDescriptors) {
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);

  const auto open_descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = open_descriptors();
  const auto small = MakePool(16 * kMiB);
  EXPECT_EQ(open_descriptors(), before + 8);
  const auto large = MakePool(2 * (PagePool::kRegionsMax + 3) * kMiB);
  EXPECT_LE(open_descriptors(), before + 8 + static_cast<int64_t>(PagePool::kRegionsMax));
  // Every slab is in exactly one region, in order.
  uint32_t slab = 0;
  for (const auto& region : large->regions()) {
    for (uint64_t at = 0; at < region->bytes(); at += large->slab_bytes()) {
      EXPECT_EQ(large->SlabData(slab++).data(), region->data() + at);
    }
  }
  EXPECT_EQ(slab, large->slabs());
}

TEST(PagePool, OthersMapItsRegionsForReadingOnly) {
  const auto pool = MakePool(4 * kMiB);
  const auto id = pool->Allocate(1, 4096);
  ASSERT_TRUE(id.ok());
  std::memset(pool->Data(*id), 7, 4096);
  const Region& region = *pool->regions()[0];
  EXPECT_FALSE(Region::Map(dup(region.fd()), region.bytes(), /*writable=*/true).ok());
  const auto mapped = Region::Map(dup(region.fd()), region.bytes(), /*writable=*/false);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_TRUE(IsFilledWith((*mapped)->data() + (pool->Data(*id) - region.data()), 4096, 7));
}

// What CanAllocate says of reclaimable slots against what happens when they are freed.
TEST(PagePool, ForetellsWhatReclaimingGives) {
  std::mt19937 random(7);
  const size_t sizes[] = {700 * 1024, 400 * 1024, 1024 * 1024, 40000, 5000};
  for (int round = 0; round < 200; ++round) {
    auto pool = MakePool((round % 2 == 0 ? 8 : 32) * kMiB);             // with small slabs from 32 MiB on
    for (const TenantId tenant : {1, 2, 3}) pool->SetPayer(tenant, 7);  // who may take all of its own
    std::vector<PageId> kept, reclaimable;
    for (int i = 0; i < (round % 2 == 0 ? 40 : 160); ++i) {
      const auto id = pool->Allocate(1 + random() % 2, sizes[random() % 2 + (round % 2 == 0 ? 0 : 3 * (random() % 2))]);
      if (!id.ok()) continue;
      if (random() % 4 == 0) {
        pool->Free(*id);
      } else if (random() % 4 == 0) {
        kept.push_back(*id);
      } else {
        pool->SetReclaimable(*id, true);
        reclaimable.push_back(*id);
      }
    }
    pool->CheckInvariants();
    const TenantId tenant = 1 + random() % 3;
    const PagePool::SlotsWanted wanted[] = {{sizes[random() % 5], random() % 5},
                                            {sizes[random() % 5], random() % (round % 2 == 0 ? 5 : 40)},
                                            {sizes[random() % 5], random() % 5}};
    const bool foretold = pool->CanAllocate(tenant, wanted, /*reclaim=*/true);
    if (pool->CanAllocate(tenant, wanted)) {
      EXPECT_TRUE(foretold);
    }
    for (PageId id : reclaimable) {
      pool->SetReclaimable(id, false);
      pool->Free(id);
    }
    EXPECT_EQ(pool->reclaimable_bytes(), 0u);
    EXPECT_EQ(pool->CanAllocate(tenant, wanted), foretold);
    bool done = true;
    for (const auto& [bytes, count] : wanted) {
      for (uint64_t i = 0; i < count; ++i) done &= pool->Allocate(tenant, bytes).ok();
    }
    EXPECT_EQ(done, foretold);
  }
}

TEST(PagePool, TenantsNeverShareASlabNorSeeOldBytes) {
  auto pool = MakePool(4 * kMiB);
  auto a = pool->Allocate(1, 1 << 20);
  auto b = pool->Allocate(2, 1 << 20);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_FALSE(pool->CanAllocate(3, {{1024, 1}}));
  EXPECT_FALSE(pool->Allocate(3, 1024).ok());
  std::memset(pool->Data(*a), 0xaa, 1 << 20);
  pool->Free(*a);
  auto c = pool->Allocate(3, 2 << 20);
  ASSERT_TRUE(c.ok());
  EXPECT_TRUE(IsFilledWith(pool->Data(*c), 2 << 20, 0));
}

TEST(PagePool, StaleIdsAreRecognised) {
  auto pool = MakePool(2 * kMiB);
  std::set<PageId> seen;
  for (int i = 0; i < 200; ++i) {
    // Sizes change, so that slabs are laid out anew over the same numbers.
    auto id = pool->Allocate(1 + i % 2, 1024 << (i % 5));
    ASSERT_TRUE(id.ok());
    EXPECT_TRUE(seen.insert(*id).second);
    EXPECT_TRUE(pool->IsCurrent(*id));
    pool->Free(*id);
    for (PageId old : seen) ASSERT_FALSE(pool->IsCurrent(old));
  }
  EXPECT_FALSE(pool->IsCurrent(PageId()));
  EXPECT_FALSE(pool->IsCurrent(PageId{0, 0}));
  EXPECT_FALSE(pool->IsCurrent(PageId{UINT32_MAX - 1, 1}));
}

TEST(PagePoolDeathTest, StaleUseAborts) {
  auto pool = MakePool(2 * kMiB);
  auto id = pool->Allocate(1, 4096);
  ASSERT_TRUE(id.ok());
  pool->Free(*id);
  EXPECT_DEATH(pool->Data(*id), "broken invariant");
  EXPECT_DEATH(pool->Free(*id), "broken invariant");
}

struct Held {
  TenantId tenant;
  size_t bytes;
  uint8_t fill;
};

// Random operations against what was handed out: bytes stay, ids are unique, counts are exact, no byte crosses tenants.
TEST(PagePool, RandomOperationsAgainstAModel) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    auto pool = MakePool((seed % 2 == 0 ? 8 : 32) * kMiB);  // with small slabs from 32 MiB on
    std::map<PageId, Held> held;
    const size_t sizes[] = {1, 1024, 5000, 65536, 100000, 700000, 2 << 20};
    for (int step = 0; step < 3000; ++step) {
      if (random() % 5 < 3) {
        const TenantId tenant = 1 + random() % 3;
        const size_t bytes = sizes[random() % std::size(sizes)];
        size_t count = 0;
        for (size_t more = 32768; more > 0; more /= 2) {
          if (pool->CanAllocate(tenant, {{bytes, count + more}})) count += more;
        }
        auto id = pool->Allocate(tenant, bytes);
        ASSERT_EQ(id.ok(), count > 0);
        if (!id.ok()) continue;
        EXPECT_EQ(pool->CanAllocate(tenant, {{bytes, count - 1}}), true);
        EXPECT_EQ(pool->CanAllocate(tenant, {{bytes, count}}), false);
        uint8_t* data = pool->Data(*id);
        ASSERT_EQ(reinterpret_cast<uintptr_t>(data) % PagePool::kSlotAlign, 0u);
        ASSERT_GE(pool->SlotBytes(*id), bytes);
        // Old bytes, if any, are this tenant's: fills are tenant * 64 + something.
        for (size_t i = 0; i < bytes; i += 61) ASSERT_TRUE(data[i] == 0 || data[i] / 64 == tenant);
        const uint8_t fill = static_cast<uint8_t>(tenant * 64 + random() % 64);
        std::memset(data, fill, bytes);
        ASSERT_TRUE(held.emplace(*id, Held{tenant, bytes, fill}).second);
      } else if (!held.empty()) {
        auto it = std::next(held.begin(), random() % held.size());
        ASSERT_TRUE(IsFilledWith(pool->Data(it->first), it->second.bytes, it->second.fill));
        pool->Free(it->first);
        ASSERT_FALSE(pool->IsCurrent(it->first));
        held.erase(it);
      }
      uint64_t used = 0;
      for (const auto& [id, h] : held) used += pool->SlotBytes(id);
      ASSERT_EQ(used, pool->used_bytes());
      if (step % 16 == 0) pool->CheckInvariants();
    }
    for (const auto& [id, h] : held) ASSERT_TRUE(IsFilledWith(pool->Data(id), h.bytes, h.fill));
  }
}

}  // namespace
}  // namespace kvmanager
