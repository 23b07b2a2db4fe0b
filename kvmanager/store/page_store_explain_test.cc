// What an operator is told of blocks, one reason after the other. The disk is what the test says.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kvmanager/store/disk_fixture.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::TestDevice;
using testing::Text;

// TenantLabel of "a" and "b".
constexpr char kLabelA[] = "ca978112", kLabelB[] = "3e23e816";

class PageStoreExplainTest : public testing::PageStoreOnDiskTest {
 protected:
  PageStoreExplainTest() {
    pool_bytes_ = 4 << 20;
    has_disk_ = false;
  }
  // On the disk, too, if there is one.
  void Publish(CacheId cache, const Text& text, int blocks) {
    PageStoreOnDiskTest::Publish(cache, text, blocks);
    Finish();
  }
  // Until some block was evicted.
  void Crowd(CacheId cache) {
    const double before = test().store_metrics.evicted_blocks.Value();
    for (; !HasFailure() && test().store_metrics.evicted_blocks.Value() == before; salt_ += 1000) {
      Publish(cache, MakeText(8 * kPage, salt_), 8);
    }
  }
  CacheId OpenOnDevice(const std::string& codec) {
    CacheConfig config = MakeConfig(codec, 0);
    config.device = TestDevice::kOrdinal;
    return test().Open(config);
  }

  uint32_t salt_ = 1'000'000;
};

TEST_F(PageStoreExplainTest, WhatIsThereAndWhatNeverWas) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(4 * kPage);
  Publish(cache, text, 3);
  const Explained all = Explain(cache, Names(cache, text, 4));
  ASSERT_EQ(all.blocks.size(), 4u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(all.blocks[i].place, BlockPlace::kMemory);
    EXPECT_EQ(all.blocks[i].tier, CacheConfig::kHost);
    EXPECT_EQ(all.blocks[i].cache, cache);
    EXPECT_FALSE(all.blocks[i].other_tokens);
  }
  EXPECT_EQ(all.blocks[3].place, BlockPlace::kNowhere);
  EXPECT_FALSE(all.blocks[3].gone.has_value());
  EXPECT_EQ(all.blocks[3].same_tokens, 0u);
  EXPECT_EQ(all.remembered, 0u);
  EXPECT_EQ(all.remembered_max, GoneBlocks::kBlocksMax);
  EXPECT_TRUE(all.others.empty());
  EXPECT_TRUE(Explain(cache, std::vector<BlockName>()).blocks.empty());
}

TEST_F(PageStoreExplainTest, KeysAreOfAnyCache) {
  const CacheId first = test().Open(MakeConfig("fake", 0)), second = test().Open(MakeConfig("raw", 0, "b"));
  const Text text = MakeText(2 * kPage);
  Publish(second, text, 2);
  std::vector<BlockName> names = {Names(first, text, 1)[0], Names(second, text, 2)[1]};
  for (BlockName& name : names) name.tokens = {};
  const Explained all = Explain(0, names);
  EXPECT_EQ(all.blocks[0].place, BlockPlace::kNowhere);
  EXPECT_EQ(all.blocks[0].same_tokens, 0u);
  EXPECT_EQ(all.blocks[1].place, BlockPlace::kMemory);
  EXPECT_EQ(all.blocks[1].cache, second);
  EXPECT_EQ(Explain(first, names).blocks[1].place, BlockPlace::kNowhere) << "of that cache alone";
}

TEST_F(PageStoreExplainTest, RefusesWhatItCannotAnswer) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  StoreReport& report = store().report();
  EXPECT_EQ(report.BeginExplain(99, {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(report.BeginExplain(cache, std::vector<BlockName>(CacheDirectory::kNamesMax + 1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto explanation = *report.BeginExplain(cache, std::vector<BlockName>(1));
  test().store = nullptr;
  EXPECT_FALSE(explanation->DoPiece());
  EXPECT_EQ(explanation->Take().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PageStoreExplainTest, EvictedForWhom) {
  const CacheId ours = test().Open(MakeConfig("raw", 0)), theirs = test().Open(MakeConfig("raw", 0, "b"));
  const Text text = MakeText(40 * kPage);
  Publish(ours, text, 40);
  Crowd(ours);
  test().clock.AdvanceNs(3'000'000'000);
  // The end of a use goes first.
  const BlockExplanation own = Explain(ours, Names(ours, text, 40)[39]);
  EXPECT_EQ(own.place, BlockPlace::kNowhere);
  ASSERT_TRUE(own.gone.has_value());
  EXPECT_EQ(own.gone->reason, GoneReason::kEvicted);
  EXPECT_EQ(own.gone->tier, CacheConfig::kHost);
  EXPECT_EQ(own.gone->cache, ours);
  EXPECT_EQ(own.gone->owner, kLabelA);
  EXPECT_EQ(own.gone->taker, kLabelA);
  EXPECT_DOUBLE_EQ(own.gone->seconds_ago, 3);
  Crowd(theirs);
  const Explained all = Explain(ours, Names(ours, text, 40));
  EXPECT_EQ(all.remembered, static_cast<size_t>(test().store_metrics.evicted_blocks.Value()));
  int taken = 0;
  for (const BlockExplanation& block : all.blocks) {
    if (!block.gone.has_value() || block.gone->taker != kLabelB) continue;
    EXPECT_EQ(block.gone->owner, kLabelA);
    ++taken;
  }
  EXPECT_GT(taken, 0);
}

TEST_F(PageStoreExplainTest, Purged) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(2 * kPage);
  Publish(cache, text, 2);
  const auto names = Names(cache, text, 2);
  const SequenceId holder = store().Create(cache, {names.data(), 1})->sequence;
  ASSERT_EQ(*store().caches().Purge(cache), 1u);
  const Explained all = Explain(cache, names);
  EXPECT_EQ(all.blocks[0].place, BlockPlace::kMemory);
  ASSERT_TRUE(all.blocks[1].gone.has_value());
  EXPECT_EQ(all.blocks[1].gone->reason, GoneReason::kPurged);
  EXPECT_EQ(all.blocks[1].gone->owner, kLabelA);
  EXPECT_EQ(all.blocks[1].gone->taker, "");
  store().Drop(holder);
}

TEST_F(PageStoreExplainTest, ChangedBytes) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(2 * kPage);
  Publish(cache, text, 2);
  const auto names = Names(cache, text, 2);
  {
    const auto reads = *store().caches().ReadBlocks(cache, 0, names, {UINT64_MAX, 64});
    const_cast<uint8_t*>(reads->pages()[0].data)[5] ^= 1;
  }
  test().clock.AdvanceNs(BlockCheck::kVerifiedForNs + 2);
  EXPECT_EQ(store().Create(cache, names)->match.reason, MissReason::kChecksum);
  const Explained all = Explain(cache, names);
  ASSERT_TRUE(all.blocks[0].gone.has_value());
  EXPECT_EQ(all.blocks[0].gone->reason, GoneReason::kChecksum);
  EXPECT_EQ(all.blocks[1].place, BlockPlace::kMemory);
}

TEST_F(PageStoreExplainTest, OtherTokensUnderTheSameName) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(2 * kPage);
  Publish(cache, text, 1);
  BlockName name = Names(cache, text, 1)[0];
  name.tokens = Names(cache, text, 2)[1].tokens;
  const BlockExplanation block = Explain(cache, name);
  EXPECT_EQ(block.place, BlockPlace::kMemory);
  EXPECT_TRUE(block.other_tokens);
}

// The cache that differs in the least is named, and what it differs in.
TEST_F(PageStoreExplainTest, SameTokensUnderAnotherName) {
  pool_bytes_ = 64 << 20;
  const CacheId asked = test().Open(MakeConfig("fake", 0));
  const CacheId other_codec = test().Open(MakeConfig("raw", 0));
  const CacheId other_all = test().Open(MakeConfig("uneven", 1, "b", 3));
  const Text text = MakeText(4 * kPage);
  Publish(other_all, text, 4);
  Publish(other_codec, text, 2);
  // Block 3's tokens, at the beginning.
  Text late;
  for (int i = 0; i < kPage; ++i) late.Add(text.ids[3 * kPage + i]);
  const auto names = Names(asked, text, 4);
  Explained all = Explain(asked, names);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(all.blocks[i].place, BlockPlace::kNowhere);
    EXPECT_FALSE(all.blocks[i].gone.has_value());
    EXPECT_EQ(all.blocks[i].same_tokens, i < 2 ? other_codec : other_all);
  }
  ASSERT_EQ(all.others.size(), 2u);
  EXPECT_EQ(all.others[0].cache, other_codec);
  EXPECT_EQ(all.others[0].tenant_label, kLabelA);
  const auto texts = [](const OtherCache& other) {
    return std::vector<std::string>(other.differs.begin(), other.differs.end());
  };
  EXPECT_EQ(texts(all.others[0]), (std::vector<std::string>{"codec"}));
  EXPECT_EQ(all.others[1].cache, other_all);
  EXPECT_EQ(all.others[1].tenant_label, kLabelB);
  EXPECT_EQ(texts(all.others[1]), (std::vector<std::string>{"tenant", "codec", "layers", "lagPages"}));
  // Behind other tokens, in the same cache.
  Publish(asked, late, 1);
  ASSERT_TRUE(store().caches().Purge(other_all).ok());
  all = Explain(asked, std::vector<BlockName>{names[3]});
  EXPECT_EQ(all.blocks[0].same_tokens, asked);
  ASSERT_EQ(all.others.size(), 1u);
  EXPECT_TRUE(all.others[0].differs.empty());
}

// The table of a cache grows, and caches come and go, while they are looked through.
TEST_F(PageStoreExplainTest, OthersWorkBetweenTwoPieces) {
  pool_bytes_ = 64 << 20;
  const CacheId asked = test().Open(MakeConfig("fake", 0)), other = test().Open(MakeConfig("raw", 0));
  const Text text = MakeText(600 * kPage);
  Publish(other, text, 600);
  auto explanation = *store().report().BeginExplain(asked, Names(asked, text, 600));
  int pieces = 0;
  for (; explanation->DoPiece(); ++pieces) {
    Publish(other, MakeText(40 * kPage, 7'000'000 + 1000 * pieces), 40);
    const CacheId brief = test().Open(MakeConfig("fake", 0, "brief"));
    Publish(brief, text, 1);
    ASSERT_TRUE(store().caches().Purge(brief).ok());
  }
  EXPECT_GT(pieces, 10);
  const auto explained = explanation->Take();
  ASSERT_TRUE(explained.ok());
  for (const BlockExplanation& block : explained->blocks) EXPECT_EQ(block.same_tokens, other);
}

TEST_F(PageStoreExplainTest, OnTheDiskAndOnTheWay) {
  has_disk_ = true;
  const Text text = MakeText(2 * kPage);
  Publish(test().Open(MakeConfig("fake", 0)), text, 2);
  Restart();
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const auto names = Names(cache, text, 2);
  for (const BlockExplanation& block : Explain(cache, names).blocks) {
    EXPECT_EQ(block.place, BlockPlace::kDisk);
    EXPECT_EQ(block.tier, kDiskTier);
  }
  const auto load = BeginLoad(cache, names);
  EXPECT_EQ(Explain(cache, names[0]).place, BlockPlace::kArriving);
  testing::LoadAll(*load, [this] { Finish(); });
  EXPECT_EQ(Explain(cache, names[0]).place, BlockPlace::kMemory);
  // Hits are counted where the block was.
  const StoreMetrics& metrics = test().store_metrics;
  const auto hits = [&](HitTier tier) { return metrics.prefix_hit_tiers[static_cast<size_t>(tier)]->Value(); };
  store().Drop(store().Create(cache, names)->sequence);
  EXPECT_EQ(hits(HitTier::kDisk), 2);
  EXPECT_EQ(hits(HitTier::kHost), 0);
  store().Drop(store().Create(cache, names)->sequence);
  EXPECT_EQ(hits(HitTier::kDisk), 2);
  EXPECT_EQ(hits(HitTier::kHost), 2);
  EXPECT_EQ(metrics.prefix_hit_blocks.Value(), 4);
}

TEST_F(PageStoreExplainTest, LostByTheDisk) {
  has_disk_ = true;
  const Text text = MakeText(4 * kPage);
  Publish(test().Open(MakeConfig("fake", 0)), text, 4);
  Restart();
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const auto names = Names(cache, text, 4);
  const CacheDigest digest = store().caches().Describe(cache)->digest;
  disk_.Evict({digest, names[2].key});
  disk_.Erase(digest, names[3].key);  // as if its header were wrong
  disk_.stored.at({digest, names[1].key}).pages[0][7] ^= 1;
  // The call that waited finds nothing there any more: a miss as of a block that never was, and a checksum's failure.
  const auto created = LoadAndCreate(cache, names);
  EXPECT_EQ(created.match.hit_blocks, 1);
  EXPECT_EQ(created.match.reason, MissReason::kNotFound);
  store().Drop(created.sequence);
  const StoreMetrics& metrics = test().store_metrics;
  EXPECT_EQ(metrics.prefix_misses[static_cast<size_t>(MissReason::kNotFound)]->Value(), 1);
  EXPECT_EQ(metrics.prefix_misses[static_cast<size_t>(MissReason::kChecksum)]->Value(), 0);
  EXPECT_EQ(metrics.checksum_failures.Value(), 1);
  const Explained all = Explain(cache, names);
  EXPECT_EQ(all.blocks[0].place, BlockPlace::kMemory);
  for (int i = 1; i < 4; ++i) ASSERT_TRUE(all.blocks[i].gone.has_value()) << i;
  EXPECT_EQ(all.blocks[1].gone->reason, GoneReason::kChecksum);
  EXPECT_EQ(all.blocks[1].gone->tier, kDiskTier);
  EXPECT_EQ(all.blocks[3].gone->reason, GoneReason::kDiskRecord);
  EXPECT_EQ(all.blocks[3].gone->tier, kDiskTier);
  EXPECT_EQ(all.blocks[2].gone->reason, GoneReason::kEvicted);
  EXPECT_EQ(all.blocks[2].gone->tier, kDiskTier);
  EXPECT_EQ(all.blocks[2].gone->owner, kLabelA);
  ASSERT_TRUE(store().caches().Purge(cache).ok());
  EXPECT_EQ(Explain(0, names).blocks[0].place, BlockPlace::kNowhere);
}

TEST_F(PageStoreExplainTest, OfAGpu) {
  device_bytes_ = 2 << 20;
  const CacheId cache = OpenOnDevice("raw");
  const Text text = MakeText(8 * kPage);
  Publish(cache, text, 8);
  const BlockName last = Names(cache, text, 8)[7];
  BlockExplanation block = Explain(cache, last);
  EXPECT_EQ(block.place, BlockPlace::kMemory);
  EXPECT_EQ(block.tier, TestDevice::kOrdinal);
  Crowd(cache);
  block = Explain(cache, last);
  EXPECT_EQ(block.place, BlockPlace::kNowhere);
  ASSERT_TRUE(block.gone.has_value());
  EXPECT_EQ(block.gone->reason, GoneReason::kEvicted);
  EXPECT_EQ(block.gone->tier, TestDevice::kOrdinal);
}

// What a GPU gave up for its copy on the host is there.
TEST_F(PageStoreExplainTest, DemotedToTheHost) {
  device_bytes_ = 2 << 20;
  moves_ = true;
  const CacheId cache = OpenOnDevice("raw");
  const Text text = MakeText(8 * kPage);
  Publish(cache, text, 8);
  Crowd(cache);
  const BlockExplanation block = Explain(cache, Names(cache, text, 8)[7]);
  EXPECT_EQ(block.place, BlockPlace::kMemory);
  EXPECT_EQ(block.tier, CacheConfig::kHost);
}

}  // namespace
}  // namespace kvmanager
