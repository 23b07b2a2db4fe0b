// The pool's rules, with memory of the host in the GPU's place; device_memory_test.cc has the GPU's.
#include "kvmanager/memory/device_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace kvmanager {
namespace {

constexpr uint64_t kSlabBytes = 32 << 10;

/// Zeroed memory; every Make gives a slab new memory of a number never used before, so that a test sees what importers
/// could still map.
class FakeMemory : public SlabMemory {
 public:
  explicit FakeMemory(uint32_t slabs) : bytes_(slabs * kSlabBytes, 0xee), allocation_(slabs, 0) {}
  uint8_t* data() const override { return const_cast<uint8_t*>(bytes_.data()); }
  uint64_t slab_bytes() const override { return kSlabBytes; }
  uint32_t slabs() const override { return static_cast<uint32_t>(allocation_.size()); }
  absl::Status Make(uint32_t slab) override {
    EXPECT_EQ(allocation_[slab], 0u);
    if (out_of_memory || made_ == makes_max) return absl::ResourceExhaustedError("no memory");
    allocation_[slab] = ++made_;
    return Zero(slab);
  }
  void Unmake(uint32_t slab) override {
    EXPECT_NE(allocation_[slab], 0u);
    allocation_[slab] = 0;
    std::memset(data() + slab * kSlabBytes, 0xee, kSlabBytes);
  }
  absl::Status Zero(uint32_t slab) override {
    EXPECT_NE(allocation_[slab], 0u);
    ++zeroings;
    std::memset(data() + slab * kSlabBytes, 0, kSlabBytes);
    return absl::OkStatus();
  }
  absl::StatusOr<int> Export(uint32_t slab) override { return static_cast<int>(allocation_[slab]); }

  uint32_t makes_max = UINT32_MAX;
  bool out_of_memory = false;
  int zeroings = 0;

 private:
  std::vector<uint8_t> bytes_;
  std::vector<uint32_t> allocation_;  // [slab] 0: none
  uint32_t made_ = 0;
};

struct TestPool {
  explicit TestPool(uint32_t slabs) {
    auto owned = std::make_unique<FakeMemory>(slabs);
    memory = owned.get();
    auto made = DevicePool::Create(std::move(owned));
    EXPECT_TRUE(made.ok()) << made.status();
    pool = *std::move(made);
  }
  std::unique_ptr<DevicePool> pool;
  FakeMemory* memory;
};

TEST(DevicePool, SaysHowMuchTheDeviceGave) {
  auto memory = std::make_unique<FakeMemory>(4);
  memory->makes_max = 3;
  const auto pool = DevicePool::Create(std::move(memory));
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(pool.status().message());
  EXPECT_NE(message.find("device-pool-bytes"), std::string::npos) << message;
  EXPECT_NE(message.find("only 3 slabs"), std::string::npos) << message;
}

TEST(DevicePool, NamesSlotsByTheirDistanceInUnits) {
  TestPool test(3);
  std::set<uint32_t> units;
  for (int i = 0; i < 9; ++i) {
    const auto id = test.pool->Allocate(1, 9000);  // 3 to a slab
    ASSERT_TRUE(id.ok());
    const uint32_t unit = test.pool->SlotUnit(*id);
    EXPECT_EQ(test.pool->data() + uint64_t{unit} * DevicePool::kSlotUnitBytes, test.pool->Data(*id));
    EXPECT_TRUE(units.insert(unit).second);
    EXPECT_EQ(unit * DevicePool::kSlotUnitBytes / kSlabBytes, test.pool->SlabOf(*id));
  }
  EXPECT_EQ(test.pool->Allocate(1, 9000).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(DevicePool, ASlabThatWasNotExportedIsZeroedForTheNextTenant) {
  TestPool test(1);
  const auto id = test.pool->Allocate(1, kSlabBytes);
  std::memset(test.pool->Data(*id), 7, kSlabBytes);
  test.pool->Free(*id);
  const int before = test.memory->zeroings;
  const auto next = test.pool->Allocate(2, kSlabBytes);
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(test.memory->zeroings, before + 1);
  EXPECT_EQ(test.pool->Data(*next)[kSlabBytes - 1], 0);
}

TEST(DevicePool, AnExportedSlabIsMadeAnewOnceItsImportersAreGone) {
  TestPool test(1);
  const auto id = test.pool->Allocate(1, 1024);
  ASSERT_TRUE(id.ok());
  const int first = *test.pool->Export(0), second = *test.pool->Export(0);
  EXPECT_EQ(first, second);
  EXPECT_EQ(test.pool->importers(0), 2u);
  test.pool->Free(*id);
  EXPECT_EQ(test.pool->used_bytes(), kSlabBytes);  // importers could still write it
  EXPECT_FALSE(test.pool->CanAllocate(2, {{1024, 1}}));
  EXPECT_FALSE(test.pool->Allocate(2, 1024).ok());
  const auto same_tenant = test.pool->Allocate(1, 2048);
  ASSERT_TRUE(same_tenant.ok());
  EXPECT_EQ(test.pool->used_bytes(), 2048u);
  test.pool->ImporterGone(0);
  test.pool->ImporterGone(0);
  EXPECT_EQ(*test.memory->Export(0), first);  // in use: not made anew under its pages
  test.pool->Free(*same_tenant);
  EXPECT_EQ(test.pool->used_bytes(), 0u);
  const auto other = test.pool->Allocate(2, 1024);
  ASSERT_TRUE(other.ok());
  EXPECT_NE(*test.memory->Export(0), first);
  EXPECT_EQ(test.pool->Data(*other)[0], 0);
  test.pool->CheckInvariants();
}

TEST(DevicePool, ALostSlabComesBackWhenThereIsMemoryAgain) {
  TestPool test(1);
  const auto id = test.pool->Allocate(1, 1024);
  ASSERT_TRUE(test.pool->Export(0).ok());
  test.pool->Free(*id);
  test.memory->makes_max = 1;
  test.pool->ImporterGone(0);
  EXPECT_EQ(test.pool->lost_slabs(), 1u);
  EXPECT_EQ(test.pool->used_bytes(), kSlabBytes);
  EXPECT_FALSE(test.pool->CanAllocate(1, {{1024, 1}}));
  EXPECT_FALSE(test.pool->Allocate(1, 1024).ok());
  test.pool->CheckInvariants();
  test.memory->makes_max = UINT32_MAX;
  EXPECT_TRUE(test.pool->Allocate(2, 1024).ok());
  EXPECT_EQ(test.pool->lost_slabs(), 0u);
  test.pool->CheckInvariants();
}

// Tenants' bytes and importers: memory that somebody imported never holds another tenant's bytes.
TEST(DevicePool, RandomOperationsAgainstAModel) {
  struct Held {
    TenantId tenant;
    uint8_t fill;
    size_t bytes;
  };
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    TestPool test(4);
    std::map<PageId, Held> held;
    std::map<int, TenantId> mapped_by;  // allocation number to the tenant that it was exported to
    std::vector<uint32_t> importers;    // slabs
    const size_t sizes[] = {1, 3000, 9000, kSlabBytes};
    for (int step = 0; step < 3000; ++step) {
      const int choice = random() % 10;
      if (choice < 4) {
        const TenantId tenant = 1 + random() % 3;
        const size_t bytes = sizes[random() % std::size(sizes)];
        const bool foretold = test.pool->CanAllocate(tenant, {{bytes, 1}});
        const uint64_t lost = test.pool->lost_slabs();
        const auto id = test.pool->Allocate(tenant, bytes);
        ASSERT_TRUE(id.ok() == foretold || (id.ok() && lost > 0));
        if (!id.ok()) continue;
        uint8_t* data = test.pool->Data(*id);
        for (size_t i = 0; i < bytes; i += 37) ASSERT_TRUE(data[i] == 0 || data[i] / 64 == tenant);
        const auto mapped = mapped_by.find(*test.memory->Export(test.pool->SlabOf(*id)));
        ASSERT_TRUE(mapped == mapped_by.end() || mapped->second == tenant);
        const uint8_t fill = static_cast<uint8_t>(tenant * 64 + random() % 64);
        std::memset(data, fill, bytes);
        held[*id] = Held{tenant, fill, bytes};
      } else if (choice < 7) {
        if (held.empty()) continue;
        const auto it = std::next(held.begin(), random() % held.size());
        const uint8_t* data = test.pool->Data(it->first);
        for (size_t i = 0; i < it->second.bytes; i += 37) ASSERT_EQ(data[i], it->second.fill);
        test.pool->Free(it->first);
        held.erase(it);
      } else if (choice == 7) {
        if (held.empty()) continue;
        const auto it = std::next(held.begin(), random() % held.size());
        const uint32_t slab = test.pool->SlabOf(it->first);
        const auto fd = test.pool->Export(slab);
        ASSERT_TRUE(fd.ok());
        ASSERT_EQ(mapped_by.emplace(*fd, it->second.tenant).first->second, it->second.tenant);
        importers.push_back(slab);
      } else if (choice == 8) {
        if (importers.empty()) continue;
        const size_t which = random() % importers.size();
        test.pool->ImporterGone(importers[which]);
        importers.erase(importers.begin() + which);
      } else {
        test.memory->out_of_memory = random() % 2 == 0;
        test.pool->RemakeLost();
      }
      test.pool->CheckInvariants();
    }
  }
}

}  // namespace
}  // namespace kvmanager
