// Published blocks that outlive their store in host memory: what is found again, and what is not.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/keep/kept_manifest.h"
#include "kvmanager/store/disk_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::TestDevice;
using testing::Text;

class PageStoreRecoveryTest : public testing::PageStoreOnDiskTest {
 protected:
  PageStoreRecoveryTest() {
    has_disk_ = false;
    is_kept_ = true;
  }
  CacheId Open(const std::string& codec = "fake", const std::string& tenant = "a") {
    const CacheId cache = test().Open(MakeConfig(codec, 0, tenant));
    Turns();
    return cache;
  }
  int Hits(CacheId cache, const Text& text, int blocks) {
    return store().caches().Match(cache, Names(cache, text, blocks))->hit_blocks;
  }
  double Unclaimed() { return test().store_metrics.unclaimed_blocks.Value(); }
  double Recorded() { return test().store_metrics.recorded_blocks.Value(); }
  void CheckAll() { store().report().CheckInvariants(); }
  // The place of a page in the pool, from its first region on.
  uint64_t PlaceOf(CacheId cache, const Text& text, int block) {
    const auto reads = store().caches().ReadBlocks(cache, 0, Names(cache, text, block + 1), {UINT64_MAX, 64});
    const StoredPage& page = (*reads)->pages()[(*reads)->pages().size() - 1];
    uint64_t before = 0;
    for (const auto& region : test().pool->regions()) {
      if (page.data >= region->data() && page.data < region->data() + region->bytes()) {
        return before + static_cast<uint64_t>(page.data - region->data());
      }
      before += region->bytes();
    }
    ADD_FAILURE() << "it is in no region";
    return 0;
  }
  void FlipByte(uint64_t place) {
    for (const auto& region : test().pool->regions()) {
      if (place < region->bytes()) {
        region->data()[place] ^= 1;
        return;
      }
      place -= region->bytes();
    }
  }
  // Writes into what an earlier store has recorded.
  void Forge(absl::FunctionRef<void(KeptManifest&, std::vector<std::pair<uint64_t, KeptBlock>>)> fn) {
    const auto manifest = KeptManifest::TakeOver(dup(keeper_.manifest), {pool_bytes_, 2 << 20});
    KV_CHECK(manifest.ok());
    std::vector<std::pair<uint64_t, KeptBlock>> found;
    (*manifest)->Recover([&](uint64_t entry, const KeptBlock& block) { found.emplace_back(entry, block); });
    fn(**manifest, std::move(found));
  }
};

// The turns that claim blocks name them, and begin to write them.
TEST_F(PageStoreRecoveryTest, WhatIsClaimedGoesToADiskThatLacksIt) {
  const Text text = MakeText(8 * kPage);
  Publish(Open(), text, 8);
  Finish();
  has_disk_ = true;
  Kill();
  Open();
  EXPECT_EQ(Unclaimed(), 0);
  EXPECT_EQ(disk_.writes(), 8u);
  Finish();
  EXPECT_EQ(disk_.stored.size(), 8u);
  CheckAll();
}

TEST_F(PageStoreRecoveryTest, WhatWasPublishedIsFoundAgain) {
  const Text text = MakeText(8 * kPage), other = MakeText(4 * kPage, 99);
  const std::vector<std::string> codecs = {"fake", "raw", "declining", "uneven", "sinks"};
  for (const std::string& codec : codecs) {
    Publish(Open(codec), text, 8);
    Publish(Open(codec), other, 4);
  }
  EXPECT_EQ(Recorded(), 60);
  CheckAll();
  Kill();
  EXPECT_EQ(Unclaimed(), 60);
  EXPECT_EQ(test().store_metrics.recovered_blocks.Value(), 60);
  // Nobody holds any of it.
  EXPECT_GT(test().store_metrics.pool_used_bytes.Value(), 0);
  EXPECT_EQ(test().store_metrics.evictable_bytes.Value(), test().store_metrics.pool_used_bytes.Value());
  CheckAll();
  for (const std::string& codec : codecs) {
    const CacheId cache = Open(codec);
    EXPECT_EQ(Hits(cache, text, 8), 8) << codec;
    EXPECT_EQ(Hits(cache, other, 4), 4) << codec;
    ExpectStored(cache, text, 8);
    // A sequence goes on behind them.
    const auto hit = store().Create(cache, Names(cache, text, 8));
    ASSERT_EQ(hit->match.hit_blocks, 8) << codec;
    EXPECT_TRUE(test().AppendAll(cache, hit->sequence, MakeText(9 * kPage), 8 * kPage, kPage).ok());
    store().Drop(hit->sequence);
  }
  EXPECT_EQ(Unclaimed(), 0);
  Finish();
  EXPECT_EQ(Recorded(), 60);
  CheckAll();
}

TEST_F(PageStoreRecoveryTest, AndOverManyRestarts) {
  const Text text = MakeText(8 * kPage);
  Publish(Open(), text, 4);
  for (int i = 0; i < 5; ++i) {
    if (i % 2 == 0) Open();  // unclaimed, or claimed, when the next one comes
    Kill();
  }
  Publish(Open(), text, 8);
  Kill();
  const CacheId cache = Open();
  EXPECT_EQ(Hits(cache, text, 8), 8);
  ExpectStored(cache, text, 8);
}

TEST_F(PageStoreRecoveryTest, OnlyWhatHasItsLastForm) {
  const CacheId cache = Open();
  const Text text = MakeText(8 * kPage);
  const SequenceId sequence = Create(cache);
  ASSERT_TRUE(test().AppendAll(cache, sequence, text, 0, 8 * kPage).ok());
  ASSERT_EQ(store().Publish(sequence, Names(cache, text, 8))->published, 8);
  const double at_once = Recorded();
  EXPECT_LT(at_once, 8);
  ASSERT_GT(test().executor.jobs(), 1u);
  test().executor.FinishOne(0);
  const double some = Recorded();
  CheckAll();
  Kill();
  EXPECT_EQ(Unclaimed(), some);
  EXPECT_EQ(Hits(Open(), text, 8), some);
}

TEST_F(PageStoreRecoveryTest, WhatWasGivenUpIsNotBack) {
  const Text text = MakeText(4 * kPage), other = MakeText(4 * kPage, 99);
  const CacheId cache = Open();
  Publish(cache, text, 4);
  EXPECT_EQ(*store().caches().Purge(cache), 4u);
  EXPECT_EQ(Recorded(), 0);
  Publish(Open(), other, 4);
  Kill();
  EXPECT_EQ(Unclaimed(), 4);
  EXPECT_EQ(Hits(Open(), text, 4), 0);
  EXPECT_EQ(Hits(Open(), other, 4), 4);
  // What is unclaimed goes with a purge, too.
  for (const bool all : {true, false}) {
    Publish(Open(), text, 4);
    Kill();
    ASSERT_GT(Unclaimed(), 0);
    if (all) {
      EXPECT_EQ(store().caches().PurgeAll(), 8u);
    } else {
      const CacheId again = test().Open(MakeConfig("fake", 0));  // its turns have not come
      EXPECT_EQ(*store().caches().Purge(again), 4u);
    }
    EXPECT_EQ(Unclaimed(), 0);
    CheckAll();
    Kill();
    EXPECT_EQ(Unclaimed(), 0);
  }
  // And what was evicted.
  const CacheId full = Open();
  for (uint32_t salt = 0; test().store_metrics.evicted_blocks.Value() == 0; salt += 1000) {
    Publish(full, MakeText(8 * kPage, salt), 8);
  }
  const double left = test().store_metrics.published_blocks.Value();
  EXPECT_EQ(Recorded(), left);
  Kill();
  EXPECT_EQ(Unclaimed(), left);
}

TEST_F(PageStoreRecoveryTest, AFlippedByteLosesExactlyItsBlock) {
  const Text text = MakeText(8 * kPage);
  CacheId cache = Open();
  Publish(cache, text, 8);
  const uint64_t place = PlaceOf(cache, text, 5);
  Kill();
  cache = Open();
  FlipByte(place);
  const auto hit = store().Create(cache, Names(cache, text, 8));
  EXPECT_EQ(hit->match.hit_blocks, 5);
  EXPECT_EQ(hit->match.reason, MissReason::kChecksum);
  store().Drop(hit->sequence);
  EXPECT_EQ(test().store_metrics.checksum_failures.Value(), 1);
  EXPECT_EQ(test().store_metrics.published_blocks.Value(), 7);
  Finish();
  Kill();
  EXPECT_EQ(Unclaimed(), 7);
}

TEST_F(PageStoreRecoveryTest, UnclaimedBlocksMakeRoom) {
  const CacheId before = Open("raw", "a");
  uint32_t salt = 0;
  for (; test().store_metrics.evicted_blocks.Value() == 0; salt += 1000) Publish(before, MakeText(8 * kPage, salt), 8);
  Kill();
  const double all = Unclaimed();
  ASSERT_GT(all, 0);
  // As much as the pool has, of another tenant, takes its equal part, and is refused nothing.
  const CacheId other = Open("raw", "uid:9/b");
  for (uint32_t i = 0; i < salt; i += 1000) {
    Publish(other, MakeText(8 * kPage, i), 8);
    if (i % 50000 == 0) CheckAll();
  }
  EXPECT_LE(Unclaimed(), all / 2);
  EXPECT_EQ(test().store_metrics.exhausted.Value(), 0);
  EXPECT_EQ(test().store_metrics.unclaimed_lost_blocks.Value(), all - Unclaimed());
  // What is left is what it was.
  const double left = Unclaimed();
  const CacheId again = Open("raw", "a");
  EXPECT_EQ(Unclaimed(), 0);
  uint64_t there = 0;
  for (uint32_t i = 0; i < salt; i += 1000) {
    const int hits = Hits(again, MakeText(8 * kPage, i), 8);
    if (hits > 0) ExpectStored(again, MakeText(8 * kPage, i), hits);
    there += static_cast<uint64_t>(hits);
  }
  EXPECT_LE(there, left);  // parts of prefixes whose beginnings are gone are not found by them
  CheckAll();
}

TEST_F(PageStoreRecoveryTest, TheFirstBlocksOfAPrefixGoLast) {
  const Text text = MakeText(64 * kPage);
  Publish(Open("raw"), text, 64);
  Kill();
  const CacheId cache = Open("raw");
  ASSERT_EQ(Hits(cache, MakeText(kPage, 5), 1), 0);
  // Evicts some of them, from the end on.
  for (uint32_t salt = 1000; test().store_metrics.evicted_blocks.Value() == 0; salt += 1000) {
    Publish(cache, MakeText(8 * kPage, salt), 8);
  }
  const double evicted = test().store_metrics.evicted_blocks.Value();
  ASSERT_LT(evicted, 64);
  EXPECT_EQ(Hits(cache, text, 64), 64 - evicted);
}

TEST_F(PageStoreRecoveryTest, WhatIsLookedForIsClaimedAtOnce) {
  const Text text = MakeText(64 * kPage), other = MakeText(64 * kPage, 99);
  Publish(Open(), text, 64);
  Publish(Open(), other, 64);
  Kill();
  const CacheId cache = test().Open(MakeConfig("fake", 0));  // its turns have not come
  EXPECT_EQ(Hits(cache, text, 3), 3);
  EXPECT_EQ(Unclaimed(), 125);
  CheckAll();
  const auto hit = store().Create(cache, Names(cache, other, 5));
  EXPECT_EQ(hit->match.hit_blocks, 5);
  ExpectStored(cache, text, 8);
  EXPECT_EQ(Unclaimed(), 115);
  CheckAll();
  store().Drop(hit->sequence);
  EXPECT_EQ(*store().caches().Purge(cache), 128u);  // claimed, and held for a moment, or not
  EXPECT_EQ(Recorded(), 0);
  CheckAll();
  Turns();
  EXPECT_EQ(test().pool->used_bytes(), 0u);
}

// What was kept is taken, as if somebody had published it first.
TEST_F(PageStoreRecoveryTest, PublishedAnewBeforeItIsClaimed) {
  const Text text = MakeText(8 * kPage);
  Publish(Open(), text, 8);
  Kill();
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const SequenceId sequence = Filled(cache, text, 8 * kPage);  // its turns have not come
  const auto published = store().Publish(sequence, Names(cache, text, 8));
  ASSERT_TRUE(published.ok());
  Turns();
  EXPECT_EQ(Unclaimed(), 0);
  EXPECT_EQ(test().store_metrics.unclaimed_lost_blocks.Value(), 0);
  const auto hit = store().Create(cache, Names(cache, text, 8));
  EXPECT_EQ(hit->match.hit_blocks, 8);
  store().Drop(hit->sequence);
  store().Drop(sequence);
  Finish();
  ExpectStored(cache, text, 8);
  EXPECT_EQ(Recorded(), 8);
}

TEST_F(PageStoreRecoveryTest, WhatIsRecordedIsHostileUntilItWasChecked) {
  const Text text = MakeText(8 * kPage);
  Publish(Open(), text, 8);
  Kill();
  Forge([&](KeptManifest& manifest, auto found) {
    ASSERT_EQ(found.size(), 8u);
    const auto forge = [&](size_t which, auto change) {
      auto [entry, block] = found[which];
      manifest.Erase(entry);
      change(block);
      ASSERT_NE(manifest.Write(block), 0u);
    };
    forge(0, [](KeptBlock& block) { block.pages[0].place.number += 1; });          // of another block
    forge(1, [](KeptBlock& block) { block.pages[0].place.slot_bytes *= 2; });      // of another size
    forge(2, [](KeptBlock& block) { block.pages.pop_back(); });                    // too few layers
    forge(3, [](KeptBlock& block) { block.tokens = 999; });                        // of another geometry
    forge(4, [](KeptBlock& block) { block.index = UINT32_MAX; });                  // of no sequence
    forge(5, [](KeptBlock& block) { block.pages[0].raw = true; });                 // of another form
    forge(6, [](KeptBlock& block) { block.tenant = "another"; });                  // of another tenant
    forge(7, [](KeptBlock& block) { block.pages[0].place.number = UINT32_MAX; });  // nowhere
  });
  CheckAll();
  const CacheId cache = Open();
  EXPECT_EQ(Unclaimed(), 0);
  CheckAll();
  // One of the two that name the same slot may be there; its bytes are compared before anybody reads them.
  EXPECT_LE(test().store_metrics.published_blocks.Value(), 1);
  const auto hit = store().Create(cache, Names(cache, text, 8));
  EXPECT_LE(hit->match.hit_blocks, 1);
  store().Drop(hit->sequence);
  Publish(cache, text, 8);
  ExpectStored(cache, text, 8);
  EXPECT_EQ(store().caches().PurgeAll(), 8u);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
}

TEST_F(PageStoreRecoveryTest, ATenantsMemoryStaysItsOwn) {
  const Text text = MakeText(8 * kPage);
  Publish(Open("raw", "uid:1/a"), text, 8);
  const auto bytes = [&](const std::string& name) {
    for (const PoolShare& share : store().report().Shares()) {
      if (share.payer == name) return share.bytes;
    }
    return uint64_t{0};
  };
  const uint64_t before = bytes("uid:1");
  EXPECT_GT(before, 0u);
  Kill();
  CheckAll();
  EXPECT_EQ(bytes("uid:1"), before);
  // Others get nothing of it, also by its name.
  EXPECT_EQ(Hits(Open("raw", "uid:2/b"), text, 8), 0);
  EXPECT_EQ(Hits(Open("raw", "uid:1/a"), text, 8), 8);
}

class RecoveryBelowAGpuTest : public PageStoreRecoveryTest {
 protected:
  RecoveryBelowAGpuTest() {
    device_bytes_ = 16 << 20;
    moves_ = true;
  }
};

TEST_F(RecoveryBelowAGpuTest, ACacheOnAGpuClaimsWhatTheHostHas) {
  const Text text = MakeText(8 * kPage);
  Publish(Open("raw"), text, 8);
  Kill();
  CacheConfig config = MakeConfig("raw", 0);
  config.device = TestDevice::kOrdinal;
  const CacheId gpu = test().Open(config);
  Turns();
  EXPECT_EQ(Unclaimed(), 0);
  EXPECT_EQ(Hits(gpu, text, 8), 8);
  CheckAll();
}

class RecoveryWithADiskTest : public PageStoreRecoveryTest {
 protected:
  RecoveryWithADiskTest() { has_disk_ = true; }
};

TEST_F(RecoveryWithADiskTest, WhatTheDiskHasNotIsWritten) {
  const Text text = MakeText(8 * kPage), other = MakeText(8 * kPage, 99);
  Publish(Open(), text, 8);
  Finish();
  Publish(Open(), other, 8);
  ASSERT_EQ(disk_.stored.size(), 8u);
  Kill();  // before the others are written
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  EXPECT_EQ(Hits(cache, other, 8), 8);
  for (int i = 0; i < 3; ++i) {
    const auto load = BeginLoad(cache, Names(cache, other, 8));
    EXPECT_TRUE(load->done());
    const auto hit = store().Create(cache, Names(cache, other, 8));
    EXPECT_EQ(hit->match.hit_blocks, 8) << i;
    store().Drop(hit->sequence);
    Turns();
  }
  Finish();
  EXPECT_EQ(disk_.stored.size(), 16u);
  CheckAll();
  // From memory where that has it, else from the disk.
  Publish(cache, MakeText(8 * kPage, 7), 8);
  Finish();
  Kill();
  keeper_.Forget();
  const CacheId cold = Open();
  EXPECT_EQ(LoadAndCreate(cold, Names(cold, other, 8)).match.hit_blocks, 8);
}

// Random work and kills: whatever was recorded is found with its bytes, and nothing else.
TEST_F(PageStoreRecoveryTest, AtRandom) {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    std::mt19937 random(seed);
    keeper_.Forget();
    Kill();
    std::set<uint32_t> texts;
    CacheId cache = Open(seed % 2 == 0 ? "declining" : "fake");
    for (int step = 0; step < 120; ++step) {
      const uint32_t salt = 1000 * (random() % 200);
      const int blocks = 1 + static_cast<int>(random() % 8);
      const Text text = MakeText(8 * kPage, salt);
      switch (random() % 8) {
        case 0: {
          const double recorded = Recorded(), unclaimed = Unclaimed();
          Kill();
          ASSERT_EQ(Unclaimed(), recorded + unclaimed);
          CheckAll();
          if (random() % 3 > 0) cache = Open(seed % 2 == 0 ? "declining" : "fake");
          if (random() % 3 > 0) break;
          cache = test().Open(MakeConfig(seed % 2 == 0 ? "declining" : "fake", 0));  // some turns are yet to come
          store().long_calls().ReleaseSome();
          break;
        }
        case 1: {
          cache = Open(seed % 2 == 0 ? "declining" : "fake");
          FinishEncodes();
          const int hits = Hits(cache, text, 8);
          if (hits > 0) ExpectStored(cache, text, hits);
          break;
        }
        case 2: {  // an encoding that is not done
          cache = Open(seed % 2 == 0 ? "declining" : "fake");
          const SequenceId sequence = Create(cache);
          if (test().AppendAll(cache, sequence, text, 0, blocks * kPage).ok()) {
            ASSERT_TRUE(store().Publish(sequence, Names(cache, text, blocks)).ok());
          }
          store().Drop(sequence);
          if (random() % 2 == 0 && test().executor.jobs() > 0) test().executor.FinishOne(0);
          break;
        }
        default:
          cache = Open(seed % 2 == 0 ? "declining" : "fake");
          Publish(cache, text, blocks);
      }
      if (step % 20 == 0) CheckAll();
    }
  }
}

}  // namespace
}  // namespace kvmanager
