// Appends in pieces: the same as an append at once, and nothing before Commit.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::KeysValues;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeKeysValues;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::RawPrefixEquals;
using testing::Text;

CacheConfig OneLayer(const char* codec, int lag_pages) { return MakeConfig(codec, lag_pages, "a", /*layers=*/1); }

class AppendLeaseTest : public PageStoreTest {
 protected:
  // What is appended to layer 0 from `position` on. One at a time: the lease reads it.
  absl::StatusOr<std::unique_ptr<AppendLease>> Begin(CacheId cache, SequenceId sequence, const Text& text,
                                                     uint64_t position, int tokens) {
    rows_ = MakeKeysValues(store().caches().Describe(cache)->config.layout, text, position, tokens, 0);
    const AppendEntry entry{sequence, position, tokens, rows_.k.data(), rows_.v.data()};
    return store().appends().Begin(cache, 0, {&entry, 1});
  }
  std::unique_ptr<AppendLease> MustBegin(CacheId cache, SequenceId sequence, const Text& text, uint64_t position,
                                         int tokens) {
    auto lease = Begin(cache, sequence, text, position, tokens);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  static void Write(AppendLease& lease) {
    while (lease.WriteNext()) {
    }
  }
  uint64_t Tokens(SequenceId sequence) { return store().Describe(sequence)->tokens; }
  uint64_t used_bytes() { return test().pool->used_bytes(); }
  void ExpectText(CacheId cache, SequenceId sequence, const Text& text, int tokens) {
    ASSERT_EQ(Tokens(sequence), tokens);
    const AttendEntry entry{sequence, 0, tokens};
    auto lease = store().Load(cache, 0, {&entry, 1});
    ASSERT_TRUE(lease.ok()) << lease.status();
    const PageLayout layout = store().caches().Describe(cache)->config.layout;
    for (int first = 0; first < tokens; first += kPage) {
      const uint32_t page = first / kPage;
      const int count = std::min<int>(kPage, tokens - first);
      const AttentionPage& at = (*lease)->pages(0)[page];
      EXPECT_TRUE(RawPrefixEquals(layout, at.raw != nullptr ? at.raw : at.encoded,
                                  MakeRawPage(layout, text, page, count, 0), count))
          << page;
    }
  }

  KeysValues rows_;
};

TEST_F(AppendLeaseTest, GivesWhatAnAppendGives) {
  for (const char* codec : {"raw", "fake"}) {
    SCOPED_TRACE(codec);
    const CacheId cache = test().Open(OneLayer(codec, 8));
    const Text text = MakeText(5 * kPage + 3);
    const SequenceId sequence = Create(cache);
    // Into new pages, into an open one and new ones, and into an open one alone.
    for (const auto& [first, tokens] : std::vector<std::pair<int, int>>{
             {0, kPage + 2}, {kPage + 2, 3 * kPage}, {4 * kPage + 2, 1}, {4 * kPage + 3, kPage}}) {
      const auto lease = MustBegin(cache, sequence, text, first, tokens);
      EXPECT_EQ(Tokens(sequence), first);
      Write(*lease);
      EXPECT_EQ(Tokens(sequence), first);
      ASSERT_TRUE(lease->Commit().ok());
    }
    ExpectText(cache, sequence, text, 5 * kPage + 3);
    test().executor.FinishAll();
    store().report().CheckInvariants();
    store().Drop(sequence);
    EXPECT_EQ(used_bytes(), 0);
  }
}

TEST_F(AppendLeaseTest, WhatIsNotCommittedIsGivenBack) {
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(20 * kPage);
  const SequenceId sequence = Create(cache);
  auto lease = MustBegin(cache, sequence, text, 0, 20 * kPage);
  EXPECT_GT(used_bytes(), 0);
  lease->WriteNext();
  lease = nullptr;
  EXPECT_EQ(used_bytes(), 0);
  EXPECT_EQ(Tokens(sequence), 0);
  ASSERT_TRUE(test().Append(cache, sequence, text, 0, 2 * kPage, 0).ok());
  ExpectText(cache, sequence, text, 2 * kPage);
}

TEST_F(AppendLeaseTest, WhatIsNotFiniteIsRefusedAndNamed) {
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(4 * kPage);
  const SequenceId sequence = Create(cache);
  ASSERT_TRUE(test().Append(cache, sequence, text, 0, 1, 0).ok());
  const uint64_t before = used_bytes();
  for (const int token : {0, kPage - 2, kPage - 1, 3 * kPage - 1}) {  // in the open page, and in new ones
    SCOPED_TRACE(token);
    auto lease = MustBegin(cache, sequence, text, 1, 3 * kPage);
    const PageLayout layout = OneLayer("raw", 1).layout;
    const uint16_t infinity = 0x7c00;
    std::memcpy(rows_.v.data() + size_t(token) * layout.kv_heads * layout.head_dim * 2, &infinity, 2);
    Write(*lease);
    const absl::Status status = lease->Commit();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailOf(status).field, absl::StrCat("entries[0].v[token ", token, "][head 0][channel 0]"));
    lease = nullptr;
    EXPECT_EQ(used_bytes(), before);
    EXPECT_EQ(Tokens(sequence), 1);
  }
}

TEST_F(AppendLeaseTest, WhatIsWrongAtTheBeginningIsSaidThen) {
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(4 * kPage);
  const SequenceId sequence = Create(cache);
  EXPECT_EQ(Begin(cache, sequence, text, 1, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Begin(cache, 77, text, 0, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Begin(cache, sequence, text, 0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(used_bytes(), 0);
}

// Slots that hold another tenant's bytes.
TEST_F(AppendLeaseTest, ZeroesWhatOthersWrote) {
  pool_bytes_ = 2 << 20;
  const Text text = MakeText(128 * kPage);
  const CacheId theirs = test().Open(MakeConfig("raw", 1, "them", /*layers=*/1));
  store().Drop(Filled(theirs, text, 128 * kPage));
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const SequenceId sequence = Create(cache);
  const auto is_zero = [&](int from_token) {
    const AttendEntry entry{sequence, 0, from_token};
    const auto lease = store().Load(cache, 0, {&entry, 1});
    EXPECT_TRUE(lease.ok()) << lease.status();
    const PageLayout layout = OneLayer("raw", 1).layout;
    const uint8_t* const page = (*lease)->pages(0)[from_token / kPage].raw;
    for (int head = 0; head < layout.kv_heads; ++head) {
      for (size_t at = layout.raw_offset(1, head, from_token % kPage); at < layout.raw_offset(1, head, kPage); ++at) {
        if (page[at] != 0) return false;
      }
    }
    return true;
  };
  auto lease = MustBegin(cache, sequence, text, 0, kPage + 1);
  lease->WriteNext();
  lease = nullptr;  // what it had goes back as it is
  test().pool->CheckInvariants();
  lease = MustBegin(cache, sequence, text, 0, kPage + 1);
  Write(*lease);
  ASSERT_TRUE(lease->Commit().ok());
  EXPECT_TRUE(is_zero(kPage + 1));
  ExpectText(cache, sequence, text, kPage + 1);
  store().Drop(sequence);
}

TEST_F(AppendLeaseTest, WhatHappensMeanwhileIsNotOverwritten) {
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(4 * kPage), other = MakeText(3, 900);
  const SequenceId sequence = Create(cache);
  auto lease = MustBegin(cache, sequence, text, 0, 3 * kPage);
  Write(*lease);
  ASSERT_TRUE(test().Append(cache, sequence, other, 0, 3, 0).ok());
  EXPECT_EQ(lease->Commit().code(), absl::StatusCode::kFailedPrecondition);
  lease = nullptr;
  ExpectText(cache, sequence, other, 3);
  lease = MustBegin(cache, sequence, text, 3, kPage);
  Write(*lease);
  store().Drop(sequence);
  EXPECT_EQ(lease->Commit().code(), absl::StatusCode::kNotFound);
  lease = nullptr;
  EXPECT_EQ(used_bytes(), 0);
}

TEST_F(AppendLeaseTest, ItMayOutliveTheStore) {
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(2 * kPage);
  const SequenceId sequence = Create(cache);
  auto lease = MustBegin(cache, sequence, text, 0, 2 * kPage);
  Write(*lease);
  test().store = nullptr;
  EXPECT_EQ(lease->Commit().code(), absl::StatusCode::kUnavailable);
  lease = nullptr;
  test_ = nullptr;
}

}  // namespace
}  // namespace kvmanager
