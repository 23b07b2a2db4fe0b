// Published blocks go to a disk: what is written, what is written once more, and what goes first meanwhile.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "kvmanager/store/disk_fixture.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeRawPage;
using testing::MakeText;
using testing::Text;

class PageStoreDiskWritesTest : public testing::PageStoreOnDiskTest {
 protected:
  // Fills the pool, has the disk give up everything, and publishes 8 blocks more.
  void ExpectWrittenAgain(CacheId cache) {
    uint32_t texts = 0;
    for (; test().store_metrics.evicted_blocks.Value() == 0; ++texts) {
      Publish(cache, MakeText(9 * kPage, 1000 * texts), 8);
      Finish();
    }
    while (!disk_.stored.empty()) disk_.Evict(disk_.stored.begin()->first);
    store().report().CheckInvariants();
    Publish(cache, MakeText(9 * kPage, 1000 * texts), 8);
    Finish();
    EXPECT_GT(disk_.stored.size(), 8u);
  }
};

TEST_F(PageStoreDiskWritesTest, WritesWhatIsPublishedOnceItIsEncoded) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(4 * kPage);
  const SequenceId sequence = store().Create(cache, {})->sequence;
  ASSERT_TRUE(test().AppendAll(cache, sequence, text, 0, 3 * kPage).ok());
  ASSERT_EQ(store().Publish(sequence, Names(cache, text, 3))->published, 3);
  EXPECT_EQ(disk_.writes(), 0u);  // to be encoded
  EXPECT_EQ(test().store_metrics.unwritten_blocks.Value(), 3);
  Turns();  // and found to be so
  test().executor.FinishAll();
  Turns();
  EXPECT_EQ(disk_.writes(), 3u);
  store().report().CheckInvariants();
  disk_.FinishAll();
  EXPECT_EQ(disk_.stored.size(), 3u);
  for (const auto& [name, stored] : disk_.stored) {
    EXPECT_EQ(stored.payer, "a");
    EXPECT_EQ(stored.record.tokens, static_cast<uint32_t>(kPage));
    for (size_t layer = 0; layer < stored.pages.size(); ++layer) {
      const auto raw = MakeRawPage(store().caches().codec(cache)->layout(), text, stored.block.index, kPage, layer);
      EXPECT_EQ(stored.pages[layer], testing::MakeEncodedPage(*store().caches().codec(cache), raw, stored.block.index,
                                                              static_cast<int>(layer)));
      EXPECT_EQ(stored.record.pages[layer].checksum, testing::Checksum(stored.pages[layer]));
    }
  }
}

TEST_F(PageStoreDiskWritesTest, ADiskThatTakesNothingCostsNothing) {
  pool_bytes_ = 4 << 20;
  disk_.takes = false;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  for (uint32_t i = 0; i < 200; ++i) Publish(cache, MakeText(9 * kPage, 1000 * i), 8);
  EXPECT_EQ(disk_.writes(), 0u);
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
  EXPECT_EQ(test().store_metrics.unwritten_evictions.Value(), test().store_metrics.evicted_blocks.Value());
  disk_.takes = true;
  Publish(cache, MakeText(9 * kPage, 777), 8);
  Finish();
  EXPECT_GT(disk_.stored.size(), 100u);
}

TEST_F(PageStoreDiskWritesTest, WhatTheDiskHasGoesBeforeWhatItDoesNotHaveYet) {
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  std::vector<Text> written;
  while (test().store_metrics.evicted_blocks.Value() == 0) {
    written.push_back(MakeText(9 * kPage, 1000 * written.size()));
    Publish(cache, written.back(), 8);
    Finish();
  }
  EXPECT_EQ(test().store_metrics.unwritten_evictions.Value(), 0);
  disk_.writes_max = 0;
  const Text waiting = MakeText(9 * kPage, 777);
  const auto hits = [&](const Text& text) { return store().caches().Match(cache, Names(cache, text, 8))->hit_blocks; };
  const auto crowd = [&](uint32_t first) {
    for (const Text& text : written) hits(text);
    for (uint32_t i = 0; i < 5; ++i) Publish(cache, MakeText(9 * kPage, first + 1000 * i), 8);
  };
  Publish(cache, waiting, 8);
  crowd(333);
  EXPECT_EQ(store().report().Use().unwritten_blocks, 6u * 8);
  disk_.takes = false;  // it has failed: what it has is no better than the rest
  EXPECT_EQ(hits(waiting), 8);
  crowd(444);
  crowd(555);
  EXPECT_LT(hits(waiting), 8);
  EXPECT_GT(test().store_metrics.unwritten_evictions.Value(), 0);
}

TEST_F(PageStoreDiskWritesTest, AFailedWriteIsDoneAgainWhenTheDiskTakesBlocks) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(3 * kPage);
  Publish(cache, text, 2);
  disk_.takes = false;
  while (disk_.writes() > 0) disk_.FinishWrite(/*durable=*/false);
  EXPECT_TRUE(disk_.stored.empty());
  EXPECT_EQ(store().report().Use().unwritten_blocks, 2u);
  EXPECT_EQ(store().Create(cache, Names(cache, text, 2))->match.hit_blocks, 2);
  disk_.takes = true;
  store().long_calls().LookAgain();
  Finish();
  EXPECT_EQ(disk_.stored.size(), 2u);
  EXPECT_EQ(store().report().Use().unwritten_blocks, 0u);
}

TEST_F(PageStoreDiskWritesTest, WhatTheDiskIsFoundToHaveIsNotWrittenAgain) {
  const Text text = MakeText(5 * kPage);
  Publish(test().Open(MakeConfig("fake", 0)), text, 4);
  Restart();
  ASSERT_EQ(disk_.stored.size(), 4u);
  // The daemon names them again before it has read the disk's index.
  auto index = std::exchange(disk_.stored, {});
  disk_.writes_max = 0;
  Publish(test().Open(MakeConfig("fake", 0)), text, 4);
  EXPECT_EQ(store().report().Use().unwritten_blocks, 4u);
  disk_.stored = std::move(index);
  disk_.writes_max = SIZE_MAX;
  store().long_calls().LookAgain();
  Finish();
  EXPECT_EQ(disk_.writes(), 0u);
  EXPECT_EQ(store().report().Use().unwritten_blocks, 0u);
  store().report().CheckInvariants();
}

TEST_F(PageStoreDiskWritesTest, WhatTheDiskRefusesHoldsUpNothing) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(5 * kPage);
  Publish(cache, text, 4);
  ASSERT_EQ(disk_.writes(), 4u);
  disk_.FinishWrite(/*durable=*/false);  // though it takes blocks
  Turns();
  EXPECT_EQ(disk_.writes(), 3u);  // not at once
  disk_.FinishAll();
  EXPECT_EQ(disk_.stored.size(), 3u);
  EXPECT_EQ(store().report().Use().unwritten_blocks, 1u);
  store().long_calls().LookAgain();
  Finish();
  EXPECT_EQ(disk_.stored.size(), 4u);
}

TEST_F(PageStoreDiskWritesTest, APurgeLeavesNothing) {
  const CacheId cache = test().Open(MakeConfig("fake", 0)), other = test().Open(MakeConfig("fake", 0, "b"));
  const Text text = MakeText(5 * kPage);
  Publish(other, text, 4);
  Finish();
  Publish(cache, text, 4);
  disk_.FinishWrite();  // two are there, two on their way
  disk_.FinishWrite();
  EXPECT_EQ(*store().caches().Purge(cache), 2u + 4u);
  store().report().CheckInvariants();
  Finish();
  EXPECT_EQ(disk_.stored.size(), 4u);  // the other's
  const CacheId again = test().Open(MakeConfig("fake", 0));
  EXPECT_EQ(store().caches().Describe(again)->published_blocks, 0u);
  EXPECT_EQ(LoadAndCreate(again, Names(again, text, 4)).match.hit_blocks, 0);
  EXPECT_EQ(store().caches().PurgeAll(), 8u);
  EXPECT_TRUE(disk_.stored.empty());
}

// What is published again by the same names stays, whatever the purge has yet to wait for.
TEST_F(PageStoreDiskWritesTest, PublishedAgainBehindAPurge) {
  const Text text = MakeText(5 * kPage);
  CacheId cache = test().Open(MakeConfig("fake", 0));
  Publish(cache, text, 4);
  ASSERT_EQ(disk_.writes(), 4u);
  EXPECT_EQ(*store().caches().Purge(cache), 4u);
  cache = test().Open(MakeConfig("fake", 0));
  Publish(cache, text, 4);
  Finish();
  EXPECT_EQ(disk_.stored.size(), 4u);
  const auto hit = store().Create(cache, Names(cache, text, 4));
  EXPECT_EQ(hit->match.hit_blocks, 4);
  store().Drop(hit->sequence);
}

TEST_F(PageStoreDiskWritesTest, WhatTheDiskEvictsIsNotKept) {
  pool_bytes_ = 4 << 20;
  ExpectWrittenAgain(test().Open(MakeConfig("raw", 0)));
}

TEST_F(PageStoreDiskWritesTest, WhatTheDiskEvictsIsNotKeptWithOtherSlotsFree) {
  pool_bytes_ = 4 << 20;
  const CacheId small = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(2 * kPage, 1);
  const SequenceId sequence = store().Create(small, {})->sequence;
  ASSERT_TRUE(test().AppendAll(small, sequence, text, 0, kPage + 1).ok());
  test().executor.FinishAll();
  ExpectWrittenAgain(test().Open(MakeConfig("raw", 0)));
  EXPECT_LT(test().pool->slot_bytes_used(), pool_bytes_ * 3 / 4);
}

}  // namespace
}  // namespace kvmanager
