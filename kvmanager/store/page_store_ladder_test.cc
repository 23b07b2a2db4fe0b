// Blocks of ladders under pressure: what is lowered, what stays, and what is read of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/store/disk_fixture.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::TestDevice;
using testing::Text;

constexpr uint64_t kSlabBytes = 2 << 20;
constexpr int kRun = 8;    // blocks of a sequence
constexpr int kSinks = 2;  // of them
constexpr uint64_t kRawBytes = 8192;

class PageStoreLadderTest : public testing::PageStoreOnDiskTest {
 protected:
  PageStoreLadderTest() {
    has_disk_ = false;
    pool_bytes_ = 8 * kSlabBytes;
  }
  CacheId Open(const std::string& codec = "ladder", const std::string& tenant = "a") {
    return test().Open(MakeConfig(codec, 0, tenant));
  }
  StoreMetrics& metrics() { return test().store_metrics; }
  double Lowered() { return metrics().Rung(1).lowered_blocks->Value(); }
  static Text TextOf(uint32_t salt, int blocks = kRun) { return MakeText(blocks * kPage, salt * 1000); }
  std::vector<BlockName> PublishOne(CacheId cache, uint32_t salt) {
    const auto names = Publish(cache, TextOf(salt), kRun);
    Finish();
    return names;
  }
  int Hits(CacheId cache, uint32_t salt) {
    return store().caches().Match(cache, Names(cache, TextOf(salt), kRun))->hit_blocks;
  }
  // Publishes texts first, first + 1, ... until something was evicted; the number of texts.
  uint32_t PublishUntilFull(CacheId cache, uint32_t first = 0) {
    uint32_t salt = first;
    for (const double before = metrics().evicted_blocks.Value(); metrics().evicted_blocks.Value() == before; ++salt) {
      PublishOne(cache, salt);
    }
    return salt;
  }
  // What a page of a text is on a rung; empty: its codec declines it.
  std::vector<uint8_t> Expected(CacheId cache, const Text& text, uint32_t block, int layer, int rung) {
    const auto codec = store().caches().codec(cache);
    const std::vector<uint8_t> raw = MakeRawPage(codec->layout(), text, block, kPage, layer);
    std::vector<uint8_t> encoded = MakeEncodedPage(codec->rung(0), raw, block, layer);
    if (rung == 0 || encoded.empty()) return encoded;
    std::vector<uint8_t> decoded(codec->layout().raw_bytes());
    const DecodeItem item{encoded.data(), decoded.data(), static_cast<uint32_t>(layer)};
    codec->rung(0).Decode({&item, 1});
    return MakeEncodedPage(codec->rung(1), decoded, block, layer);
  }
  // Every page of a text's first blocks, through a sequence that begins with them: their rungs, of each block one.
  std::vector<int> RungsOf(CacheId cache, const Text& text, int blocks) {
    const auto created = store().Create(cache, Names(cache, text, blocks));
    EXPECT_TRUE(created.ok()) << created.status();
    EXPECT_EQ(created->match.hit_blocks, blocks);
    std::vector<int> rungs;
    for (int layer = 0; layer < 2 && created->match.hit_blocks == blocks; ++layer) {
      const AttendEntry entry{created->sequence, 0, blocks * kPage};
      const auto lease = store().Load(cache, layer, {&entry, 1});
      EXPECT_TRUE(lease.ok()) << lease.status();
      const absl::Span<const AttentionPage> pages = (*lease)->pages(0);
      for (int block = 0; block < blocks; ++block) {
        const AttentionPage& page = pages[block];
        const bool is_sink = Expected(cache, text, block, layer, 0).empty();
        EXPECT_EQ(page.raw != nullptr, is_sink);
        const auto expected = is_sink ? MakeRawPage(store().caches().codec(cache)->layout(), text, block, kPage, layer)
                                      : Expected(cache, text, block, layer, page.rung);
        const uint8_t* const data = is_sink ? page.raw : page.encoded;
        EXPECT_EQ(std::memcmp(data, expected.data(), expected.size()), 0) << "block " << block;
        if (layer == 0) rungs.push_back(page.rung);
        EXPECT_EQ(rungs[block], page.rung);
      }
    }
    store().Drop(created->sequence);
    Turns();
    return rungs;
  }
  // Publishes texts until blocks are being lowered; nothing else is under way then.
  void PublishUntilSomeAreLowered(CacheId cache) {
    for (uint32_t salt = 0; test().executor.jobs() == 0; ++salt) {
      PublishOne(cache, salt);
      const SequenceId sequence = Create(cache);
      EXPECT_TRUE(test().AppendAll(cache, sequence, TextOf(9999), 0, kPage / 2).ok());
      store().Drop(sequence);
      Turns();
    }
    EXPECT_GT(metrics().lowering_bytes.Value(), 0);
    CheckAll();
  }
  void CheckAll() { store().report().CheckInvariants(); }
};

TEST_F(PageStoreLadderTest, MoreFitsThanOnTheUpperRungAlone) {
  const auto texts_there = [this](const std::string& codec) {
    test_ = nullptr;
    const CacheId cache = Open(codec);
    int there = 0;
    for (uint32_t salt = 0; salt < 600; ++salt) PublishOne(cache, salt);
    for (uint32_t salt = 0; salt < 600; ++salt) there += Hits(cache, salt) == kRun;
    CheckAll();
    return there;
  };
  const int upper = texts_there("sinks");
  EXPECT_GT(upper, 150);
  // A text has 2 blocks of sinks and 6 others, half of whose bytes are on either rung: 66 KB, where it had 83.
  EXPECT_GT(texts_there("ladder"), upper * 1.15);
  EXPECT_GT(Lowered(), 0);
  EXPECT_EQ(metrics().Rung(1).lowered_freed_bytes->Value(), Lowered() * 2 * kRawBytes / 4);
}

TEST_F(PageStoreLadderTest, TheColdestAreOnTheLowerRung) {
  const CacheId cache = Open();
  const uint32_t texts = PublishUntilFull(cache);
  EXPECT_GT(Lowered(), 0);
  CheckAll();
  EXPECT_EQ(RungsOf(cache, TextOf(texts - 1), kRun), std::vector<int>(kRun, 0));
  uint32_t oldest = 0;
  while (Hits(cache, oldest) < kRun) ++oldest;
  std::vector<int> lowered(kRun, 1);
  std::fill(lowered.begin(), lowered.begin() + kSinks, 0);
  EXPECT_EQ(RungsOf(cache, TextOf(oldest), kRun), lowered);
  EXPECT_GT(metrics().Rung(1).hit_blocks->Value(), 0);
  CheckAll();
}

TEST_F(PageStoreLadderTest, AboutHalfOfTheBytesStayOnTheUpperRung) {
  const CacheId cache = Open();
  const uint32_t texts = PublishUntilFull(cache);
  const uint32_t end = texts * 3;
  for (uint32_t salt = texts; salt < end; ++salt) PublishOne(cache, salt);
  const double upper = metrics().Rung(0).bytes->Value(), lower = metrics().Rung(1).bytes->Value();
  EXPECT_GT(upper, (upper + lower) * 0.35);
  EXPECT_LT(upper, (upper + lower) * 0.65);
  // One order: behind the first text on the upper rung no older one is.
  bool was_upper = false;
  for (uint32_t salt = 0; salt < end; ++salt) {
    if (Hits(cache, salt) < kRun) continue;
    const bool is_upper = RungsOf(cache, TextOf(salt), kRun).back() == 0;
    EXPECT_TRUE(is_upper || !was_upper) << salt;
    was_upper |= is_upper;
  }
  CheckAll();
}

TEST_F(PageStoreLadderTest, WhatIsUsedIsNotLowered) {
  const CacheId cache = Open();
  const auto names = PublishOne(cache, 0);
  const auto held = store().Create(cache, names);
  ASSERT_EQ(held->match.hit_blocks, kRun);
  PublishUntilFull(cache, 1);
  EXPECT_GT(Lowered(), 0);
  EXPECT_EQ(RungsOf(cache, TextOf(0), kRun), std::vector<int>(kRun, 0));
  store().Drop(held->sequence);
}

TEST_F(PageStoreLadderTest, WhatIsTakenMeanwhileStays) {
  const CacheId cache = Open();
  PublishUntilSomeAreLowered(cache);
  std::vector<SequenceId> held;
  std::map<uint32_t, std::vector<int>> rungs;
  for (uint32_t salt = 0; salt < 400; ++salt) {
    if (Hits(cache, salt) < kRun) continue;
    held.push_back(store().Create(cache, Names(cache, TextOf(salt), kRun))->sequence);
    rungs[salt] = RungsOf(cache, TextOf(salt), kRun);
  }
  const double lowered = Lowered();
  Finish();
  EXPECT_GT(metrics().Rung(1).unlowered_blocks->Value(), 0);
  EXPECT_EQ(Lowered(), lowered);
  for (const auto& [salt, before] : rungs) EXPECT_EQ(RungsOf(cache, TextOf(salt), kRun), before) << salt;
  for (const SequenceId sequence : held) store().Drop(sequence);
  CheckAll();
}

TEST_F(PageStoreLadderTest, APurgeMeanwhileLeavesNothing) {
  const CacheId cache = Open();
  PublishUntilSomeAreLowered(cache);
  const double lowered = Lowered();
  EXPECT_TRUE(store().caches().Purge(cache).ok());
  EXPECT_EQ(Hits(cache, 0), 0);
  CheckAll();
  Finish();
  CheckAll();
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
  EXPECT_EQ(metrics().lowering_bytes.Value(), 0);
  EXPECT_EQ(Lowered(), lowered);
}

TEST_F(PageStoreLadderTest, TheStoreMayGoMeanwhile) {
  const CacheId cache = Open();
  PublishUntilSomeAreLowered(cache);
  test().store = nullptr;
  test().executor.FinishAll();
}

TEST_F(PageStoreLadderTest, WhatHasChangedIsNotPassedOn) {
  const CacheId cache = Open();
  PublishOne(cache, 0);
  const auto held = store().Create(cache, Names(cache, TextOf(0), kRun));
  const AttendEntry entry{held->sequence, 0, kRun * kPage};
  uint8_t* data = nullptr;
  {
    const auto lease = store().Load(cache, 1, {&entry, 1});
    data = const_cast<uint8_t*>((*lease)->pages(0)[kRun - 1].encoded);
  }
  store().Drop(held->sequence);
  data[100] ^= 1;
  for (uint32_t salt = 1; metrics().checksum_failures.Value() == 0; ++salt) {
    ASSERT_EQ(metrics().evicted_blocks.Value(), 0) << "it was not lowered";
    PublishOne(cache, salt);
  }
  // The block alone is lost.
  EXPECT_EQ(Hits(cache, 0), kRun - 1);
  CheckAll();
}

TEST_F(PageStoreLadderTest, WhatTheNextCodecDeclinesStays) {
  const CacheId cache = Open("declining_ladder");
  const uint32_t texts = PublishUntilFull(cache);
  EXPECT_GT(Lowered(), 0);
  EXPECT_GT(metrics().Rung(1).unlowered_blocks->Value(), 0);
  int stayed = 0, lowered = 0;
  for (uint32_t salt = 0; salt < texts; ++salt) {
    const int hits = Hits(cache, salt);
    if (hits == 0) continue;
    const std::vector<int> rungs = RungsOf(cache, TextOf(salt), hits);
    for (int block = 0; block < hits; ++block) {
      const bool declined =
          Expected(cache, TextOf(salt), block, 0, 1).empty() || Expected(cache, TextOf(salt), block, 1, 1).empty();
      EXPECT_FALSE(declined && rungs[block] == 1);
      stayed += declined;
      lowered += rungs[block];
    }
  }
  EXPECT_GT(stayed, 0);
  EXPECT_GT(lowered, 0);
  CheckAll();
}

TEST_F(PageStoreLadderTest, WhatAClientKeepsLongerStaysOnItsRung) {
  const CacheId cache = Open();
  const auto names = PublishOne(cache, 0);
  ASSERT_TRUE(store().caches().Retain(cache, names, 80, 0).ok());
  const uint32_t texts = PublishUntilFull(cache, 1);
  for (uint32_t salt = texts; salt < texts * 2; ++salt) PublishOne(cache, salt);
  EXPECT_EQ(RungsOf(cache, TextOf(0), kRun), std::vector<int>(kRun, 0));
  CheckAll();
}

TEST_F(PageStoreLadderTest, ATenantThatHasItsMostLowersItsOwn) {
  pool_bytes_ = 64 * kSlabBytes;
  Quotas quotas;
  quotas.tenants["a"].host.most_bytes = 6 * kSlabBytes;
  ASSERT_TRUE(store().report().SetQuotas(quotas).ok());
  const CacheId cache = Open(), other = Open("ladder", "b");
  PublishOne(other, 1);
  PublishUntilFull(cache);
  EXPECT_GT(Lowered(), 0);
  EXPECT_EQ(RungsOf(other, TextOf(1), kRun), std::vector<int>(kRun, 0));
  CheckAll();
}

TEST_F(PageStoreLadderTest, NothingIsLoweredWhileThereIsRoom) {
  const CacheId cache = Open();
  for (uint32_t salt = 0; salt < 10; ++salt) PublishOne(cache, salt);
  EXPECT_EQ(Lowered(), 0);
}

TEST_F(PageStoreLadderTest, OverARestart) {
  is_kept_ = true;
  const CacheId cache = Open();
  const uint32_t texts = PublishUntilFull(cache);
  std::map<uint32_t, std::vector<int>> rungs;
  for (uint32_t salt = 0; salt < texts; ++salt) {
    if (Hits(cache, salt) == kRun) rungs[salt] = RungsOf(cache, TextOf(salt), kRun);
  }
  CheckAll();
  Kill();
  const CacheId again = Open();
  Turns();
  CheckAll();
  int lowered = 0;
  for (const auto& [salt, of] : rungs) {
    EXPECT_EQ(RungsOf(again, TextOf(salt), kRun), of) << salt;
    lowered += of.back();
  }
  EXPECT_GT(lowered, 0);
  CheckAll();
  // And it goes on.
  PublishUntilFull(again, texts);
  CheckAll();
}

TEST_F(PageStoreLadderTest, TheDiskTakesBlocksAsTheyWereEncodedFirst) {
  has_disk_ = true;
  const CacheId cache = Open();
  uint32_t salt = 0;
  for (; Lowered() == 0; ++salt) PublishOne(cache, salt);
  CheckAll();
  // What the disk has not is not lowered, while it takes writes.
  for (uint32_t more = 0; more < 4; ++more) Publish(cache, TextOf(salt + more), kRun);
  FinishEncodes();
  CheckAll();
  Finish();
  Restart();
  const CacheId again = Open();
  const Text text = TextOf(0);
  const auto created = LoadAndCreate(again, Names(again, text, kRun));
  ASSERT_EQ(created.match.hit_blocks, kRun);
  store().Drop(created.sequence);
  EXPECT_EQ(RungsOf(again, text, kRun), std::vector<int>(kRun, 0));
  CheckAll();
}

// No slab is left for the lower rung then, and none becomes free by itself.
TEST_F(PageStoreLadderTest, APoolThatIsFullOfPagesInUseIsLoweredLater) {
  pool_bytes_ = 16 * kSlabBytes;
  const CacheId cache = Open();
  std::vector<SequenceId> held;
  uint32_t salt = 0;
  for (;; ++salt) {
    const SequenceId sequence = Create(cache);
    held.push_back(sequence);
    if (!test().AppendAll(cache, sequence, TextOf(salt), 0, kRun * kPage).ok()) break;
    FinishEncodes();
    ASSERT_TRUE(store().Publish(sequence, Names(cache, TextOf(salt), kRun)).ok());
  }
  EXPECT_EQ(Lowered(), 0);
  for (const SequenceId sequence : held) store().Drop(sequence);
  Finish();
  for (const uint32_t end = salt + 800; salt < end; ++salt) PublishOne(cache, salt);
  EXPECT_GT(Lowered(), 1000);
  const double upper = metrics().Rung(0).bytes->Value(), lower = metrics().Rung(1).bytes->Value();
  EXPECT_GT(lower, (upper + lower) * 0.3);
  CheckAll();
}

TEST_F(PageStoreLadderTest, WhatTheDiskHasNotStopsNothingElse) {
  has_disk_ = true;
  pool_bytes_ = 16 * kSlabBytes;
  const CacheId cache = Open();
  const auto first = PublishOne(cache, 0);
  // The disk lets one go.
  disk_.Erase(store().caches().Describe(cache)->digest, first[kRun - 1].key);
  for (uint32_t salt = 1; salt < 800; ++salt) PublishOne(cache, salt);
  EXPECT_GT(Lowered(), 1000);
  CheckAll();
}

TEST_F(PageStoreLadderTest, WhatWasLoweredBeforeARestartAndTheDiskLacksStopsNothing) {
  has_disk_ = is_kept_ = true;
  pool_bytes_ = 16 * kSlabBytes;
  const CacheId cache = Open();
  uint32_t salt = 0;
  for (; Lowered() < 100; ++salt) PublishOne(cache, salt);
  Kill();
  disk_.stored.clear();
  const CacheId again = Open();
  Turns();
  const double before = Lowered();
  for (const uint32_t end = salt + 800; salt < end; ++salt) PublishOne(again, salt);
  EXPECT_GT(Lowered(), before + 1000);
  EXPECT_GT(disk_.stored.size(), 800);
  CheckAll();
}

TEST_F(PageStoreLadderTest, APauseOfTheDiskLosesItNothing) {
  has_disk_ = true;
  pool_bytes_ = 64 * kSlabBytes;
  const CacheId cache = Open();
  disk_.takes = false;
  constexpr uint32_t kPaused = 500;
  for (uint32_t salt = 0; salt < kPaused; ++salt) PublishOne(cache, salt);
  ASSERT_EQ(metrics().evicted_blocks.Value(), 0);
  EXPECT_EQ(Lowered(), 0);
  disk_.takes = true;
  store().long_calls().LookAgain();
  Finish();
  EXPECT_EQ(disk_.stored.size(), size_t{kPaused} * kRun);
  CheckAll();
}

// Max-min: memory goes from who has more to who has less, and so does precision.
TEST_F(PageStoreLadderTest, WhoHasLessKeepsItsRung) {
  pool_bytes_ = 64 * kSlabBytes;
  const CacheId small = Open("ladder", "a"), hog = Open("fake", "b");
  for (uint32_t salt = 0; salt < 100; ++salt) PublishOne(small, salt);
  const double lowered = Lowered();
  for (uint32_t salt = 0; salt < 3000; ++salt) PublishOne(hog, 1000 + salt);
  EXPECT_GT(metrics().evicted_blocks.Value(), 0);
  EXPECT_EQ(Lowered(), lowered);
  for (uint32_t salt = 0; salt < 100; ++salt) EXPECT_EQ(Hits(small, salt), kRun);
  CheckAll();
}

TEST_F(PageStoreLadderTest, OnlyWhatKnowsRungsReadsThem) {
  device_bytes_ = 4 * kSlabBytes;
  const CacheId cache = Open();
  const auto names = PublishOne(cache, 0);
  const auto reads = store().caches().ReadBlocks(cache, 0, names, {UINT64_MAX, 64});
  EXPECT_TRUE(absl::IsFailedPrecondition(reads.status())) << reads.status();
  EXPECT_EQ(DetailOf(reads.status()).field, "codec");
  const SequenceId sequence = store().Create(cache, names)->sequence;
  const auto sent = store().exports().BeginWhole(sequence, {});
  EXPECT_TRUE(absl::IsFailedPrecondition(sent.status())) << sent.status();
  store().Drop(sequence);
  CacheConfig config = MakeConfig("ladder", 0);
  config.device = TestDevice::kOrdinal;
  const auto on_device = store().caches().Open(config, nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(on_device.status())) << on_device.status();
  EXPECT_EQ(DetailOf(on_device.status()).field, "device");
}

// Random operations, whose jobs end at random: whatever is read is what it must be.
TEST_F(PageStoreLadderTest, RandomOperations) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&random](uint64_t n) { return random() % n; };
    pool_bytes_ = (6 + below(6)) * kSlabBytes;
    is_kept_ = seed % 2 == 0;
    test_ = nullptr;
    keeper_.Forget();
    const std::string codec = seed == 3 ? "declining_ladder" : "ladder";
    CacheId cache = Open(codec);
    std::vector<std::pair<SequenceId, uint32_t>> held;
    int lowered_reads = 0;
    for (int step = 0; step < 3000 && !HasFatalFailure(); ++step) {
      const uint32_t salt = static_cast<uint32_t>(below(400) * below(400) / 400);
      switch (below(8)) {
        case 0:
        case 1:
        case 2:
          if (Hits(cache, salt) == 0) {
            const SequenceId sequence = Create(cache);
            if (test().AppendAll(cache, sequence, TextOf(salt), 0, kRun * kPage).ok()) {
              if (below(4) > 0) FinishEncodes();
              EXPECT_TRUE(store().Publish(sequence, Names(cache, TextOf(salt), kRun)).ok());
            }
            store().Drop(sequence);
          }
          break;
        case 3:
          if (held.size() < 40) {
            if (const int hits = Hits(cache, salt); hits > 0) {
              held.emplace_back(store().Create(cache, Names(cache, TextOf(salt), hits))->sequence, salt);
            }
          }
          break;
        case 4:
          if (!held.empty()) {
            std::swap(held[below(held.size())], held.back());
            store().Drop(held.back().first);
            held.pop_back();
          }
          break;
        case 5: {
          FinishEncodes();
          if (const int hits = Hits(cache, salt); hits > 0) {
            const std::vector<int> rungs = RungsOf(cache, TextOf(salt), hits);
            lowered_reads += static_cast<int>(std::count(rungs.begin(), rungs.end(), 1));
          }
          break;
        }
        case 6:
          if (test().executor.jobs() > 0) test().executor.FinishOne(below(test().executor.jobs()));
          break;
        case 7:
          if (below(200) == 0) {
            EXPECT_TRUE(store().caches().Purge(cache).ok());
            cache = Open(codec);
          } else if (is_kept_ && below(200) == 0) {
            held.clear();
            Kill();
            cache = Open(codec);
          }
          break;
      }
      Turns();
      if (step % 16 == 0) CheckAll();
    }
    EXPECT_GT(lowered_reads, 50) << seed;
    for (const auto& [sequence, salt] : held) store().Drop(sequence);
    Finish();
    CheckAll();
  }
}

}  // namespace
}  // namespace kvmanager
