#include "kvmanager/memory/slab_cleaner.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

constexpr uint64_t kSlabBytes = 4 << 20;  // two pieces

class SlabCleanerTest : public testing::Test {
 protected:
  static std::unique_ptr<PagePool> MakePool() {
    PagePool::Options options;
    options.pool_bytes = 4 * kSlabBytes;
    options.slab_bytes = kSlabBytes;
    options.huge_pages = false;
    return PagePool::Create(options).value();
  }
  ~SlabCleanerTest() override { workers_.Stop(); }

  /// Every slab was this tenant's.
  void WriteAll(TenantId tenant) {
    std::vector<PageId> ids;
    for (uint32_t i = 0; i < pool_->slabs(); ++i) ids.push_back(pool_->Allocate(tenant, kSlabBytes).value());
    for (const PageId id : ids) std::memset(pool_->Data(id), static_cast<int>(tenant), kSlabBytes);
    for (const PageId id : ids) pool_->Free(id);
  }
  void RunUntilIdle() {
    while (pool_->shown()->cleaning() > 0) {
      if (!queue_.RunSome()) std::this_thread::yield();
      pool_->CheckInvariants();
      EXPECT_EQ(pool_->used_bytes(), 0u);
    }
  }

  const std::unique_ptr<PagePool> pool_ = MakePool();
  MessageQueue queue_;
  WorkerPool workers_{1};
  SlabCleaner cleaner_{pool_.get(), &workers_, &queue_};
};

TEST_F(SlabCleanerTest, FreeSlabsAreCleanedForATenantThatLacksSome) {
  WriteAll(1);
  cleaner_.Look();
  EXPECT_EQ(pool_->shown()->cleaning(), 0u);  // nobody asks
  EXPECT_EQ(pool_->shown()->Bind(2, 4 * kSlabBytes)->size(), 0u);
  cleaner_.Look();
  EXPECT_EQ(pool_->shown()->cleaning(), 1u);
  EXPECT_EQ(pool_->free_slabs(), 3u);
  RunUntilIdle();
  EXPECT_EQ(pool_->free_slabs(), 4u);
  for (uint32_t slab = 0; slab < pool_->slabs(); ++slab) {
    const auto bytes = pool_->SlabData(slab);
    EXPECT_TRUE(bytes[0] == 0 && std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0) << slab;
  }
  EXPECT_EQ(pool_->shown()->Bind(2, 4 * kSlabBytes)->size(), 3u);  // 7/8
  cleaner_.Look();
  EXPECT_EQ(pool_->shown()->cleaning(), 0u);
}

TEST_F(SlabCleanerTest, WhoIsRefusedToBeShownASlabFindsCleanOnesLater) {
  WriteAll(1);
  const PageId unclean = pool_->Allocate(2, 4096).value();
  EXPECT_FALSE(pool_->shown()->Showable(unclean).has_value());
  pool_->Free(unclean);
  cleaner_.Look();
  RunUntilIdle();
  const PageId clean = pool_->Allocate(2, 4096).value();
  EXPECT_TRUE(pool_->shown()->Showable(clean).has_value());
  pool_->Free(clean);
}

TEST_F(SlabCleanerTest, TheLastFreeSlabIsLeft) {
  WriteAll(1);
  std::vector<PageId> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(pool_->Allocate(1, kSlabBytes).value());
  EXPECT_EQ(pool_->shown()->Bind(2, kSlabBytes)->size(), 0u);
  cleaner_.Look();
  EXPECT_EQ(pool_->shown()->cleaning(), 0u);
  for (const PageId id : ids) pool_->Free(id);
}

TEST_F(SlabCleanerTest, SlabsOfGuaranteesAreLeft) {
  WriteAll(1);
  const auto look_for = [&](TenantId tenant) {
    EXPECT_EQ(pool_->shown()->Bind(tenant, kSlabBytes)->size(), 0u);
    cleaner_.Look();
    return pool_->shown()->cleaning();
  };
  pool_->shares().SetQuota(3, {.guaranteed_bytes = 3 * kSlabBytes});
  EXPECT_EQ(look_for(2), 0u);
  pool_->shares().SetQuota(3, {.guaranteed_bytes = 2 * kSlabBytes});
  EXPECT_EQ(look_for(2), 1u);
  RunUntilIdle();
}

TEST_F(SlabCleanerTest, SlabsOfItsGuaranteeAreCleanedForATenant) {
  WriteAll(1);
  pool_->shares().SetQuota(2, {.guaranteed_bytes = 3 * kSlabBytes});
  pool_->shares().SetQuota(3, {.guaranteed_bytes = kSlabBytes});
  EXPECT_EQ(pool_->shown()->Bind(2, kSlabBytes)->size(), 0u);
  cleaner_.Look();
  EXPECT_EQ(pool_->shown()->cleaning(), 1u);
  RunUntilIdle();
  EXPECT_EQ(pool_->shown()->Bind(2, kSlabBytes)->size(), 1u);
}

}  // namespace
}  // namespace kvmanager
