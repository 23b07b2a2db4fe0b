// Hand-offs between two stores: forms, sharing, and parts and bytes that lie. Those of a sequence that still grows are
// page_store_stream_test.cc's.
#include <gtest/gtest.h>

#include <cstring>

#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::RawPrefixEquals;
using testing::Receive;
using testing::SentPage;
using testing::TakeAll;
using testing::TestStore;
using testing::Text;

// A second store beside the first.
class HandOffTest : public PageStoreTest {
 protected:
  // Ages, encodes and exports; it is as of then.
  std::unique_ptr<ExportLease> Export(SequenceId sequence) {
    auto lease = store().exports().Whole(sequence);
    EXPECT_TRUE(lease.ok()) << lease.status();
    test().executor.FinishAll();
    EXPECT_NE((*lease)->trailer(), nullptr);
    return *std::move(lease);
  }
  static uint64_t WantedBytes(const ImportLease& to, const std::vector<SentPage>& pages) {
    uint64_t bytes = 0;
    for (const SentPage& page : pages) bytes += to.target(page.bytes.page).size();
    return bytes;
  }
  TestStore peer_{16 << 20};
};

TEST_F(HandOffTest, SendsEncodedPagesAndARawLag) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage + 7);
  ASSERT_TRUE(store().Publish(a, Names(cache, text, 3)).ok());
  const auto lease = Export(a);
  const HandOffHeader& first = lease->header();
  const std::vector<SentPage> pages = TakeAll(*lease);
  ASSERT_EQ(pages.size(), 10u);
  for (const SentPage& page : pages) EXPECT_EQ(page.encoded, page.page.block < 3);
  EXPECT_EQ(first.aged, (std::vector<uint32_t>{3, 3}));
  EXPECT_TRUE(first.blocks[2].named && !first.blocks[3].named);
  for (const HandOffBlock& block : lease->trailer()->blocks) EXPECT_FALSE(block.named);

  auto import = peer_.store->imports().Import(first);
  ASSERT_TRUE(import.ok()) << import.status();
  EXPECT_EQ(peer_.store->caches().Match(1, Names(cache, text, 3))->hit_blocks, 0);
  EXPECT_TRUE(peer_.store->report().SequenceIds().empty());
  const auto b = Receive(**import, *lease->trailer(), pages);
  ASSERT_TRUE(b.ok()) << b.status();
  const uint64_t all = WantedBytes(**import, pages);
  import->reset();
  peer_.store->report().CheckInvariants();
  const CacheId peer_cache = peer_.store->Describe(*b)->cache;
  EXPECT_EQ(peer_.store->caches().Match(peer_cache, Names(cache, text, 3))->hit_blocks, 3);
  EXPECT_EQ(peer_.executor.jobs(), 2u);  // the raw full pages
  // It goes on as if it had been appended there.
  ASSERT_TRUE(peer_.AppendAll(peer_cache, *b, text, 4 * kPage + 7, 1).ok());
  const AttendEntry entry{*b, 4 * kPage + 7, 1};
  const auto view = *peer_.store->Attend(peer_cache, 1, {&entry, 1});
  ASSERT_TRUE(view->ready());
  ASSERT_TRUE(view->status().ok());
  EXPECT_TRUE(RawPrefixEquals(config.layout, view->pages(0)[4].raw, MakeRawPage(config.layout, text, 4, 8, 1), 8));
  EXPECT_NE(view->pages(0)[3].raw, nullptr);
  EXPECT_EQ(view->pages(0)[2].raw, nullptr);

  // A second time, what is there is not sent again.
  auto second = peer_.store->imports().Import(first);
  ASSERT_TRUE(second.ok());
  EXPECT_TRUE((*second)->target(0).empty());
  EXPECT_TRUE(Receive(**second, *lease->trailer(), pages).ok());
  EXPECT_EQ(WantedBytes(**second, pages), all - 6 * store().caches().codec(cache)->info().encoded_bytes);
  EXPECT_EQ((*second)->Commit().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*second)->Show().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*second)->Extend(*lease->trailer()).code(), absl::StatusCode::kFailedPrecondition);
  peer_.store->report().CheckInvariants();
}

// Sender and receiver may crop to the same places, also when the sequence ends at a page's boundary.
TEST_F(HandOffTest, TheReceiverCropsAsTheSender) {
  for (const char* codec : {"fake", "declining"}) {
    for (const int tokens : {5 * kPage - 1, 5 * kPage, 5 * kPage + 1}) {
      for (int to = tokens; to >= 0; --to) {
        const CacheId cache = test().Open(MakeConfig(codec, 2));
        const Text text = MakeText(6 * kPage);
        const SequenceId a = Filled(cache, text, tokens);
        auto lease = Export(a);
        auto import = peer_.store->imports().Import(lease->header());
        ASSERT_TRUE(import.ok()) << import.status();
        const auto b = Receive(**import, *lease->trailer(), TakeAll(*lease));
        ASSERT_TRUE(b.ok()) << b.status();
        peer_.executor.FinishAll();
        const absl::Status status = store().Crop(a, to);
        EXPECT_EQ(peer_.store->Crop(*b, to), status) << tokens << " to " << to;
        if (status.ok() && to > 0 && to < tokens) {
          const AttendEntry here{a, static_cast<uint64_t>(to - 1), 1}, there{*b, static_cast<uint64_t>(to - 1), 1};
          const CacheId peer_cache = peer_.store->Describe(*b)->cache;
          const auto left = *store().Attend(cache, 0, {&here, 1});
          const auto right = *peer_.store->Attend(peer_cache, 0, {&there, 1});
          ASSERT_TRUE(left->ready() && right->ready());
          for (size_t i = 0; i < left->pages(0).size(); ++i) {
            EXPECT_EQ(left->pages(0)[i].raw != nullptr, right->pages(0)[i].raw != nullptr) << tokens << " to " << to;
          }
        }
        store().Drop(a);
        peer_.store->Drop(*b);
      }
    }
  }
}

TEST_F(HandOffTest, AbandonedImportsLeaveNothing) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 5 * kPage + 1);
  const auto lease = Export(a);
  {
    auto import = peer_.store->imports().Import(lease->header());
    ASSERT_TRUE(import.ok());
    peer_.store->report().CheckInvariants();
    EXPECT_GT(peer_.pool->used_bytes(), 0u);
  }
  EXPECT_EQ(peer_.pool->used_bytes(), 0u);
  EXPECT_TRUE(peer_.store->report().SequenceIds().empty());
  EXPECT_TRUE(peer_.store->caches().List().empty());
  peer_.store->report().CheckInvariants();
  // A cache that a client opened meanwhile stays.
  auto import = peer_.store->imports().Import(lease->header());
  ASSERT_TRUE(import.ok());
  const auto opened = peer_.store->caches().Open(lease->header().config);
  ASSERT_TRUE(opened.ok());
  import->reset();
  EXPECT_TRUE(peer_.store->caches().Describe(*opened).ok());
}

constexpr auto kBad = absl::StatusCode::kInvalidArgument;

TEST_F(HandOffTest, AHostileHeaderIsRefused) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 3 * kPage + 1);
  ASSERT_TRUE(store().Publish(a, Names(cache, text, 2)).ok());
  const auto lease = Export(a);
  ASSERT_EQ(lease->header().pages.size(), 4u);
  const auto refused = [&](auto change, absl::StatusCode code) {
    HandOffHeader first = lease->header();
    change(first);
    const auto import = peer_.store->imports().Import(first);
    EXPECT_EQ(import.status().code(), code) << import.status();
    EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    EXPECT_TRUE(peer_.store->caches().List().empty());
    peer_.store->report().CheckInvariants();
  };
  refused([](HandOffHeader& f) { f.tokens = UINT64_MAX; }, kBad);
  refused([](HandOffHeader& f) { f.tokens += kPage; }, kBad);
  refused([](HandOffHeader& f) { f.blocks.pop_back(); }, kBad);
  refused([](HandOffHeader& f) { f.aged.pop_back(); }, kBad);
  refused([](HandOffHeader& f) { f.aged[1] = 4; }, kBad);
  refused([](HandOffHeader& f) { f.aged[1] = 1; }, kBad);
  refused([](HandOffHeader& f) { f.pages.push_back(f.pages[0]); }, kBad);
  refused([](HandOffHeader& f) { f.pages.push_back(f.pages[3]); }, kBad);
  refused([](HandOffHeader& f) { f.pages[1].block = 7; }, kBad);
  refused([](HandOffHeader& f) { f.pages[1].block = 0; }, kBad);
  refused([](HandOffHeader& f) { f.pages[1].layer = 1; }, kBad);
  refused([](HandOffHeader& f) { f.pages[3].layer = 2; }, kBad);
  refused([](HandOffHeader& f) { f.pages[1].bytes -= 1; }, kBad);
  refused([](HandOffHeader& f) { f.pages[3].block = 3; }, kBad);
  refused([](HandOffHeader& f) { f.blocks[1] = f.blocks[0]; }, kBad);
  refused([](HandOffHeader& f) { f.config.layers = 0; }, kBad);
  refused([](HandOffHeader& f) { f.config.codec = "nonsense"; }, kBad);
  refused([](HandOffHeader& f) { f.codec_version = 2; }, absl::StatusCode::kFailedPrecondition);
}

TEST_F(HandOffTest, AHostileTrailerChangesNothing) {
  const CacheId cache = test().Open(MakeConfig("declining", 1));
  const PageLayout layout = store().caches().codec(cache)->layout();
  const auto declines = [&](const Text& text, uint32_t block) {
    return testing::Declines(MakeRawPage(layout, text, block, kPage, 0).data());
  };
  uint32_t salt = 0;
  while (declines(MakeText(6 * kPage, salt), 0) || !declines(MakeText(6 * kPage, salt), 1)) ++salt;
  const Text text = MakeText(6 * kPage, salt);
  // So that pages are declined after the hand-off began.
  const SequenceId a = Create(cache);
  auto lease = *store().exports().Growing(a, 5 * kPage + 1);
  ASSERT_TRUE(test().AppendAll(cache, a, text, 0, 5 * kPage + 1).ok());
  test().executor.FinishAll();
  ASSERT_TRUE(lease->Finish().ok());
  const HandOffTrailer& last = *lease->trailer();
  ASSERT_FALSE(last.withdrawn.empty());
  const std::vector<SentPage> pages = TakeAll(*lease);
  ASSERT_LT(last.withdrawn.size(), lease->header().pages.size());
  auto import = peer_.store->imports().Import(lease->header());
  ASSERT_TRUE(import.ok());
  ASSERT_TRUE(testing::Deliver(**import, pages[0].bytes).ok());
  const uint64_t used = peer_.pool->used_bytes();
  const auto refused = [&](auto change) {
    HandOffTrailer changed = last;
    change(changed);
    const absl::Status status = (*import)->Extend(changed);
    EXPECT_EQ(status.code(), kBad) << status;
    EXPECT_EQ(peer_.pool->used_bytes(), used);
    EXPECT_FALSE((*import)->can_show());
    peer_.store->report().CheckInvariants();
  };
  refused([](HandOffTrailer& l) { l.withdrawn.push_back(l.withdrawn.back()); });
  refused([](HandOffTrailer& l) { l.withdrawn.push_back(1000); });
  refused([](HandOffTrailer& l) { l.withdrawn.pop_back(); });
  refused([&](HandOffTrailer& l) { l.withdrawn.insert(l.withdrawn.begin(), pages[0].bytes.page); });  // it came
  refused([](HandOffTrailer& l) { l.pages.pop_back(); });
  refused([](HandOffTrailer& l) { l.pages.push_back(l.pages[0]); });
  refused([](HandOffTrailer& l) { std::swap(l.pages[0], l.pages[1]); });
  refused([](HandOffTrailer& l) { l.pages[0].bytes /= 2; });
  refused([](HandOffTrailer& l) { l.blocks.pop_back(); });
  refused([](HandOffTrailer& l) { l.blocks[0].named = l.blocks[1].named = true; });
  refused([](HandOffTrailer& l) { l.index.prompt_tokens = UINT64_MAX; });
  refused([](HandOffTrailer& l) { l.index.iterations = UINT32_MAX; });
  // The right one still comes, once; pages that are not awaited do not.
  ASSERT_TRUE((*import)->Extend(last).ok());
  const ArrivedPage again{pages[0].bytes.page, 0}, withdrawn{last.withdrawn[0], 0}, beyond{1000, 0};
  for (const ArrivedPage& page : {again, withdrawn, beyond}) EXPECT_EQ((*import)->Arrived({&page, 1}).code(), kBad);
  peer_.store->report().CheckInvariants();
  for (const SentPage& page : pages) {
    if (page.bytes.page == pages[0].bytes.page) continue;
    ASSERT_TRUE(testing::Deliver(**import, page.bytes).ok());
  }
  ASSERT_TRUE((*import)->Show().ok());
  EXPECT_TRUE((*import)->Commit().ok());
  peer_.store->report().CheckInvariants();
}

TEST_F(HandOffTest, HostileBytesAreRefused) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 3 * kPage + 1);
  const auto lease = Export(a);
  const std::vector<SentPage> pages = TakeAll(*lease);
  const auto validate = [&](const SentPage& page, size_t at, uint16_t bits) {
    auto import = peer_.store->imports().Import(lease->header());
    EXPECT_TRUE(import.ok() && (*import)->Extend(*lease->trailer()).ok());
    const absl::Span<uint8_t> target = (*import)->target(page.bytes.page);
    std::memcpy(target.data(), page.bytes.bytes.data(), target.size());
    const auto good = (*import)->Validate(page.bytes.page);
    EXPECT_TRUE(good.ok()) << good.status();
    EXPECT_EQ(*good, page.bytes.checksum);
    std::memcpy(target.data() + at, &bits, 2);
    const absl::Status status = (*import)->Validate(page.bytes.page).status();
    import->reset();
    EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    peer_.store->report().CheckInvariants();
    return status;
  };
  ASSERT_TRUE(pages[0].encoded && !pages[4].encoded);
  EXPECT_EQ(validate(pages[0], pages[0].page.bytes - 2, 0).code(), absl::StatusCode::kDataLoss);
  ASSERT_EQ(pages[4].page.block, 2u);
  EXPECT_EQ(validate(pages[4], 64, 0x7c00).code(), kBad);
  ASSERT_EQ(pages[5].page.block, 3u);
  EXPECT_EQ(validate(pages[5], config.layout.raw_offset(1, 0, 15), 0xfe00).code(), kBad);
}

TEST_F(HandOffTest, EmptyAndWholePageSequences) {
  for (const int tokens : {0, kPage, 2 * kPage}) {
    const CacheId cache = test().Open(MakeConfig("declining", 0));
    const Text text = MakeText(40);
    const SequenceId a = Create(cache);
    if (tokens > 0) {
      ASSERT_TRUE(test().AppendAll(cache, a, text, 0, tokens).ok());
    }
    const auto lease = Export(a);
    auto import = peer_.store->imports().Import(lease->header());
    ASSERT_TRUE(import.ok()) << import.status();
    const auto b = Receive(**import, *lease->trailer(), TakeAll(*lease));
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_EQ(peer_.store->Describe(*b)->tokens, static_cast<uint64_t>(tokens));
    peer_.store->report().CheckInvariants();
  }
}

// Who was refused for room hears of the next that there is.
TEST_F(HandOffTest, RoomIsToldOnce) {
  int told = 0;
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 3);
  const SequenceId b = Filled(cache, text, 2 * kPage);
  test().executor.FinishAll();
  store().imports().OnRoom([&told] { ++told; });
  ASSERT_TRUE(store().Publish(b, Names(cache, text, 2)).ok());
  EXPECT_EQ(told, 0);
  store().Drop(b);  // it can be evicted
  EXPECT_EQ(told, 1);
  store().Drop(a);
  EXPECT_EQ(told, 1);
  store().imports().OnRoom([&told] { ++told; });
  EXPECT_EQ(store().caches().PurgeAll(), 2u);
  EXPECT_EQ(told, 2);
}

// One call would list hundreds of millions of pages.
TEST_F(PageStoreTest, WhatHasTooManyPagesIsRefusedBeforeTheyAreListed) {
  CacheConfig config = MakeConfig("raw", 0);
  config.layers = 1024;
  const CacheId cache = test().Open(config);
  const SequenceId sequence = Create(cache);
  const uint64_t most = kHandOffPagesMax / 1024 * kPage;
  EXPECT_TRUE(store().exports().Growing(sequence, most).ok());
  for (const uint64_t tokens : {most + 1, uint64_t{kSequenceBlocksMax} * kPage}) {
    const absl::Status refused = store().exports().Growing(sequence, tokens).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_EQ(DetailOf(refused).field, "tokens");
  }
  store().Drop(sequence);
}

}  // namespace
}  // namespace kvmanager
