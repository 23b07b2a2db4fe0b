// Blocks that clients want kept longer, or less long: in one memory, in two, and on a disk; of one tenant and of two.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/store/disk_fixture.h"
#include "kvmanager/store/fake_disk.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::FakeDisk;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::TestDevice;
using testing::Text;

constexpr uint64_t kSlabBytes = 2 << 20;
constexpr uint64_t kBlockBytes = 2 * 8192;
constexpr int kRun = 64;  // blocks of a sequence: half a slab
constexpr int64_t kMs = 1000000;

class PageStoreRetainTest : public testing::PageStoreTest {
 protected:
  CacheId Open(const std::string& tenant = "a") { return test().Open(MakeConfig("raw", 0, tenant)); }
  // Publishes a sequence and drops it.
  std::vector<BlockName> Publish(CacheId cache, uint32_t salt, int blocks = kRun) {
    const Text text = MakeText(blocks * kPage, salt);
    const SequenceId sequence = Create(cache);
    const absl::Status status = test().AppendAll(cache, sequence, text, 0, blocks * kPage);
    EXPECT_TRUE(status.ok()) << status;
    auto names = Names(cache, text, blocks);
    EXPECT_EQ(store().Publish(sequence, names).ok(), status.ok());
    store().Drop(sequence);
    return names;
  }
  RetainResult Retain(CacheId cache, const std::vector<BlockName>& names, uint32_t priority, uint64_t ttl_ms = 0) {
    const auto retained = store().caches().Retain(cache, names, priority, ttl_ms);
    EXPECT_TRUE(retained.ok()) << retained.status();
    return retained.value_or(RetainResult());
  }
  // So many are there; of a prefix whose beginning may be lost.
  int There(CacheId cache, const std::vector<BlockName>& names) {
    int there = 0;
    for (const BlockExplanation& block : Explain(cache, names).blocks) there += block.place != BlockPlace::kNowhere;
    return there;
  }
  int Hits(CacheId cache, const std::vector<BlockName>& names) {
    return store().caches().Match(cache, names)->hit_blocks;
  }
  // As much as the pool has, of a tenant.
  void FillPool(CacheId cache, uint32_t salt) {
    for (uint64_t bytes = 0; bytes < pool_bytes_; bytes += kRun * kBlockBytes) Publish(cache, ++salt);
  }
};

TEST_F(PageStoreRetainTest, HighStaysAndLowGoesFirst) {
  const CacheId cache = Open();
  const auto high = Publish(cache, 1), usual = Publish(cache, 2), low = Publish(cache, 3);
  EXPECT_EQ(Retain(cache, high, 80).blocks, kRun);
  const RetainResult retained = Retain(cache, low, 0);
  EXPECT_EQ(retained.blocks, kRun);
  EXPECT_EQ(retained.bytes, kRun * kBlockBytes);
  // What was used last goes before all others, from its end on.
  for (uint32_t i = 0; test().store_metrics.evicted_blocks.Value() == 0; ++i) Publish(cache, 100 + i, 1);
  const int left = There(cache, low);
  EXPECT_LT(left, kRun);
  EXPECT_EQ(Hits(cache, low), left);
  EXPECT_EQ(Hits(cache, usual), kRun);
  EXPECT_EQ(Hits(cache, high), kRun);
}

TEST_F(PageStoreRetainTest, AcrossManyPools) {
  const CacheId cache = Open();
  const auto high = Publish(cache, 1), usual = Publish(cache, 2);
  Retain(cache, high, 80);
  for (uint32_t i = 0; i < 3; ++i) FillPool(cache, 1000 * (i + 1));
  EXPECT_EQ(There(cache, high), kRun);
  EXPECT_EQ(There(cache, usual), 0);
  // Taken back, it goes as any other.
  Retain(cache, high, Retention::kOfPolicy);
  FillPool(cache, 9000);
  FillPool(cache, 9500);
  EXPECT_EQ(There(cache, high), 0);
}

TEST_F(PageStoreRetainTest, WhatWillNotReturnMakesTheRoom) {
  const CacheId cache = Open();
  const auto usual = Publish(cache, 1);
  // A conversation that has ended, each time: what came before all of them stays.
  for (uint32_t i = 0; i < 64; ++i) Retain(cache, Publish(cache, 100 + i), 0);
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
  EXPECT_EQ(Hits(cache, usual), kRun);
}

TEST_F(PageStoreRetainTest, ItEnds) {
  const CacheId cache = Open();
  const auto names = Publish(cache, 1);
  Retain(cache, names, 100, 1000);
  FillPool(cache, 1000);
  EXPECT_EQ(Hits(cache, names), kRun);
  test().clock.AdvanceNs(999 * kMs);
  FillPool(cache, 2000);
  EXPECT_EQ(There(cache, names), kRun);
  test().clock.AdvanceNs(1 * kMs);
  FillPool(cache, 3000);
  FillPool(cache, 4000);
  EXPECT_EQ(There(cache, names), 0);
}

TEST_F(PageStoreRetainTest, AllRetainedRefusesNothing) {
  const CacheId cache = Open();
  std::vector<BlockName> last;
  for (uint32_t i = 0; i < 100; ++i) {
    last = Publish(cache, 1 + i);  // expects that there is room
    Retain(cache, last, 100);
  }
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
  EXPECT_EQ(test().store_metrics.exhausted.Value(), 0);
  EXPECT_EQ(Hits(cache, last), kRun);
  store().report().CheckInvariants();
}

TEST_F(PageStoreRetainTest, InUseItIsRetainedOnceItIsNot) {
  const CacheId cache = Open();
  const Text text = MakeText(8 * kPage, 1);
  const SequenceId sequence = Filled(cache, text, 8 * kPage);
  const auto names = Names(cache, text, 8);
  EXPECT_EQ(Retain(cache, names, 90).blocks, 0u);  // not published so far
  ASSERT_TRUE(store().Publish(sequence, names).ok());
  EXPECT_EQ(Retain(cache, names, 90).blocks, 8u);
  store().report().CheckInvariants();
  store().Drop(sequence);
  // Using and publishing it again change nothing.
  const auto hit = store().Create(cache, names);
  ASSERT_EQ(hit->match.hit_blocks, 8);
  ASSERT_TRUE(store().Publish(hit->sequence, names).ok());
  store().Drop(hit->sequence);
  FillPool(cache, 1000);
  EXPECT_EQ(Hits(cache, names), 8);
}

TEST_F(PageStoreRetainTest, BoundsAndManyNames) {
  const CacheId cache = Open();
  const auto names = Publish(cache, 1, 4);
  const auto refused = [&](CacheId of, size_t count, uint32_t priority, uint64_t ttl_ms) {
    return store().caches().Retain(of, std::vector<BlockName>(count, names[0]), priority, ttl_ms).status();
  };
  EXPECT_EQ(refused(cache + 1, 1, 80, 0).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(DetailOf(refused(cache, 65537, 80, 0)).field, "names");
  EXPECT_EQ(DetailOf(refused(cache, 1, 101, 0)).field, "priority");
  EXPECT_EQ(DetailOf(refused(cache, 1, 80, CacheDirectory::kRetentionMsMax + 1)).field, "ttlMs");
  EXPECT_EQ(DetailOf(refused(cache, 1, 80, UINT64_MAX)).field, "ttlMs");
  EXPECT_TRUE(refused(cache, 65536, 100, CacheDirectory::kRetentionMsMax).ok());
  EXPECT_TRUE(refused(cache, 0, 0, 0).ok());
  test().clock.AdvanceNs(int64_t{3650} * 24 * 3600 * 1000 * kMs - 1);
  FillPool(cache, 1000);
  EXPECT_EQ(There(cache, {names[0]}), 1);
  // By pieces: others are served between two.
  std::vector<BlockName> many(65536);
  std::copy(names.begin(), names.end(), many.end() - 4);
  auto retaining = store().caches().BeginRetain(cache, many, 80, 0);
  int pieces = 1;
  while ((*retaining)->DoPiece()) ++pieces;
  EXPECT_EQ((*retaining)->result()->blocks, 1u);
  EXPECT_GT(pieces, 500);
  // A purge between two ends the call.
  retaining = store().caches().BeginRetain(cache, many, 80, 0);
  EXPECT_TRUE((*retaining)->DoPiece());
  store().caches().PurgeAll();
  EXPECT_FALSE((*retaining)->DoPiece());
  EXPECT_EQ((*retaining)->result().status().code(), absl::StatusCode::kNotFound);
  // And so does the store's end.
  const CacheId again = Open();
  retaining = store().caches().BeginRetain(again, many, 80, 0);
  test_ = nullptr;
  EXPECT_FALSE((*retaining)->DoPiece());
  EXPECT_EQ((*retaining)->result().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PageStoreRetainTest, ByItsKeyOrItsTokens) {
  const CacheId cache = Open();
  auto names = Publish(cache, 1, 2);
  names[0].tokens = TokenDigest();  // not known
  names[1].tokens.bytes[0] ^= 1;    // others
  EXPECT_EQ(Retain(cache, names, 80).blocks, 1u);
  EXPECT_EQ(Retain(Open("b"), names, 80).blocks, 0u);
}

TEST_F(PageStoreRetainTest, IsExplained) {
  const CacheId cache = Open();
  const auto names = Publish(cache, 1, 3);
  Retain(cache, {names[0]}, 100);
  Retain(cache, {names[1]}, 20, 5000);
  test().clock.AdvanceNs(1000 * kMs + 1);
  Explained explained = Explain(cache, names);
  EXPECT_EQ(explained.blocks[0].priority, 100);
  EXPECT_EQ(explained.blocks[0].ends_ms, 0u);
  EXPECT_EQ(explained.blocks[1].priority, 20);
  EXPECT_EQ(explained.blocks[1].ends_ms, 4000u);
  EXPECT_EQ(explained.blocks[2].priority, Retention::kOfPolicy);
  test().clock.AdvanceNs(4000 * kMs);
  explained = Explain(cache, names);
  EXPECT_EQ(explained.blocks[1].priority, Retention::kOfPolicy);
  EXPECT_EQ(explained.blocks[1].ends_ms, 0u);
}

TEST_F(PageStoreRetainTest, GaugesSayWhatIsKeptLonger) {
  const CacheId cache = Open();
  Retain(cache, Publish(cache, 1, 4), 80, 1000);
  Retain(cache, Publish(cache, 2, 4), 10);
  store().long_calls().LookAgain();
  EXPECT_EQ(Gauge("kvmanager_retained_blocks{tier=\"host\"}"), 4);
  EXPECT_EQ(Gauge("kvmanager_retained_bytes{tier=\"host\"}"), 4.0 * kBlockBytes);
  test().clock.AdvanceNs(1000 * kMs);
  store().long_calls().LookAgain();
  EXPECT_EQ(Gauge("kvmanager_retained_blocks{tier=\"host\"}"), 0);
}

class RetainOfTwoTenantsTest : public PageStoreRetainTest {
 protected:
  RetainOfTwoTenantsTest() { pool_bytes_ = 64 * kSlabBytes; }
};

TEST_F(RetainOfTwoTenantsTest, WhatOneRetainsCostsTheOtherNothing) {
  const CacheId a = Open("uid:1/a"), b = Open("uid:2/b");
  const auto names = Publish(a, 1, 32);
  for (uint32_t i = 0; i < 400; ++i) Retain(b, Publish(b, 1000 + i), 100);  // three times the pool
  EXPECT_EQ(Hits(a, names), 32);
  // Nor does it take what a newcomer may have.
  const CacheId c = Open("uid:3/c");
  for (uint32_t i = 0; i < 40; ++i) Publish(c, 10000 + i);  // 20 slabs of 64
  int there = 0;
  for (uint32_t i = 0; i < 40; ++i) there += There(c, Names(c, MakeText(kRun * kPage, 10000 + i), kRun));
  EXPECT_EQ(there, 40 * kRun);
  EXPECT_EQ(Hits(a, names), 32);
}

class RetainOnDiskTest : public testing::PageStoreOnDiskTest {
 protected:
  void SetUp() override { cache_ = test().Open(MakeConfig("raw", 0)); }
  std::vector<BlockName> Publish(uint32_t salt, int blocks) {
    return PageStoreOnDiskTest::Publish(cache_, MakeText(blocks * kPage, salt), blocks);
  }
  // So much that of the first ones the disk alone is left.
  void FillPool() {
    for (uint32_t i = 0; i < 20; ++i) {
      Publish(100 + i, kRun);
      Finish();
    }
  }
  Retention OnDisk(const BlockName& name) {
    return disk_.stored.at({store().caches().Describe(cache_)->digest, name.key}).block.retention;
  }

  CacheId cache_ = 0;
};

TEST_F(RetainOnDiskTest, FollowsABlockToTheDiskAndBack) {
  // Before it is written.
  disk_.writes_max = 0;
  const auto before = Publish(1, 2);
  EXPECT_EQ(store().caches().Retain(cache_, before, 80, 0)->blocks, 2u);
  disk_.writes_max = SIZE_MAX;
  const auto behind = Publish(2, 2);
  Finish();
  EXPECT_EQ(OnDisk(before[1]), (Retention{80, 0}));
  // And behind that: both copies count.
  const auto retained = store().caches().Retain(cache_, behind, 90, 5000);
  EXPECT_EQ(retained->blocks, 2u);
  EXPECT_EQ(retained->bytes, 2 * (kBlockBytes + FakeDisk::kRetainedBytes));
  EXPECT_EQ(OnDisk(behind[0]), (Retention{90, 5000 * kMs}));
  // The disk alone has it, then both.
  for (const auto& names : {before, behind}) {
    EXPECT_TRUE(store().caches().Retain(cache_, names, 0, 0).ok());
  }
  FillPool();
  ASSERT_EQ(Explain(cache_, before[0]).place, BlockPlace::kDisk);
  EXPECT_EQ(store().caches().Retain(cache_, before, 70, 0)->bytes, 2 * FakeDisk::kRetainedBytes);
  EXPECT_EQ(Explain(cache_, before[0]).priority, 70);
  const auto load = Load(cache_, before);
  ASSERT_EQ(Explain(cache_, before[0]).place, BlockPlace::kMemory);
  EXPECT_EQ(Explain(cache_, before[0]).priority, 70);
}

TEST_F(RetainOnDiskTest, NamedAnewWhereTheDiskRetainsIt) {
  const auto names = Publish(1, 2);
  Finish();
  EXPECT_TRUE(store().caches().Retain(cache_, names, 0, 0).ok());
  FillPool();
  ASSERT_EQ(Explain(cache_, names[1]).place, BlockPlace::kDisk);
  EXPECT_TRUE(store().caches().Retain(cache_, names, 80, 0).ok());
  Publish(1, 2);
  EXPECT_EQ(Explain(cache_, names[1]).place, BlockPlace::kMemory);
  EXPECT_EQ(Explain(cache_, names[1]).priority, 80);
}

// Nobody waits for its return, so it goes unwritten. What is kept as usual waits for the disk, and others go for it.
TEST_F(RetainOnDiskTest, WhatIsToGoEarlyGoesUnwrittenBeforeWhatTheDiskHas) {
  const BlockName written = Publish(1, 1)[0];
  Finish();
  disk_.writes_max = 0;
  const BlockName usual = Publish(2, 1)[0], early = Publish(3, 1)[0];
  ASSERT_EQ(store().caches().Retain(cache_, {early}, 0, 0)->blocks, 1u);
  ASSERT_EQ(store().report().Use().unwritten_blocks, 2u);
  // Used last: by their uses alone it would go behind the others.
  store().Drop(store().Create(cache_, {&written, 1})->sequence);
  // What is in use takes the rest of the pool, and then a block's place each time.
  const int pool_blocks = static_cast<int>(pool_bytes_ / kBlockBytes);
  const Text text = MakeText(pool_blocks * kPage, 4);
  const SequenceId crowd = Create(cache_);
  int appended = 0;
  const auto evicted = [&] { return static_cast<int>(test().store_metrics.evicted_blocks.Value()); };
  const auto crowd_until_evicted = [&](int blocks) {
    for (; evicted() < blocks && appended < pool_blocks; ++appended) {
      ASSERT_TRUE(test().AppendAll(cache_, crowd, text, appended * kPage, kPage).ok());
    }
    ASSERT_EQ(evicted(), blocks);
  };
  ASSERT_NO_FATAL_FAILURE(crowd_until_evicted(1));
  EXPECT_EQ(Explain(cache_, early).place, BlockPlace::kNowhere);
  EXPECT_EQ(Explain(cache_, usual).place, BlockPlace::kMemory);
  EXPECT_EQ(Explain(cache_, written).place, BlockPlace::kMemory);
  ASSERT_NO_FATAL_FAILURE(crowd_until_evicted(2));
  EXPECT_EQ(Explain(cache_, usual).place, BlockPlace::kMemory);
  EXPECT_EQ(Explain(cache_, written).place, BlockPlace::kDisk);
}

class RetainInTwoMemoriesTest : public testing::PageStoreOnDiskTest {
 protected:
  RetainInTwoMemoriesTest() {
    device_bytes_ = 4 << 20;
    moves_ = true;
    has_disk_ = false;
  }
  CacheConfig Config(int device) {
    CacheConfig config = MakeConfig("raw", 0, "a", 1);
    config.device = device;
    return config;
  }
  std::vector<BlockName> Publish(CacheId cache, uint32_t salt, int blocks) {
    auto names = PageStoreOnDiskTest::Publish(cache, MakeText(blocks * kPage, salt), blocks);
    Finish();
    return names;
  }
};

TEST_F(RetainInTwoMemoriesTest, FollowsABlockThatIsDemoted) {
  const CacheId gpu = test().Open(Config(TestDevice::kOrdinal));
  const auto names = Publish(gpu, 1, 4);
  ASSERT_EQ(store().caches().Retain(gpu, names, 0, 0)->blocks, 4u);
  // They go to the host first of all.
  for (uint32_t i = 0; test().store_metrics.demoted_blocks.Value() < 4; ++i) {
    ASSERT_LT(i, 100u);
    Publish(gpu, 100 + i, 16);
  }
  const CacheId host = test().Open(Config(CacheConfig::kHost));
  ASSERT_EQ(store().caches().Match(host, names)->hit_blocks, 4);
  EXPECT_EQ(Explain(host, names[0]).priority, 0);
  // Both copies, from either cache.
  for (const CacheId from : {gpu, host}) {
    const uint32_t priority = from == gpu ? 70 : 75;
    ASSERT_EQ(store().caches().Retain(from, names, priority, 0)->blocks, 4u);
    EXPECT_EQ(Explain(host, names[0]).priority, static_cast<int>(priority));
  }
  store().report().CheckInvariants();
}

}  // namespace
}  // namespace kvmanager
