// Load: pages as their sequence keeps them, pinned while they are read.
#include <gtest/gtest.h>

#include <algorithm>

#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::RawPrefixEquals;
using testing::Text;

class LoadTest : public PageStoreTest {
 protected:
  absl::StatusOr<std::unique_ptr<AttendLease>> TryLoad(CacheId cache, SequenceId sequence, uint64_t position,
                                                       int tokens, int layer = 0) {
    const AttendEntry entry{sequence, position, tokens};
    return store().Load(cache, layer, {&entry, 1});
  }
  std::unique_ptr<AttendLease> Load(CacheId cache, SequenceId sequence, uint64_t position, int tokens, int layer = 0) {
    auto lease = TryLoad(cache, sequence, position, tokens, layer);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  // Page `index` of `text` in the one form that is said.
  void ExpectPage(CacheId cache, const AttentionPage& page, const Text& text, uint32_t index, bool encoded, int layer) {
    const auto codec = store().caches().codec(cache);
    const int tokens = static_cast<int>(std::min<size_t>(kPage, text.ids.size() - size_t{index} * kPage));
    const auto raw = MakeRawPage(codec->layout(), text, index, tokens, layer);
    if (encoded) {
      const auto expected = MakeEncodedPage(*codec, raw, index, layer);
      EXPECT_EQ(page.raw, nullptr);
      ASSERT_NE(page.encoded, nullptr);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), page.encoded));
    } else {
      ASSERT_NE(page.raw, nullptr);
      EXPECT_TRUE(RawPrefixEquals(codec->layout(), page.raw, raw, tokens));
    }
  }
};

TEST_F(LoadTest, PagesComeInTheFormThatTheSequenceKeeps) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(5 * kPage + 3);
  const SequenceId sequence = Filled(cache, text, 4 * kPage);
  // One append ages nothing, and nothing is waited for: pages beyond the lag are raw, too.
  auto all = Load(cache, sequence, 0, 4 * kPage);
  ASSERT_TRUE(all->ready());
  for (uint32_t i = 0; i < 4; ++i) ExpectPage(cache, all->pages(0)[i], text, i, false, 0);
  EXPECT_EQ(all->selector(0), nullptr);
  ASSERT_TRUE(test().AppendAll(cache, sequence, text, 4 * kPage, kPage + 3).ok());
  // Pages 0 to 2 have aged, and are still to be encoded.
  auto aged = Load(cache, sequence, kPage + 2, 4 * kPage, 1);
  EXPECT_FALSE(aged->ready());
  auto newest = Load(cache, sequence, 3 * kPage, 1, 1);
  EXPECT_TRUE(newest->ready());
  bool called = false;
  aged->OnReady([&called] { called = true; });
  test().executor.FinishAll();
  EXPECT_TRUE(called && aged->ready());
  ASSERT_TRUE(aged->status().ok());
  ASSERT_EQ(aged->pages(0).size(), 5u);  // those of tokens kPage + 2 .. 5 kPage + 1
  for (uint32_t i = 0; i < 5; ++i) ExpectPage(cache, aged->pages(0)[i], text, i + 1, i + 1 < 3, 1);
  // A lease that was there before they aged still has the raw forms; they go with it.
  for (uint32_t i = 0; i < 4; ++i) ExpectPage(cache, all->pages(0)[i], text, i, false, 0);
  store().report().CheckInvariants();
  const uint64_t used = test().pool->used_bytes();
  all = nullptr;
  EXPECT_LT(test().pool->used_bytes(), used);
}

TEST_F(LoadTest, DeclinedAndIdentityPagesAreRaw) {
  const Text text = MakeText(8 * kPage + 1);
  for (const char* codec : {"declining", "sinks", "raw"}) {
    SCOPED_TRACE(codec);
    const CacheId cache = test().Open(MakeConfig(codec, 0));
    const SequenceId sequence = Create(cache);
    for (int at = 0; at < 8 * kPage; at += kPage) {
      ASSERT_TRUE(test().AppendAll(cache, sequence, text, at, kPage).ok());
    }
    ASSERT_TRUE(test().AppendAll(cache, sequence, text, 8 * kPage, 1).ok());
    auto lease = Load(cache, sequence, 0, 8 * kPage + 1);
    test().executor.FinishAll();
    ASSERT_TRUE(lease->ready());
    const auto made = store().caches().codec(cache);
    for (uint32_t i = 0; i < 9; ++i) {
      const AttentionPage& page = lease->pages(0)[i];
      if (made->info().identity) {
        const auto raw = MakeRawPage(made->layout(), text, i, i == 8 ? 1 : kPage, 0);
        const uint8_t* bytes = page.raw != nullptr ? page.raw : page.encoded;
        ASSERT_NE(bytes, nullptr);
        EXPECT_TRUE(RawPrefixEquals(made->layout(), bytes, raw, i == 8 ? 1 : kPage));
        continue;
      }
      const auto raw = MakeRawPage(made->layout(), text, i, i == 8 ? 1 : kPage, 0);
      const bool encoded = i < 8 && !MakeEncodedPage(*made, raw, i, 0).empty();
      ExpectPage(cache, page, text, i, encoded, 0);
    }
  }
}

TEST_F(LoadTest, PagesStayWhileTheyAreRead) {
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(6 * kPage);
  const SequenceId sequence = Filled(cache, text, 6 * kPage);
  test().executor.FinishAll();
  ASSERT_TRUE(store().Publish(sequence, Names(cache, text, 6)).ok());
  store().Drop(sequence);
  const SequenceId hit = store().Create(cache, Names(cache, text, 6))->sequence;
  auto lease = Load(cache, hit, kPage, 2 * kPage);
  store().Drop(hit);
  // Others take all the room there is: the block of page 0 goes, those of the lease do not.
  const SequenceId greedy = Create(cache);
  const Text other = MakeText(1 << 16, 5);
  int appended = 0;
  while (appended + kPage <= (1 << 16) && test().AppendAll(cache, greedy, other, appended, kPage).ok()) {
    test().executor.FinishAll();
    appended += kPage;
  }
  ASSERT_LT(appended + kPage, 1 << 16) << "the pool was never full";
  store().report().CheckInvariants();
  ASSERT_TRUE(lease->ready());
  for (uint32_t i = 0; i < 2; ++i) ExpectPage(cache, lease->pages(0)[i], text, i + 1, true, 0);
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 6))->hit_blocks, 0);
  lease = nullptr;
  store().Drop(greedy);
}

TEST_F(LoadTest, BoundsAreNamed) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const SequenceId sequence = Filled(cache, MakeText(40), 20);
  using Code = absl::StatusCode;
  EXPECT_EQ(TryLoad(cache, sequence, 20, 1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(TryLoad(cache, sequence, 5, 16).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(TryLoad(cache, sequence, 5, 0).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(TryLoad(cache, sequence, 0, 1, 2).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(TryLoad(cache, sequence + 1, 0, 1).status().code(), Code::kNotFound);
  EXPECT_EQ(TryLoad(cache + 1, sequence, 0, 1).status().code(), Code::kNotFound);
  EXPECT_TRUE(Load(cache, sequence, 5, 15)->ready());
}

}  // namespace
}  // namespace kvmanager
