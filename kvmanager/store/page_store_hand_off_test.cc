// Hand-offs between two stores: forms, sharing, and content and bytes that lie.
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
using testing::TestStore;
using testing::Text;

// A second store beside the first.
class HandOffTest : public PageStoreTest {
 protected:
  // Ages, encodes and exports; content is as of then.
  std::unique_ptr<ExportLease> Export(SequenceId sequence) {
    auto lease = store().Export(sequence);
    EXPECT_TRUE(lease.ok()) << lease.status();
    test().executor.FinishAll();
    EXPECT_TRUE((*lease)->ready());
    return *std::move(lease);
  }
  // Bytes sent.
  uint64_t Send(const ExportLease& from, ImportLease& to) {
    uint64_t sent = 0;
    for (size_t i = 0; i < from.content().pages.size(); ++i) {
      const auto target = to.target(i);
      if (target.empty()) continue;
      EXPECT_EQ(target.size(), from.bytes(i).size());
      std::memcpy(target.data(), from.bytes(i).data(), target.size());
      sent += target.size();
    }
    return sent;
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
  const HandOffContent& content = lease->content();
  ASSERT_EQ(content.pages.size(), 10u);
  for (const HandOffPage& page : content.pages) EXPECT_EQ(page.form == PageForm::kEncoded, page.block < 3);
  EXPECT_TRUE(content.blocks[2].named && !content.blocks[3].named);

  auto import = peer_.store->Import(content);
  ASSERT_TRUE(import.ok()) << import.status();
  EXPECT_EQ(peer_.store->Match(1, Names(cache, text, 3))->hit_blocks, 0);
  EXPECT_TRUE(peer_.store->Sequences().empty());
  const uint64_t all = Send(*lease, **import);
  const auto b = (*import)->Commit();
  ASSERT_TRUE(b.ok()) << b.status();
  import->reset();
  peer_.store->CheckInvariants();
  const CacheId peer_cache = peer_.store->DescribeSequence(*b)->cache;
  EXPECT_EQ(peer_.store->Match(peer_cache, Names(cache, text, 3))->hit_blocks, 3);
  EXPECT_EQ(peer_.executor.jobs(), 1u);  // the raw full pages
  // It goes on as if it had been appended there.
  ASSERT_TRUE(peer_.AppendAll(peer_cache, *b, text, 4 * kPage + 7, 1).ok());
  const AttendEntry entry{*b, 4 * kPage + 7, 1};
  const auto view = *peer_.store->Attend(peer_cache, 1, {&entry, 1});
  ASSERT_TRUE(view->ready());
  EXPECT_TRUE(RawPrefixEquals(config.layout, view->pages(0)[4].raw, MakeRawPage(config.layout, text, 4, 8, 1), 8));
  EXPECT_NE(view->pages(0)[3].raw, nullptr);
  EXPECT_EQ(view->pages(0)[2].raw, nullptr);

  // A second time, what is there is not sent again.
  auto second = peer_.store->Import(content);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(Send(*lease, **second), all - 6 * store().codec(cache)->info().encoded_bytes);
  EXPECT_TRUE((*second)->target(0).empty());
  EXPECT_TRUE((*second)->Commit().ok());
  EXPECT_EQ((*second)->Commit().status().code(), absl::StatusCode::kFailedPrecondition);
  peer_.store->CheckInvariants();
}

// Sender and receiver may crop to the same places, also when the sequence ends at a page's boundary.
TEST_F(HandOffTest, TheReceiverCropsAsTheSender) {
  for (const int tokens : {5 * kPage - 1, 5 * kPage, 5 * kPage + 1}) {
    for (int to = tokens; to >= 0; --to) {
      const CacheId cache = test().Open(MakeConfig("fake", 2));
      const Text text = MakeText(6 * kPage);
      const SequenceId a = Filled(cache, text, tokens);
      auto lease = Export(a);
      auto import = peer_.store->Import(lease->content());
      ASSERT_TRUE(import.ok()) << import.status();
      Send(*lease, **import);
      const auto b = (*import)->Commit();
      ASSERT_TRUE(b.ok()) << b.status();
      peer_.executor.FinishAll();
      const absl::Status status = store().Crop(a, to);
      EXPECT_EQ(peer_.store->Crop(*b, to), status) << tokens << " to " << to;
      if (status.ok() && to > 0 && to < tokens) {
        const AttendEntry here{a, static_cast<uint64_t>(to - 1), 1}, there{*b, static_cast<uint64_t>(to - 1), 1};
        const CacheId peer_cache = peer_.store->DescribeSequence(*b)->cache;
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

TEST_F(HandOffTest, AbandonedImportsLeaveNothing) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 5 * kPage + 1);
  const auto lease = Export(a);
  {
    auto import = peer_.store->Import(lease->content());
    ASSERT_TRUE(import.ok());
    peer_.store->CheckInvariants();
    EXPECT_GT(peer_.pool->used_bytes(), 0u);
  }
  EXPECT_EQ(peer_.pool->used_bytes(), 0u);
  EXPECT_TRUE(peer_.store->Sequences().empty());
  EXPECT_TRUE(peer_.store->Caches().empty());
  peer_.store->CheckInvariants();
  // A cache that a client opened meanwhile stays.
  auto import = peer_.store->Import(lease->content());
  ASSERT_TRUE(import.ok());
  const auto opened = peer_.store->OpenCache(lease->content().config);
  ASSERT_TRUE(opened.ok());
  import->reset();
  EXPECT_TRUE(peer_.store->DescribeCache(*opened).ok());
}

TEST_F(HandOffTest, HostileContentIsRefused) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 3 * kPage + 1);
  ASSERT_TRUE(store().Publish(a, Names(cache, text, 2)).ok());
  const auto lease = Export(a);
  const auto refused = [&](auto change, absl::StatusCode code) {
    HandOffContent content = lease->content();
    change(content);
    const auto import = peer_.store->Import(content);
    EXPECT_EQ(import.status().code(), code) << import.status();
    EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    EXPECT_TRUE(peer_.store->Caches().empty());
    peer_.store->CheckInvariants();
  };
  const auto bad = absl::StatusCode::kInvalidArgument;
  refused([](HandOffContent& c) { c.tokens = UINT64_MAX; }, bad);
  refused([](HandOffContent& c) { c.tokens += kPage; }, bad);
  refused([](HandOffContent& c) { c.blocks.pop_back(); }, bad);
  refused([](HandOffContent& c) { c.pages.pop_back(); }, bad);
  refused([](HandOffContent& c) { c.pages.push_back(c.pages[0]); }, bad);
  refused([](HandOffContent& c) { c.pages[1].block = 7; }, bad);
  refused([](HandOffContent& c) { c.pages[1].layer = 1; }, bad);
  refused([](HandOffContent& c) { c.pages[1].bytes -= 1; }, bad);
  refused([](HandOffContent& c) { c.pages[3].form = PageForm::kEncoded; }, bad);
  refused([](HandOffContent& c) { c.pages[0].form = static_cast<PageForm>(9); }, bad);
  refused([](HandOffContent& c) { c.blocks[1] = c.blocks[0]; }, bad);
  refused([](HandOffContent& c) { c.config.layers = 0; }, bad);
  refused([](HandOffContent& c) { c.config.codec = "nonsense"; }, bad);
  refused([](HandOffContent& c) { c.codec_version = 2; }, absl::StatusCode::kFailedPrecondition);
}

TEST_F(HandOffTest, HostileBytesAreRefused) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 3 * kPage + 1);
  const auto lease = Export(a);
  ASSERT_EQ(lease->content().pages[0].form, PageForm::kEncoded);
  ASSERT_EQ(lease->content().pages[2].form, PageForm::kRaw);
  const auto commit = [&](size_t page, size_t at, uint16_t bits, bool fix_checksum) {
    HandOffContent content = lease->content();
    std::vector<uint8_t> bytes(lease->bytes(page).begin(), lease->bytes(page).end());
    std::memcpy(bytes.data() + at, &bits, 2);
    if (fix_checksum) content.pages[page].checksum = testing::Checksum(bytes);
    auto import = peer_.store->Import(content);
    EXPECT_TRUE(import.ok());
    Send(*lease, **import);
    std::memcpy((*import)->target(page).data(), bytes.data(), bytes.size());
    const absl::Status status = (*import)->Commit().status();
    import->reset();
    EXPECT_EQ(peer_.pool->used_bytes(), 0u);
    peer_.store->CheckInvariants();
    return status;
  };
  EXPECT_EQ(commit(0, 10, 0x1234, false).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(commit(0, lease->bytes(0).size() - 2, 0, true).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(commit(2, 64, 0x7c00, true).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(commit(3, config.layout.raw_offset(1, 0, 15), 0xfe00, true).code(), absl::StatusCode::kInvalidArgument);
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
    auto import = peer_.store->Import(lease->content());
    ASSERT_TRUE(import.ok()) << import.status();
    Send(*lease, **import);
    const auto b = (*import)->Commit();
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_EQ(peer_.store->DescribeSequence(*b)->tokens, static_cast<uint64_t>(tokens));
    peer_.store->CheckInvariants();
  }
}

}  // namespace
}  // namespace kvmanager
