// Appends in pieces: the same as an append at once, and nothing before they commit.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
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
    const size_t pages_at_once = 2;
    rows_ = MakeKeysValues(store().caches().Describe(cache)->config.layout, text, position, tokens, 0);
    const AppendEntry entry{sequence, position, tokens, rows_.k.data(), rows_.v.data()};
    return store().appends().Begin(cache, 0, {&entry, 1}, pages_at_once);
  }
  std::unique_ptr<AppendLease> MustBegin(CacheId cache, SequenceId sequence, const Text& text, uint64_t position,
                                         int tokens) {
    auto lease = Begin(cache, sequence, text, position, tokens);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  static absl::Status Reserve(AppendLease& lease) {
    while (lease.ReserveNext()) {
    }
    return lease.status();
  }
  static absl::Status Write(AppendLease& lease) {
    KV_RETURN_IF_ERROR(Reserve(lease));
    while (lease.WriteNext()) {
    }
    return lease.status();
  }
  static absl::Status Commit(AppendLease& lease) {
    while (lease.CommitNext()) {
    }
    return lease.status();
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
      ASSERT_TRUE(Write(*lease).ok());
      EXPECT_EQ(Tokens(sequence), first);
      ASSERT_TRUE(Commit(*lease).ok());
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
  EXPECT_EQ(used_bytes(), 0);
  EXPECT_TRUE(lease->ReserveNext());
  const uint64_t some = used_bytes();
  EXPECT_GT(some, 0);
  ASSERT_TRUE(Reserve(*lease).ok());
  EXPECT_EQ(used_bytes(), 10 * some);
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
    const absl::Status status = Write(*lease);
    EXPECT_EQ(Commit(*lease), status);
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
  ASSERT_TRUE(Reserve(*lease).ok());
  lease->WriteNext();
  lease = nullptr;  // what it had goes back as it is
  test().pool->CheckInvariants();
  lease = MustBegin(cache, sequence, text, 0, kPage + 1);
  ASSERT_TRUE(Write(*lease).ok());
  ASSERT_TRUE(Commit(*lease).ok());
  EXPECT_TRUE(is_zero(kPage + 1));
  ExpectText(cache, sequence, text, kPage + 1);
  store().Drop(sequence);
}

TEST_F(AppendLeaseTest, MeanwhileItsSequencesRefuseAppendsAndCrops) {
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(4 * kPage), other = MakeText(4 * kPage, 900);
  const SequenceId sequence = Create(cache);
  ASSERT_TRUE(test().Append(cache, sequence, text, 0, 3, 0).ok());
  auto lease = MustBegin(cache, sequence, text, 3, 3 * kPage);
  ASSERT_TRUE(Write(*lease).ok());
  for (int pieces = 0; pieces < 2; ++pieces) {
    const absl::Status refused = test().Append(cache, sequence, other, Tokens(sequence), 3, 0);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(DetailOf(refused).field, "entries[0].sequence");
    EXPECT_EQ(Begin(cache, sequence, text, Tokens(sequence), 1).status(), refused);
    EXPECT_EQ(store().Crop(sequence, 1).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(store().Fork(sequence).ok());
    EXPECT_EQ(lease->CommitNext(), pieces == 0);
  }
  ExpectText(cache, sequence, text, 3 * kPage + 3);
  ASSERT_TRUE(store().Crop(sequence, 3).ok());
  lease = MustBegin(cache, sequence, text, 3, kPage);
  lease = nullptr;
  ASSERT_TRUE(test().Append(cache, sequence, text, 3, kPage, 0).ok());
  ExpectText(cache, sequence, text, kPage + 3);
}

TEST_F(AppendLeaseTest, OnceItCommitsItGoesToItsEnd) {
  for (const char* codec : {"raw", "fake"}) {
    SCOPED_TRACE(codec);
    const CacheId cache = test().Open(OneLayer(codec, 1));
    const Text text = MakeText(9 * kPage);
    const SequenceId sequence = Create(cache);
    bool left = false;
    store().long_calls().OnLeftovers([&] { left = true; });
    auto lease = MustBegin(cache, sequence, text, 0, 9 * kPage);
    ASSERT_TRUE(Write(*lease).ok());
    EXPECT_TRUE(lease->CommitNext());
    EXPECT_EQ(Tokens(sequence), 2 * kPage);
    EXPECT_FALSE(left);
    lease = nullptr;
    EXPECT_TRUE(left);
    EXPECT_TRUE(store().long_calls().ReleaseSome());
    EXPECT_EQ(Tokens(sequence), 4 * kPage);
    EXPECT_FALSE(test().Append(cache, sequence, text, 4 * kPage, 1, 0).ok());
    while (store().long_calls().ReleaseSome()) {
    }
    test().executor.FinishAll();
    EXPECT_EQ(Tokens(sequence), 9 * kPage);
    if (codec == std::string("raw")) ExpectText(cache, sequence, text, 9 * kPage);
    store().report().CheckInvariants();
    store().Drop(sequence);
    EXPECT_EQ(used_bytes(), 0);
  }
}

// Of two sequences one goes at each of the steps; the other's tokens are as if nothing had happened.
TEST_F(AppendLeaseTest, ASequenceThatGoesIsLeftOut) {
  for (const char* codec : {"raw", "fake"}) {
    for (int after = 0; after < 6; ++after) {
      SCOPED_TRACE(absl::StrCat(codec, " after ", after));
      const CacheId cache = test().Open(OneLayer(codec, 8));
      const Text text = MakeText(6 * kPage), other = MakeText(6 * kPage, 500);
      const SequenceId goes = Create(cache), stays = Create(cache);
      ASSERT_TRUE(test().Append(cache, goes, text, 0, 3, 0).ok());
      const PageLayout layout = store().caches().Describe(cache)->config.layout;
      const KeysValues of_goes = MakeKeysValues(layout, text, 3, 4 * kPage, 0);
      const KeysValues of_stays = MakeKeysValues(layout, other, 0, 4 * kPage, 0);
      const AppendEntry entries[] = {{goes, 3, 4 * kPage, of_goes.k.data(), of_goes.v.data()},
                                     {stays, 0, 4 * kPage, of_stays.k.data(), of_stays.v.data()}};
      auto begun = store().appends().Begin(cache, 0, entries, 2);
      ASSERT_TRUE(begun.ok());
      AppendLease& lease = **begun;
      if (after == 0) store().Drop(goes);
      lease.ReserveNext();
      if (after == 1) store().Drop(goes);
      if (Reserve(lease).ok()) lease.WriteNext();
      if (after == 2) store().Drop(goes);
      (void)Write(lease);
      if (after == 3) store().Drop(goes);
      const bool began = lease.CommitNext();
      EXPECT_EQ(began, after > 3);
      if (after == 4) store().Drop(goes);
      const absl::Status committed = Commit(lease);
      if (after == 5) store().Drop(goes);
      EXPECT_EQ(committed.code(), after > 3 ? absl::StatusCode::kOk : absl::StatusCode::kNotFound);
      begun->reset();
      test().executor.FinishAll();
      store().report().CheckInvariants();
      if (after > 3) {
        ExpectText(cache, stays, other, 4 * kPage);
      } else {
        EXPECT_EQ(Tokens(stays), 0);
      }
      store().Drop(stays);
      EXPECT_EQ(used_bytes(), 0);
    }
  }
}

// An append ages what was appended long before, in pieces, too.
TEST_F(AppendLeaseTest, Ages) {
  const CacheId cache = test().Open(OneLayer("fake", 1));
  const Text text = MakeText(21 * kPage);
  const SequenceId sequence = Create(cache);
  ASSERT_TRUE(test().Append(cache, sequence, text, 0, 20 * kPage, 0).ok());
  test().executor.FinishAll();
  const AppendEntry entry{sequence, 20 * kPage, 1};
  const AppendWork work = store().appends().Measure(cache, 0, {&entry, 1});
  EXPECT_EQ(work.opened, 1);
  EXPECT_EQ(work.aged, 19);
  const uint64_t before = store().caches().Describe(cache)->raw_bytes;
  auto lease = MustBegin(cache, sequence, text, 20 * kPage, 1);
  ASSERT_TRUE(Write(*lease).ok());
  uint64_t raw = before;
  for (int i = 0; i < 9; ++i) {  // two pages each time
    EXPECT_TRUE(lease->CommitNext());
    const uint64_t now = store().caches().Describe(cache)->raw_bytes;
    EXPECT_LT(now, raw);
    raw = now;
    EXPECT_EQ(Tokens(sequence), 20 * kPage);
  }
  EXPECT_FALSE(lease->CommitNext());
  ASSERT_TRUE(lease->status().ok());
  EXPECT_EQ(store().caches().Describe(cache)->raw_bytes, before / 20 * 2);
  EXPECT_EQ(store().appends().Measure(cache, 0, {&entry, 1}).aged, 0);
}

TEST_F(AppendLeaseTest, WhatDoesNotFitTakesNothing) {
  pool_bytes_ = 2 << 20;
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(4096 * kPage);
  const SequenceId sequence = Create(cache);
  auto lease = MustBegin(cache, sequence, text, 0, 4096 * kPage);
  EXPECT_EQ(Reserve(*lease).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(used_bytes(), 0);
  EXPECT_FALSE(lease->WriteNext());
  EXPECT_EQ(Commit(*lease).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(test().store_metrics.refused_appends.Value(), 1);
}

TEST_F(AppendLeaseTest, ItMayOutliveTheStore) {
  const CacheId cache = test().Open(OneLayer("raw", 1));
  const Text text = MakeText(4 * kPage + 2);
  const SequenceId sequence = Create(cache);
  ASSERT_TRUE(test().Append(cache, sequence, text, 0, 2, 0).ok());
  auto lease = MustBegin(cache, sequence, text, 2, 4 * kPage);
  ASSERT_TRUE(Write(*lease).ok());
  EXPECT_TRUE(lease->CommitNext());
  test().store = nullptr;
  EXPECT_EQ(Commit(*lease).code(), absl::StatusCode::kUnavailable);
  lease = nullptr;
  test_ = nullptr;
}

}  // namespace
}  // namespace kvmanager
