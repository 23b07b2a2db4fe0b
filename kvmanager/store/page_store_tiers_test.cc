// Blocks that move between a GPU and the host, one rule after the other. Kernels are what a test does with the bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "kvmanager/base/status.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::TestDevice;
using testing::Text;

class PageStoreTiersTest : public PageStoreTest {
 protected:
  PageStoreTiersTest() {
    pool_bytes_ = 16 << 20;
    device_bytes_ = 4 << 20;
    moves_ = true;
  }
  void TearDown() override {
    if (test_ != nullptr && test_->store != nullptr) {
      device().mover.FinishAll();
      test().executor.FinishAll();
    }
    PageStoreTest::TearDown();
  }
  TestDevice& device() { return test().device; }
  CacheConfig Config(const std::string& codec, int lag_pages = 0, int layers = 1, int on = TestDevice::kOrdinal) {
    CacheConfig config = MakeConfig(codec, lag_pages, "a", layers);
    config.device = on;
    return config;
  }
  // Tokens [position, position + tokens) of `text` in every layer, their bytes written and pages encoded.
  absl::Status Extend(CacheId cache, SequenceId sequence, const Text& text, uint64_t position, int tokens) {
    const CacheConfig config = store().caches().Describe(cache)->config;
    AppendEntry entry;
    entry.sequence = sequence;
    entry.position = position;
    entry.tokens = tokens;
    KV_RETURN_IF_ERROR(store().Append(cache, {0, config.layers}, {&entry, 1}));
    for (int layer = 0; layer < config.layers; ++layer) {
      std::vector<PagePlace> places;
      KV_RETURN_IF_ERROR(store().tables().TakeChanges(sequence, layer, &places));
      for (const PagePlace& place : places) {
        const uint64_t begin = uint64_t{place.page} * kPage;
        if (!place.raw.valid() || begin + kPage <= position) continue;
        const int count = static_cast<int>(std::min<uint64_t>(kPage, position + tokens - begin));
        const auto page = MakeRawPage(config.layout, text, place.page, count, layer);
        std::memcpy(device().pool->Data(place.raw), page.data(), page.size());
        if (count < kPage) std::memset(device().pool->Data(place.raw) + page.size() - 32, 0xff, 32);  // what was there
      }
    }
    device().executor.FinishAll();
    return absl::OkStatus();
  }
  SequenceId Written(CacheId cache, const Text& text, int tokens) {
    const SequenceId sequence = Create(cache);
    const absl::Status status = Extend(cache, sequence, text, 0, tokens);
    EXPECT_TRUE(status.ok()) << status;
    return sequence;
  }
  // Published blocks that nobody uses.
  void Publish(CacheId cache, const Text& text, int blocks) {
    const SequenceId sequence = Written(cache, text, blocks * kPage);
    EXPECT_EQ(store().Publish(sequence, Names(cache, text, blocks))->published, blocks);
    store().Drop(sequence);
  }
  void Land() {
    device().mover.FinishAll();
    test().executor.FinishAll();
  }
  std::unique_ptr<ArrivalLease> Fetch(CacheId cache, const Text& text, int blocks) {
    auto lease = store().Fetch(cache, Names(cache, text, blocks));
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  // The bytes of every page, as a hand-off would send them.
  void ExpectOnHost(SequenceId sequence, const Text& text) {
    const auto lease = store().exports().Whole(sequence);
    ASSERT_TRUE(lease.ok()) << lease.status();
    const uint64_t all_tokens = (*lease)->header().tokens;
    const auto codec = store().caches().codec(store().Describe(sequence)->cache);
    for (const testing::SentPage& sent : testing::TakeAll(**lease)) {
      const HandOffPage& page = sent.page;
      const int tokens = static_cast<int>(std::min<uint64_t>(kPage, all_tokens - uint64_t{page.block} * kPage));
      auto expected = MakeRawPage(codec->layout(), text, page.block, tokens, page.layer);
      if (sent.encoded) {
        expected = testing::MakeEncodedPage(*codec, expected, page.block, static_cast<int>(page.layer));
      }
      ASSERT_EQ(page.bytes, expected.size());
      EXPECT_EQ(std::memcmp(sent.bytes.bytes.data(), expected.data(), expected.size()), 0)
          << "page " << sent.bytes.page;
      EXPECT_EQ(sent.bytes.checksum, testing::Checksum(expected));
    }
  }
  // Every page of `sequence` that is read encoded.
  void ExpectOnDevice(SequenceId sequence, const Text& text) {
    const CacheId cache = store().Describe(sequence)->cache;
    const auto codec = store().caches().codec(cache);
    for (int layer = 0; layer < store().caches().Describe(cache)->config.layers; ++layer) {
      std::vector<PagePlace> places;
      ASSERT_TRUE(store().tables().TakeChanges(sequence, layer, &places).ok());
      for (const PagePlace& place : places) {
        const auto raw = MakeRawPage(codec->layout(), text, place.page, kPage, layer);
        const auto expected = testing::MakeEncodedPage(*codec, raw, place.page, layer);
        const PageId slot = place.encoded.valid() ? place.encoded : place.raw;
        EXPECT_EQ(std::memcmp(device().pool->Data(slot), expected.data(), expected.size()), 0) << "page " << place.page;
      }
    }
  }
  uint64_t Demoted() { return static_cast<uint64_t>(test().store_metrics.demoted_blocks.Value()); }
  uint64_t Fetched() { return static_cast<uint64_t>(test().store_metrics.fetched_blocks.Value()); }
  // Extends a sequence of another text until everything that can be evicted was.
  void Crowd(CacheId cache, int tokens) {
    const SequenceId other = Create(cache);
    const Text text = MakeText(tokens, 99);
    for (int position = 0; position < tokens; position += kPage) {
      absl::Status status = Extend(cache, other, text, position, kPage);
      for (int i = 0; i < 200 && !status.ok() && store().tables().AwaitsRelease(TestDevice::kOrdinal); ++i) {
        Land();
        status = Extend(cache, other, text, position, kPage);
      }
      ASSERT_TRUE(status.ok()) << status;
    }
    store().Drop(other);
  }

  static constexpr int kPoolPages = (4 << 20) / (2 * 4 * kPage * 32 * 2);  // raw ones
  static constexpr int kEncodedPages = (2 << 20) / (4096 + 64);            // of "fake", beside raw ones
};

TEST_F(PageStoreTiersTest, WhatIsEvictedComesBack) {
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText(40 * kPage);
  Publish(cache, text, 40);
  Crowd(cache, kPoolPages * kPage);
  EXPECT_GE(Demoted(), 40u);
  EXPECT_EQ(store().Create(cache, Names(cache, text, 40))->match.hit_blocks, 0);
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 40))->hit_blocks, 40);
  auto lease = Fetch(cache, text, 40);
  bool called = false;
  lease->OnReady([&called] { called = true; });
  EXPECT_FALSE(lease->ready() || called);
  store().report().CheckInvariants();
  Land();
  ASSERT_TRUE(lease->ready() && called);
  const auto made = lease->Commit();
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->match.hit_blocks, 40);
  EXPECT_EQ(Fetched(), 40u);
  ExpectOnDevice(made->sequence, text);
  EXPECT_EQ(store().Describe(made->sequence)->tokens, 40u * kPage);
  // Nothing more has to move for the next one, nor to evict it again.
  const auto again = Fetch(cache, text, 40);
  EXPECT_TRUE(again->ready());
  EXPECT_EQ(again->Commit()->match.hit_blocks, 40);
  EXPECT_EQ(Fetched(), 40u);
}

TEST_F(PageStoreTiersTest, DemotesAheadOfNeedOldestFirst) {
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText((kPoolPages - 40) * kPage);
  Publish(cache, text, kPoolPages - 40);
  EXPECT_EQ(device().mover.moves(), 0u);  // while there is room
  const SequenceId other = Written(cache, MakeText(20 * kPage, 5), 20 * kPage);
  EXPECT_GT(device().mover.moves(), 0u);
  Land();
  EXPECT_GT(Demoted(), 0u);
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), 0);  // copied, not gone
  // The host has the last ones: children go first, since a prefix without its end is still one.
  CacheConfig config = Config("raw");
  config.device = CacheConfig::kHost;
  const CacheId host = test().Open(config);
  EXPECT_EQ(store().caches().Describe(host)->published_blocks, Demoted());
  EXPECT_EQ(store().caches().Match(host, Names(host, text, 1))->hit_blocks, 0);
  // What the host has goes without waiting.
  ASSERT_TRUE(Extend(cache, other, MakeText(60 * kPage, 5), 20 * kPage, 25 * kPage).ok());
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
}

TEST_F(PageStoreTiersTest, OneFetchServesAllWhoAsk) {
  const CacheId cache = test().Open(Config("fake", 1, 2));
  const Text text = MakeText(8 * kPage);
  Publish(cache, text, 8);
  Crowd(cache, kEncodedPages / 2 * kPage);
  ASSERT_EQ(store().Create(cache, Names(cache, text, 1))->match.hit_blocks, 0);
  auto a = Fetch(cache, text, 8), b = Fetch(cache, text, 6), gone = Fetch(cache, text, 8);
  EXPECT_EQ(device().mover.moves(), 1u);
  gone = nullptr;
  store().report().CheckInvariants();
  Land();
  ASSERT_TRUE(a->ready() && b->ready());
  EXPECT_EQ(a->Commit()->match.hit_blocks, 8);
  const auto made = b->Commit();
  EXPECT_EQ(made->match.hit_blocks, 6);
  ExpectOnDevice(made->sequence, text);
  EXPECT_EQ(Fetched(), 8u);
  EXPECT_FALSE(b->Commit().ok());
}

TEST_F(PageStoreTiersTest, WhatNobodyWaitsForArrivesAllTheSame) {
  const CacheId cache = test().Open(Config("fake"));
  const Text text = MakeText(4 * kPage);
  Publish(cache, text, 4);
  Crowd(cache, kEncodedPages * kPage);
  Fetch(cache, text, 4) = nullptr;
  store().report().CheckInvariants();
  Land();
  EXPECT_EQ(store().Create(cache, Names(cache, text, 4))->match.hit_blocks, 4);
}

TEST_F(PageStoreTiersTest, ABlockThatIsUsedAgainStays) {
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText((kPoolPages - 10) * kPage);
  Publish(cache, text, kPoolPages - 10);
  const SequenceId other = Written(cache, MakeText(kPage, 5), kPage);
  ASSERT_GT(device().mover.moves(), 0u);
  const auto hit = store().Create(cache, Names(cache, text, kPoolPages - 10));
  EXPECT_EQ(hit->match.hit_blocks, kPoolPages - 10);
  Land();
  EXPECT_EQ(store().Describe(hit->sequence)->published_blocks, kPoolPages - 10);
  ExpectOnDevice(hit->sequence, text);
  store().Drop(other);
}

TEST_F(PageStoreTiersTest, NothingPurgedIsFoundAgain) {
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText((kPoolPages - 10) * kPage);
  const auto names = Names(cache, text, kPoolPages - 10);
  Publish(cache, text, kPoolPages - 10);
  const SequenceId other = Written(cache, MakeText(kPage, 5), kPage);
  ASSERT_GT(device().mover.moves(), 0u);
  ASSERT_TRUE(store().caches().Purge(cache).ok());
  store().report().CheckInvariants();
  Land();
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 0);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  EXPECT_EQ(store().caches().List().size(), 1u);  // the host's went with its blocks
  // In every memory.
  Publish(cache, text, 20);
  Crowd(cache, (kPoolPages - 1) * kPage);
  ASSERT_EQ(store().caches().Match(cache, Names(cache, text, 20))->hit_blocks, 20);
  ASSERT_GE(*store().caches().Purge(cache), 20u);
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 20))->hit_blocks, 0);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  // And not what was being fetched meanwhile.
  Publish(cache, text, 20);
  Crowd(cache, (kPoolPages - 1) * kPage);
  auto lease = Fetch(cache, text, 20);
  ASSERT_TRUE(store().caches().Purge(cache).ok());
  Land();
  EXPECT_EQ(lease->Commit()->match.hit_blocks, 20);  // asked before
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 20))->hit_blocks, 0);
  store().Drop(other);
}

TEST_F(PageStoreTiersTest, AGpuThatFailsMovesNothingMore) {
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText(40 * kPage);
  Publish(cache, text, 40);
  Crowd(cache, (kPoolPages - 20) * kPage);
  const int here = store().Create(cache, Names(cache, text, 40))->match.hit_blocks;
  ASSERT_EQ(store().caches().Match(cache, Names(cache, text, 40))->hit_blocks, 40);
  ASSERT_LT(here, 40);
  auto lease = Fetch(cache, text, 40);
  ASSERT_FALSE(lease->ready());
  device().mover.FinishOne(/*moved=*/false);
  ASSERT_TRUE(lease->ready());
  const auto made = lease->Commit();
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->match.hit_blocks, here);
  EXPECT_EQ(made->match.reason, MissReason::kChecksum);
  EXPECT_GT(test().store_metrics.lost_moves.Value(), 0);
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 40))->hit_blocks, here);
  EXPECT_EQ(store().Copy(made->sequence, CacheConfig::kHost).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(PageStoreTiersTest, AGpuThatFailsWhileACopyWaits) {
  const CacheId cache = test().Open(Config("fake"));
  const SequenceId moving = Written(cache, MakeText(kPage), kPage);
  auto first = *store().Copy(moving, CacheConfig::kHost);
  const SequenceId waiting = Create(cache);
  AppendEntry entry{waiting, 0, 2 * kPage};
  ASSERT_TRUE(store().Append(cache, {0, 1}, {&entry, 1}).ok());
  auto second = *store().Copy(waiting, CacheConfig::kHost);
  ASSERT_FALSE(first->ready() || second->ready());
  device().mover.FinishOne(/*moved=*/false);
  EXPECT_EQ(first->Commit().status().code(), absl::StatusCode::kDataLoss);
  device().executor.FinishAll();
  ASSERT_TRUE(second->ready());
  EXPECT_EQ(second->Commit().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(device().mover.moves(), 0u);
}

TEST_F(PageStoreTiersTest, TheHostTakesNothingThatIsNoPage) {
  // Engines write to their slabs: what leaves a GPU may be anything.
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText(2 * kPage);
  const SequenceId sequence = Written(cache, text, 2 * kPage);
  ASSERT_EQ(store().Publish(sequence, Names(cache, text, 2))->published, 2);
  const SequenceId other = store().Create(cache, Names(cache, text, 2))->sequence;
  std::vector<PagePlace> places;
  ASSERT_TRUE(store().tables().TakeChanges(other, 0, &places).ok());
  const uint16_t nan = 0x7e00;
  std::memcpy(device().pool->Data(places[1].raw), &nan, sizeof nan);
  auto lease = *store().Copy(sequence, CacheConfig::kHost);
  Land();
  EXPECT_EQ(lease->Commit().status().code(), absl::StatusCode::kDataLoss);
  lease = nullptr;
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 2))->hit_blocks, 1);
  EXPECT_EQ(test().store_metrics.lost_moves.Value(), 1);
}

TEST_F(PageStoreTiersTest, WhatChangedOnTheGpuIsNotTakenBack) {
  const CacheId cache = test().Open(Config("fake"));
  const Text text = MakeText(kPage);
  Publish(cache, text, 1);
  Crowd(cache, kEncodedPages * kPage);
  auto lease = Fetch(cache, text, 1);
  Land();
  const SequenceId sequence = lease->Commit()->sequence;
  lease = nullptr;
  std::vector<PagePlace> places;
  ASSERT_TRUE(store().tables().TakeChanges(sequence, 0, &places).ok());
  device().pool->Data(places[0].encoded)[0] ^= 1;
  CacheConfig config = Config("fake");
  config.device = CacheConfig::kHost;
  ASSERT_TRUE(store().caches().Purge(test().Open(config)).ok());  // the copy of the sequence's block stays on the GPU
  ASSERT_EQ(store().caches().Match(cache, Names(cache, text, 1))->hit_blocks, 1);
  lease = *store().Copy(sequence, CacheConfig::kHost);
  Land();
  EXPECT_EQ(lease->Commit().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 1))->hit_blocks, 0);
}

TEST_F(PageStoreTiersTest, ASequenceIsCopiedAsItIs) {
  for (const char* codec : {"fake", "raw", "declining"}) {
    SCOPED_TRACE(codec);
    const CacheId cache = test().Open(Config(codec, 1, 2));
    const Text text = MakeText(9 * kPage, 3);
    const SequenceId sequence = Written(cache, text, 4 * kPage + 5);
    ASSERT_EQ(store().Publish(sequence, Names(cache, text, 2))->published, 2);
    auto lease = *store().Copy(sequence, CacheConfig::kHost);
    ASSERT_FALSE(lease->ready());
    store().report().CheckInvariants();
    // It goes on, and the page that was open is filled.
    ASSERT_TRUE(Extend(cache, sequence, text, 4 * kPage + 5, 2 * kPage).ok());
    store().report().CheckInvariants();
    Land();
    const auto made = lease->Commit();
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(store().Describe(made->sequence)->tokens, 4u * kPage + 5);
    EXPECT_EQ(store().Describe(made->sequence)->published_blocks, 2);
    const CacheId there = store().Describe(made->sequence)->cache;
    EXPECT_NE(there, cache);
    EXPECT_EQ(store().caches().Describe(there)->digest, store().caches().Describe(cache)->digest);
    ExpectOnHost(made->sequence, text);
    // It is a sequence like any other there, and goes back as one.
    const CacheId host = store().Describe(made->sequence)->cache;
    ASSERT_TRUE(test().AppendAll(host, made->sequence, text, 4 * kPage + 5, kPage).ok());
    test().executor.FinishAll();
    ExpectOnHost(made->sequence, text);
    lease = *store().Copy(made->sequence, TestDevice::kOrdinal);
    EXPECT_FALSE(store().Copy(made->sequence, CacheConfig::kHost).ok());
    store().Drop(made->sequence);
    Land();
    const auto back = lease->Commit();
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(store().Describe(back->sequence)->tokens, 5u * kPage + 5);
    ASSERT_TRUE(Extend(cache, back->sequence, text, 5 * kPage + 5, kPage).ok());
    lease = *store().Copy(back->sequence, CacheConfig::kHost);
    Land();
    ExpectOnHost(lease->Commit()->sequence, text);
    store().report().CheckInvariants();
  }
}

TEST_F(PageStoreTiersTest, ACopyWaitsForEncodingAndOutlivesItsSource) {
  const CacheId cache = test().Open(Config("fake", 0, 1));
  const SequenceId sequence = Create(cache);
  AppendEntry entry{sequence, 0, 2 * kPage + 1};
  ASSERT_TRUE(store().Append(cache, {0, 1}, {&entry, 1}).ok());
  const Text text = MakeText(2 * kPage + 1);
  std::vector<PagePlace> places;
  ASSERT_TRUE(store().tables().TakeChanges(sequence, 0, &places).ok());
  for (const PagePlace& place : places) {
    const auto page =
        MakeRawPage(store().caches().codec(cache)->layout(), text, place.page, place.page < 2 ? kPage : 1, 0);
    std::memcpy(device().pool->Data(place.raw), page.data(), page.size());
  }
  auto lease = *store().Copy(sequence, CacheConfig::kHost);
  EXPECT_EQ(device().mover.moves(), 0u);
  store().Drop(sequence);
  store().report().CheckInvariants();
  device().executor.FinishAll();
  EXPECT_EQ(device().mover.moves(), 1u);
  store().report().CheckInvariants();
  Land();
  const auto made = lease->Commit();
  ASSERT_TRUE(made.ok()) << made.status();
  ExpectOnHost(made->sequence, text);
}

TEST_F(PageStoreTiersTest, SaysWhyItCannotCopy) {
  const CacheId cache = test().Open(Config("fake", 0, 2));
  const SequenceId sequence = Create(cache);
  AppendEntry entry{sequence, 0, 3};
  ASSERT_TRUE(store().Append(cache, {0, 1}, {&entry, 1}).ok());
  EXPECT_EQ(store().Copy(sequence, CacheConfig::kHost).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(store().Append(cache, {1, 1}, {&entry, 1}).ok());
  const absl::Status same = store().Copy(sequence, TestDevice::kOrdinal).status();
  EXPECT_EQ(same.code(), absl::StatusCode::kFailedPrecondition) << same;
  EXPECT_EQ(DetailOf(same).field, "device");
  EXPECT_EQ(store().Copy(sequence + 1, CacheConfig::kHost).status().code(), absl::StatusCode::kNotFound);
  // In host memory a fetch finds what is there, and is ready at once.
  const auto here = store().Fetch(test().Open(Config("fake", 0, 2, CacheConfig::kHost)), {});
  ASSERT_TRUE(here.ok() && (*here)->ready());
  EXPECT_TRUE((*here)->Commit().ok());
  device().mover.is_ready = false;
  EXPECT_EQ(store().Copy(sequence, CacheConfig::kHost).status().code(), absl::StatusCode::kUnavailable);
  // Until the host's memory is pinned nothing moves, and fetches are plain.
  const auto lease = store().Fetch(cache, {});
  ASSERT_TRUE(lease.ok() && (*lease)->ready());
  EXPECT_EQ((*lease)->Commit()->match.hit_blocks, 0);
}

TEST_F(PageStoreTiersTest, AFullHostLosesTheOldest) {
  pool_bytes_ = 2 << 20;
  device_bytes_ = 6 << 20;
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText(kPoolPages * kPage);
  Publish(cache, text, kPoolPages);
  Crowd(cache, 3 * kPoolPages / 2 * kPage);
  // Twice what the host has room for was demoted; what went last is there.
  EXPECT_GE(Demoted(), static_cast<uint64_t>(kPoolPages / 2));
  EXPECT_GT(store().caches().Match(cache, Names(cache, text, kPoolPages))->hit_blocks, 0);
  EXPECT_LE(test().pool->used_bytes(), 2u << 20);
}

TEST_F(PageStoreTiersTest, WhatTheHostHasGoesAtOnceWhileOthersMove) {
  pool_bytes_ = 64 << 20;
  device_bytes_ = 32 << 20;
  const CacheId cache = test().Open(Config("raw"));
  constexpr int kAll = (32 << 20) / (8 << 10);
  const Text text = MakeText(kAll * kPage);
  Publish(cache, text, kAll - 8);
  const SequenceId other = Create(cache);
  const Text more = MakeText(64 * kPage, 5);
  int page = 0;
  for (; page < 4; ++page) ASSERT_TRUE(Extend(cache, other, more, page * kPage, kPage).ok());
  for (int i = 0; i < 64; ++i) {
    device().mover.FinishOne();
    test().executor.FinishAll();
  }
  ASSERT_GT(device().mover.moves(), 0u);
  for (; page < 40; ++page) {
    const absl::Status status = Extend(cache, other, more, page * kPage, kPage);
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST_F(PageStoreTiersTest, AFetchWaitsForRoom) {
  const CacheId cache = test().Open(Config("raw"));
  const Text text = MakeText(40 * kPage);
  Publish(cache, text, 40);
  Crowd(cache, kPoolPages * kPage);
  const SequenceId other = Written(cache, MakeText(kPoolPages * kPage, 7), kPoolPages * kPage);
  auto lease = Fetch(cache, text, 40);
  ASSERT_TRUE(lease->ready() && lease->awaits_room());
  EXPECT_EQ(lease->device(), TestDevice::kOrdinal);
  lease->TryAgain();
  ASSERT_TRUE(lease->ready() && lease->awaits_room());
  // One that is given up says what is full, and who holds that.
  const absl::Status status = Fetch(cache, text, 40)->Commit().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_NE(status.message().find("in cache 1 "), std::string::npos) << status;
  EXPECT_EQ(status.message().find("of cache 2 "), std::string::npos) << status;  // the host's
  store().Drop(other);
  bool called = false;
  lease->TryAgain();
  lease->OnReady([&called] { called = true; });
  EXPECT_FALSE(lease->ready() || called);
  Land();
  ASSERT_TRUE(called);
  EXPECT_EQ(lease->Commit()->match.hit_blocks, 40);
}

TEST_F(PageStoreTiersTest, LeasesAndMovesMayEndAfterTheStore) {
  const CacheId cache = test().Open(Config("fake", 0, 1));
  const SequenceId sequence = Written(cache, MakeText(3 * kPage), 2 * kPage + 1);
  auto lease = *store().Copy(sequence, CacheConfig::kHost);
  test().store = nullptr;
  device().mover.FinishAll();
  EXPECT_FALSE(lease->ready());
  EXPECT_FALSE(lease->Commit().ok());
  lease = nullptr;
  test_ = nullptr;
}

}  // namespace
}  // namespace kvmanager
