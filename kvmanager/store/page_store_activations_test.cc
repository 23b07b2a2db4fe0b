// Pages of activations: when they are kept, how they are counted and given back, and hand-offs of which pages are
// recomputed from them.
#include <gtest/gtest.h>

#include <cstring>

#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::Deliver;
using testing::KeysValues;
using testing::kPage;
using testing::MakeActivations;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeKeysValues;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::Receive;
using testing::Recompute;
using testing::SentPage;
using testing::TakeAll;
using testing::TestStore;
using testing::Text;

constexpr int kHidden = 128;
constexpr auto kBad = absl::StatusCode::kInvalidArgument;

CacheConfig WithActivations(const std::string& codec, int lag_pages, int layers = 2) {
  CacheConfig config = MakeConfig(codec, lag_pages, "a", layers);
  config.hidden = kHidden;
  return config;
}

// All that may be, and none.
uint32_t All(uint32_t, uint32_t, uint32_t with_activations) { return with_activations; }

class ActivationsTest : public PageStoreTest {
 protected:
  std::unique_ptr<ExportLease> Export(SequenceId sequence) {
    auto lease = store().exports().Whole(sequence);
    EXPECT_TRUE(lease.ok()) << lease.status();
    test().executor.FinishAll();
    return *std::move(lease);
  }
  // (block, layer) of the activations that a hand-off offers.
  std::vector<std::pair<uint32_t, uint32_t>> Offered(SequenceId sequence) {
    std::vector<std::pair<uint32_t, uint32_t>> offered;
    const auto lease = Export(sequence);
    for (const HandOffPage& page : lease->header().activations) offered.emplace_back(page.block, page.layer);
    return offered;
  }
  uint64_t ActivationBytes(CacheId cache) { return store().caches().Describe(cache)->activation_bytes; }

  TestStore peer_{16 << 20};
};

TEST_F(ActivationsTest, AreKeptOfPagesAllOfWhoseTokensHadThem) {
  const CacheId cache = test().Open(WithActivations("fake", 0));
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Create(cache);
  const uint64_t page_bytes = kPage * kHidden * 2;
  // Layer 0: page 0 in two appends, page 1 whole, page 2 without its last tokens, page 3 from its second token on,
  // page 4 whole, behind the gap; page 5 is open. Layer 1: none.
  ASSERT_TRUE(test().Append(cache, a, text, 0, 5, 0).ok());
  EXPECT_EQ(ActivationBytes(cache), page_bytes);
  EXPECT_EQ(Gauge("kvmanager_page_bytes{codec=\"activation\",form=\"raw\",state=\"filling\",tier=\"host\"}"),
            double(page_bytes));
  ASSERT_TRUE(test().Append(cache, a, text, 5, 2 * kPage + 4, 0).ok());
  EXPECT_EQ(ActivationBytes(cache), 3 * page_bytes);
  ASSERT_TRUE(test().Append(cache, a, text, 2 * kPage + 9, 1, 0, /*activations=*/false).ok());
  EXPECT_EQ(ActivationBytes(cache), 2 * page_bytes);
  ASSERT_TRUE(test().Append(cache, a, text, 2 * kPage + 10, 6, 0).ok());
  ASSERT_TRUE(test().Append(cache, a, text, 3 * kPage, 1, 0, false).ok());
  ASSERT_TRUE(test().Append(cache, a, text, 3 * kPage + 1, 2 * kPage + 2, 0).ok());
  EXPECT_EQ(ActivationBytes(cache), 4 * page_bytes);
  EXPECT_EQ(Gauge("kvmanager_page_bytes{codec=\"activation\",form=\"encoded\",state=\"resident\",tier=\"host\"}"),
            double(3 * page_bytes));
  ASSERT_TRUE(test().Append(cache, a, text, 0, 5 * kPage + 3, 1, false).ok());
  EXPECT_EQ(Offered(a), (std::vector<std::pair<uint32_t, uint32_t>>{{0, 0}, {1, 0}, {4, 0}}));
  store().Drop(a);
  EXPECT_EQ(ActivationBytes(cache), 0u);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
}

TEST_F(ActivationsTest, GoWithTheirBlocks) {
  const CacheId cache = test().Open(WithActivations("raw", 1));
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage + 3);
  ASSERT_TRUE(store().Publish(a, Names(cache, text, 4)).ok());
  // A fork shares those of sealed pages; that of an open one is not copied.
  const uint64_t before = ActivationBytes(cache);
  const auto fork = store().Fork(a);
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(ActivationBytes(cache), before);
  ASSERT_TRUE(test().AppendAll(cache, *fork, text, 4 * kPage + 3, 2 * kPage).ok());
  EXPECT_EQ(Offered(*fork).size(), 4u * 2u);  // not block 4, whose first tokens the fork has without
  // A crop inside a page keeps it, as it keeps K and V.
  ASSERT_TRUE(store().Crop(a, 4 * kPage + 1).ok());
  ASSERT_TRUE(test().AppendAll(cache, a, text, 4 * kPage + 1, 2 * kPage).ok());
  EXPECT_EQ(Offered(a).size(), 5u * 2u);
  store().Drop(a);
  store().Drop(*fork);
  // A prefix hit has them, too.
  const auto hit = store().Create(cache, Names(cache, text, 4));
  ASSERT_EQ(hit->match.hit_blocks, 4);
  EXPECT_EQ(Offered(hit->sequence).size(), 4u * 2u);
  store().Drop(hit->sequence);
  EXPECT_EQ(Gauge("kvmanager_evictable_bytes"), Gauge("kvmanager_pool_used_bytes"));
  EXPECT_EQ(store().caches().PurgeAll(), 4u);
  EXPECT_EQ(test().pool->used_bytes(), 0u);
}

TEST_F(ActivationsTest, WrongOnesChangeNothing) {
  const CacheId cache = test().Open(WithActivations("fake", 1));
  const CacheId without = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(2 * kPage);
  const PageLayout layout = store().caches().codec(cache)->layout();
  const KeysValues kv = MakeKeysValues(layout, text, 0, kPage + 2, 0);
  std::vector<uint8_t> x = MakeActivations(kHidden, text, 0, kPage + 2, 0);
  AppendEntry entry{Create(without), 0, kPage + 2, kv.k.data(), kv.v.data(), x.data()};
  const absl::Status refused = store().Append(without, 0, {&entry, 1});
  EXPECT_EQ(refused.code(), kBad);
  EXPECT_NE(refused.message().find("entries[0].x"), absl::string_view::npos) << refused;
  entry.sequence = Create(cache);
  const uint16_t infinity = 0xfc00;
  std::memcpy(x.data() + 2 * (size_t(kPage + 1) * kHidden + 3), &infinity, 2);
  const absl::Status infinite = store().Append(cache, 0, {&entry, 1});
  EXPECT_EQ(infinite.code(), kBad);
  EXPECT_NE(infinite.message().find("x[token 17][value 3]"), absl::string_view::npos) << infinite;
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  CacheConfig config = WithActivations("fake", 1);
  for (const int hidden : {-1, CacheConfig::kHiddenMax + 1}) {
    config.hidden = hidden;
    EXPECT_EQ(store().caches().Open(config).status().code(), kBad);
  }
  config.hidden = CacheConfig::kHiddenMax;  // more than a slab
  EXPECT_EQ(store().caches().Open(config).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ActivationsTest, APoolThatIsFullOfThemSaysSo) {
  pool_bytes_ = 4 << 20;
  CacheConfig config = WithActivations("raw", 1, 1);
  config.hidden = 4096;
  const CacheId cache = test().Open(config);
  const Text text = MakeText(40 * kPage);
  const SequenceId a = Create(cache);
  const absl::Status full = test().Append(cache, a, text, 0, 40 * kPage, 0);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("40 slots of 131072"), absl::string_view::npos) << full;
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  EXPECT_TRUE(test().Append(cache, a, text, 0, 40 * kPage, 0, /*activations=*/false).ok());
}

// What is recomputed reads as what was copied, whatever the codec: what it declines stays raw here, too.
TEST_F(ActivationsTest, AReceiverRecomputesWhatItChooses) {
  for (const char* const codec : {"raw", "fake", "declining"}) {
    for (const uint32_t most : {0u, 1u, 3u, 100u}) {
      SCOPED_TRACE(::testing::Message() << codec << ", at most " << most);
      const CacheConfig config = WithActivations(codec, 1);
      const CacheId cache = test().Open(config);
      const Text text = MakeText(8 * kPage);
      const SequenceId a = Filled(cache, text, 6 * kPage + 3);
      ASSERT_TRUE(store().Publish(a, Names(cache, text, 6)).ok());
      auto lease = Export(a);
      const HandOffHeader& first = lease->header();
      // Aged pages alone: those inside the lag travel raw.
      EXPECT_EQ(first.activations.size(), first.pages.size());
      const std::vector<SentPage> pages = TakeAll(*lease);
      std::vector<std::pair<uint32_t, uint32_t>> asked;
      auto import = peer_.store->imports().Import(first, nullptr, [&](uint32_t layer, uint32_t total, uint32_t with) {
        EXPECT_EQ(layer, asked.size());
        asked.emplace_back(total, with);
        return most;
      });
      ASSERT_TRUE(import.ok()) << import.status();
      EXPECT_EQ(asked, (std::vector<std::pair<uint32_t, uint32_t>>(
                           2, {uint32_t(first.pages.size() / 2), uint32_t(first.pages.size() / 2)})));
      // Of each page one form is wanted, and the first pages are recomputed.
      for (size_t i = 0; i < first.pages.size(); ++i) {
        const bool recomputed = first.pages[i].block < most;
        EXPECT_EQ((*import)->target(i).empty(), recomputed);
        EXPECT_EQ((*import)->target(first.pages.size() + i).empty(), !recomputed);
      }
      const auto b = Receive(**import, *lease->trailer(), pages, &config, &text);
      ASSERT_TRUE(b.ok()) << b.status();
      import->reset();
      peer_.store->report().CheckInvariants();
      const CacheId there = peer_.store->Describe(*b)->cache;
      const uint64_t kept = std::min<uint64_t>(most, first.pages.size() / 2) * 2;
      EXPECT_EQ(peer_.store->caches().Describe(there)->activation_bytes, kept * kPage * kHidden * 2);
      peer_.executor.FinishAll();
      const AttendEntry entry{*b, 6 * kPage + 2, 1};
      for (int layer = 0; layer < 2; ++layer) {
        const auto view = *peer_.store->Attend(there, layer, {&entry, 1});
        ASSERT_TRUE(view->ready() && view->status().ok());
        for (uint32_t block = 0; block < 5; ++block) {
          const std::vector<uint8_t> raw = MakeRawPage(config.layout, text, block, kPage, layer);
          const std::vector<uint8_t> encoded = MakeEncodedPage(*store().caches().codec(cache), raw, block, layer);
          const AttentionPage& page = view->pages(0)[block];
          const std::vector<uint8_t>& expected = encoded.empty() ? raw : encoded;
          const uint8_t* const bytes = encoded.empty() ? page.raw : page.encoded;
          ASSERT_NE(bytes, nullptr);
          EXPECT_EQ(std::memcmp(bytes, expected.data(), expected.size()), 0) << "block " << block;
        }
      }
      EXPECT_EQ(peer_.store->caches().Match(there, Names(cache, text, 6))->hit_blocks, 6);
      // What is here needs neither form a second time.
      auto second = peer_.store->imports().Import(first, nullptr, All);
      ASSERT_TRUE(second.ok());
      for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE((*second)->target(i).empty() || first.page(i).block == 5);
      second->reset();
      lease.reset();
      store().Drop(a);
      peer_.store->Drop(*b);
      store().caches().PurgeAll();
      peer_.store->caches().PurgeAll();
      EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    }
  }
}

// The sequence is there once it has its tokens; who reads a page that is recomputed waits for it.
TEST_F(ActivationsTest, ReadersWaitForWhatIsRecomputed) {
  const CacheConfig config = WithActivations("fake", 0);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage + 3);
  const auto lease = Export(a);
  const std::vector<SentPage> pages = TakeAll(*lease);
  auto import = peer_.store->imports().Import(lease->header(), nullptr, All);
  ASSERT_TRUE(import.ok());
  ASSERT_TRUE((*import)->Extend(*lease->trailer()).ok());
  for (const SentPage& page : pages) {
    if (page.activations) continue;
    ASSERT_TRUE(Deliver(**import, page.bytes).ok());
  }
  ASSERT_TRUE((*import)->can_show());
  const auto b = (*import)->Show();
  ASSERT_TRUE(b.ok()) << b.status();
  peer_.store->report().CheckInvariants();
  const CacheId there = peer_.store->Describe(*b)->cache;
  const AttendEntry entry{*b, 4 * kPage + 2, 1};
  auto view = *peer_.store->Attend(there, 0, {&entry, 1});
  for (const SentPage& page : pages) {
    if (!page.activations) continue;
    ASSERT_TRUE(Deliver(**import, page.bytes).ok());
  }
  peer_.store->report().CheckInvariants();
  EXPECT_FALSE((*import)->complete());
  EXPECT_EQ((*import)->Commit().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(view->ready());
  const ArrivedPage unknown{0, 0};
  EXPECT_EQ((*import)->Recomputed({&unknown, 1}).code(), kBad);
  ASSERT_TRUE(Recompute(**import, config, text).ok());
  EXPECT_TRUE((*import)->TakeRecomputable().empty());
  EXPECT_TRUE((*import)->complete());
  peer_.store->report().CheckInvariants();
  EXPECT_FALSE(view->ready());  // its codec has yet to encode them
  peer_.executor.FinishAll();
  EXPECT_TRUE(view->ready() && view->status().ok());
  EXPECT_TRUE((*import)->Commit().ok());
}

// At any moment: slots stay while somebody may write them, and go with the lease.
TEST_F(ActivationsTest, BreakingOffLeavesNothing) {
  const CacheConfig config = WithActivations("fake", 1);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Filled(cache, text, 5 * kPage + 3);
  const auto lease = Export(a);
  const std::vector<SentPage> pages = TakeAll(*lease);
  for (size_t delivered = 0; delivered <= pages.size(); ++delivered) {
    for (const bool shown : {false, true}) {
      auto import = peer_.store->imports().Import(lease->header(), nullptr, All);
      ASSERT_TRUE(import.ok()) << import.status();
      ASSERT_TRUE((*import)->Extend(*lease->trailer()).ok());
      for (size_t i = 0; i < delivered; ++i) {
        ASSERT_TRUE(Deliver(**import, pages[pages.size() - 1 - i].bytes).ok());
      }
      SequenceId b = 0;
      if (shown && (*import)->can_show()) b = *(*import)->Show();
      const std::vector<RecomputePage> under_way = (*import)->TakeRecomputable();
      (*import)->Break(absl::UnavailableError("the link was cut"));
      for (const RecomputePage& page : under_way) {
        std::memset(page.raw, 0, config.layout.raw_bytes());  // still the lease's
        const ArrivedPage done{page.page, 0};
        EXPECT_EQ((*import)->Recomputed({&done, 1}).code(), absl::StatusCode::kFailedPrecondition);
      }
      peer_.store->report().CheckInvariants();
      if (b != 0) peer_.store->Drop(b);
      import->reset();
      peer_.executor.FinishAll();
      peer_.store->report().CheckInvariants();
      EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    }
  }
}

TEST_F(ActivationsTest, HostileOffersAndBytesAreRefused) {
  const CacheId cache = test().Open(WithActivations("fake", 0));
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Filled(cache, text, 3 * kPage + 1);
  const auto lease = Export(a);
  ASSERT_EQ(lease->header().activations.size(), 6u);
  const auto refused = [&](auto change) {
    HandOffHeader first = lease->header();
    change(first);
    const auto import = peer_.store->imports().Import(first, nullptr, All);
    EXPECT_EQ(import.status().code(), kBad) << import.status();
    EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    EXPECT_TRUE(peer_.store->caches().List().empty());
  };
  refused([](HandOffHeader& f) { std::swap(f.activations[0], f.activations[1]); });
  refused([](HandOffHeader& f) { f.activations.push_back(f.activations.back()); });
  refused([](HandOffHeader& f) { f.activations[5].block = 3; });
  refused([](HandOffHeader& f) { f.activations[2].layer = 2; });
  refused([](HandOffHeader& f) { f.activations[0].bytes += 1; });
  refused([](HandOffHeader& f) { f.activations[0].bytes = UINT64_MAX; });
  refused([](HandOffHeader& f) { f.config.hidden = 0; });
  refused([](HandOffHeader& f) { f.config.hidden = 64; });
  refused([](HandOffHeader& f) { f.config.hidden = -1; });
  // Activations of some pages only are fine, and a choice beyond them is cut.
  HandOffHeader some = lease->header();
  some.activations.erase(some.activations.begin() + 1);
  auto import = peer_.store->imports().Import(some, nullptr, [](uint32_t, uint32_t, uint32_t) { return 1000u; });
  ASSERT_TRUE(import.ok()) << import.status();
  EXPECT_FALSE((*import)->target(1).empty());
  EXPECT_TRUE((*import)->target(0).empty());
  // Bytes that are none an activation may be.
  const std::vector<SentPage> pages = TakeAll(*lease);
  const absl::Span<uint8_t> target = (*import)->target(6);
  std::memcpy(target.data(), pages[6].bytes.bytes.data(), target.size());
  EXPECT_EQ(*(*import)->Validate(6), pages[6].bytes.checksum);
  const uint16_t not_a_number = 0x7e00;
  std::memcpy(target.data() + 2 * (5 * kHidden + 7), &not_a_number, 2);
  const absl::Status nan = (*import)->Validate(6).status();
  EXPECT_EQ(nan.code(), kBad);
  EXPECT_NE(nan.message().find("activations[0][token 5][value 7]"), absl::string_view::npos) << nan;
}

// A hand-off that begins before its pages are made has none to offer but those that are there.
TEST_F(ActivationsTest, AGrowingSequenceOffersWhatItHas) {
  const CacheConfig config = WithActivations("declining", 0);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Filled(cache, text, 3 * kPage);
  auto lease = *store().exports().Growing(a, 6 * kPage);
  EXPECT_EQ(lease->header().pages.size(), 6u * 2u - 2);  // the newest is inside the lag
  EXPECT_EQ(lease->header().activations.size(), 3u * 2u);
  auto import = peer_.store->imports().Import(lease->header(), nullptr, All);
  ASSERT_TRUE(import.ok());
  ASSERT_TRUE(test().AppendAll(cache, a, text, 3 * kPage, 3 * kPage).ok());
  test().executor.FinishAll();
  ASSERT_TRUE(lease->Finish().ok());
  // What the sender's codec declined meanwhile is withdrawn, recomputed or not.
  ASSERT_FALSE(lease->trailer()->withdrawn.empty());
  const auto b = Receive(**import, *lease->trailer(), TakeAll(*lease), &config, &text);
  ASSERT_TRUE(b.ok()) << b.status();
  peer_.store->report().CheckInvariants();
}

}  // namespace
}  // namespace kvmanager
