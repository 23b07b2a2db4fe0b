// Blocks that a disk alone has come back: after a restart or an eviction, whole, or as a miss when something is wrong.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

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

class PageStoreDiskLoadsTest : public testing::PageStoreOnDiskTest {
 protected:
  // The cache as it is opened after a restart: the disk alone has the text's first blocks.
  CacheId OnDiskAlone(const std::string& codec, const Text& text, int blocks) {
    Publish(test().Open(MakeConfig(codec, 0)), text, blocks);
    Restart();
    return test().Open(MakeConfig(codec, 0));
  }
};

TEST_F(PageStoreDiskLoadsTest, FindsAfterARestartWhatWasWritten) {
  for (const char* codec : {"fake", "declining", "uneven", "sinks", "raw"}) {
    SCOPED_TRACE(codec);
    const Text text = MakeText(6 * kPage, 3);
    Publish(test().Open(MakeConfig(codec, 1)), text, 5);
    Restart();
    const CacheId cache = test().Open(MakeConfig(codec, 1));
    const auto names = Names(cache, text, 6);
    EXPECT_EQ(store().Create(cache, names)->match.hit_blocks, 0);  // without a load
    const auto match = store().caches().Match(cache, names);
    EXPECT_EQ(match->hit_blocks, 5);
    EXPECT_EQ(match->reason, MissReason::kNotFound);
    const auto created = LoadAndCreate(cache, names);
    EXPECT_EQ(created.match.hit_blocks, 5);
    ExpectStored(cache, text, 5);
    EXPECT_EQ(disk_.writes(), 0u);  // it has them
    store().Drop(created.sequence);
  }
}

TEST_F(PageStoreDiskLoadsTest, EvictsWithoutLossWhatWasWritten) {
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  std::vector<Text> texts;
  for (uint32_t i = 0; i < 400; ++i) {
    texts.push_back(MakeText(9 * kPage, 1000 * i));
    Publish(cache, texts.back(), 8);
    Finish();
  }
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
  EXPECT_EQ(disk_.stored.size(), 400u * 8);
  for (const Text& text : {texts[0], texts[200], texts[399]}) {
    const auto created = LoadAndCreate(cache, Names(cache, text, 8));
    EXPECT_EQ(created.match.hit_blocks, 8);
    ExpectStored(cache, text, 8);
    store().Drop(created.sequence);
  }
}

TEST_F(PageStoreDiskLoadsTest, SharesOneReadAmongThoseWhoWait) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  std::vector<std::unique_ptr<DiskLoad>> loads;
  for (int i = 0; i < 3; ++i) {
    loads.push_back(BeginLoad(cache, Names(cache, text, 4)));
    EXPECT_FALSE(loads.back()->done());
  }
  EXPECT_EQ(disk_.reads(), 4u);
  loads[0] = nullptr;
  store().report().CheckInvariants();
  int woken = 0;
  for (int i = 1; i < 3; ++i) loads[i]->OnMore([&] { ++woken; });
  Finish();
  EXPECT_EQ(woken, 2);
  for (int i = 1; i < 3; ++i) {
    testing::LoadAll(*loads[i], [this] { Finish(); });
    EXPECT_EQ(loads[i]->TakeNames().at(3).key, Names(cache, text, 4)[3].key);
    EXPECT_EQ(store().Create(cache, Names(cache, text, 4))->match.hit_blocks, 4);
  }
}

TEST_F(PageStoreDiskLoadsTest, NobodyIsLeftWaitingWhenAllLoadsAreDropped) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  auto load = BeginLoad(cache, Names(cache, text, 4));
  load->OnMore([] { FAIL() << "its owner has gone"; });
  load = nullptr;
  Finish();
  EXPECT_EQ(store().caches().Describe(cache)->published_blocks, 4u);  // read all the same
}

TEST_F(PageStoreDiskLoadsTest, AMatchSaysWhatIsInMemory) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  const auto names = Names(cache, text, 4);
  const auto in_memory = [&] {
    const auto match = store().caches().Match(cache, names);
    EXPECT_EQ(match->hit_blocks, 4);
    return match->in_memory;
  };
  EXPECT_EQ(in_memory(), 0);
  // The third alone does not count: the first is elsewhere.
  store().Drop(LoadAndCreate(cache, {names[2]}).sequence);
  EXPECT_EQ(in_memory(), 0);
  store().Drop(LoadAndCreate(cache, {names[0], names[1]}).sequence);
  EXPECT_EQ(in_memory(), 2);
  store().Drop(LoadAndCreate(cache, names).sequence);
  EXPECT_EQ(in_memory(), 4);
}

TEST_F(PageStoreDiskLoadsTest, WhatIsLoadedAheadIsThereForWhoComes) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  const auto names = Names(cache, text, 4);
  std::vector<BlockName> ahead_names = names;
  auto ahead = store().long_calls().BeginLoad(cache, &ahead_names, 0, LoadUrgency::kAhead);
  EXPECT_TRUE(ahead_names.empty());
  while (ahead->DoPiece()) {
  }
  // One that is awaited reads nothing a second time.
  auto load = BeginLoad(cache, names);
  EXPECT_EQ(disk_.reads(), 4u);
  testing::LoadAll(*ahead, [this] { Finish(); });
  ahead = nullptr;
  testing::LoadAll(*load, [this] { Finish(); });
  EXPECT_EQ(test().store_metrics.prefetched_blocks.Value(), 4);
  EXPECT_EQ(store().Create(cache, names)->match.hit_blocks, 4);
}

TEST_F(PageStoreDiskLoadsTest, AFlippedByteLosesItsBlockAndNoOther) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  const auto names = Names(cache, text, 4);
  const FakeDisk::Name wrong{store().caches().Describe(cache)->digest, names[2].key};
  const uint64_t expected = disk_.stored.at(wrong).record.pages[1].checksum;
  disk_.stored.at(wrong).pages[1][77] ^= 4;
  const auto created = LoadAndCreate(cache, names);
  EXPECT_EQ(created.match.hit_blocks, 2);
  EXPECT_FALSE(disk_.stored.contains(wrong));  // erased
  EXPECT_EQ(disk_.stored.size(), 3u);
  EXPECT_EQ(test().store_metrics.checksum_failures.Value(), 1);
  ASSERT_EQ(disk_.bad_pages.size(), 1u);
  EXPECT_EQ(disk_.bad_pages[0].layer, 1u);
  EXPECT_NE(disk_.bad_pages[0].checksum, disk_.bad_pages[0].expected);
  EXPECT_EQ(disk_.bad_pages[0].expected, expected);
  store().Drop(created.sequence);
}

TEST_F(PageStoreDiskLoadsTest, TakesNoBlockThatDiffersFromItsName) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("sinks", text, 4);
  const auto names = Names(cache, text, 4);
  const auto stored = [&](int i) -> FakeDisk::Stored& {
    return disk_.stored.at({store().caches().Describe(cache)->digest, names[static_cast<size_t>(i)].key});
  };
  const auto hits = [&] {
    const auto created = LoadAndCreate(cache, names);
    store().Drop(created.sequence);
    return created.match.hit_blocks;
  };
  stored(1).block.raw[0] = 0;  // the codec keeps its pages raw
  EXPECT_EQ(hits(), 1);
  stored(1).block.raw[0] = 3;
  stored(3).block.layers = 3;
  EXPECT_EQ(hits(), 3);
  stored(3).block.layers = 2;
  stored(3).block.index = 2;
  stored(2).block.tokens.bytes[0] ^= 1;
  EXPECT_EQ(hits(), 3);  // block 2 is in memory by now
  stored(3).block.index = 3;
  EXPECT_EQ(hits(), 4);
}

TEST_F(PageStoreDiskLoadsTest, ADiskThatFailsIsAMiss) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  const auto names = Names(cache, text, 4);
  auto load = BeginLoad(cache, names);
  testing::LoadAll(*load, [&] {
    while (disk_.reads() > 0) disk_.FinishRead(absl::UnavailableError("an I/O error"));
  });
  EXPECT_EQ(store().Create(cache, names)->match.hit_blocks, 0);
  load = nullptr;
  EXPECT_EQ(LoadAndCreate(cache, names).match.hit_blocks, 4);  // it was the moment's
}

TEST_F(PageStoreDiskLoadsTest, APurgeDuringALoadNamesNothing) {
  const Text text = MakeText(5 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 4);
  auto load = BeginLoad(cache, Names(cache, text, 4));
  ASSERT_TRUE(store().caches().Purge(cache).ok());
  testing::LoadAll(*load, [this] { Finish(); });
  load = nullptr;
  const CacheId again = test().Open(MakeConfig("fake", 0));
  EXPECT_EQ(store().caches().Describe(again)->published_blocks, 0u);
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
}

TEST_F(PageStoreDiskLoadsTest, APurgeTakesWhatALoadHasBroughtSoFar) {
  const Text text = MakeText(7 * kPage);
  const CacheId cache = OnDiskAlone("fake", text, 6);
  auto load = BeginLoad(cache, Names(cache, text, 6));
  int woken = 0;
  load->OnMore([&] { ++woken; });
  for (int i = 0; i < 3; ++i) disk_.FinishRead();
  FinishEncodes();  // three have come
  ASSERT_TRUE(store().caches().Purge(cache).ok());
  store().report().CheckInvariants();
  testing::LoadAll(*load, [this] { Finish(); });
  EXPECT_EQ(woken, 1);
  load = nullptr;
  const CacheId again = test().Open(MakeConfig("fake", 0));
  EXPECT_EQ(store().caches().Describe(again)->published_blocks, 0u);
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
}

TEST_F(PageStoreDiskLoadsTest, AGpusCacheFindsWhatTheDiskHas) {
  const Text text = MakeText(5 * kPage);
  Publish(test().Open(MakeConfig("fake", 0)), text, 4);
  Restart();
  device_bytes_ = 4 << 20;
  moves_ = true;
  CacheConfig config = MakeConfig("fake", 0);
  config.device = TestDevice::kOrdinal;
  const CacheId cache = test().Open(config);
  const auto names = Names(cache, text, 4);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 4);
  const auto load = Load(cache, names);
  auto lease = store().Fetch(cache, names);
  ASSERT_TRUE(lease.ok());
  Finish();
  const auto created = (*lease)->Commit();
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->match.hit_blocks, 4);
}

TEST_F(PageStoreDiskLoadsTest, ALoadTakesWhatThereIsRoomFor) {
  const Text text = MakeText(200 * kPage + 1);
  const int blocks = 200;
  pool_bytes_ = 16 << 20;
  Publish(test().Open(MakeConfig("raw", 0)), text, blocks);
  Restart();
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const SequenceId holder = store().Create(cache, {})->sequence;
  const Text other = MakeText(100 * kPage, 5);
  ASSERT_TRUE(test().AppendAll(cache, holder, other, 0, 100 * kPage).ok());
  const auto created = LoadAndCreate(cache, Names(cache, text, blocks));
  EXPECT_GT(created.match.hit_blocks, 0);
  EXPECT_LT(created.match.hit_blocks, blocks);
  store().report().CheckInvariants();
}

}  // namespace
}  // namespace kvmanager
