// The rules of page_store.h, one by one.
#include "kvmanager/store/page_store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "kvmanager/base/status.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::Declines;
using testing::KeysValues;
using testing::kPage;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeKeysValues;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::RawPrefixEquals;
using testing::Text;

TEST_F(PageStoreTest, OpenCacheFindsEqualOnesAndRefusesBadOnes) {
  const CacheId a = test().Open(MakeConfig("fake", 1));
  EXPECT_EQ(test().Open(MakeConfig("fake", 1)), a);
  EXPECT_NE(test().Open(MakeConfig("fake", 2)), a);
  EXPECT_NE(test().Open(MakeConfig("fake", 1, "b")), a);
  const auto refused = [&](auto change, absl::string_view field) {
    CacheConfig config = MakeConfig("fake", 1);
    change(config);
    const absl::Status status = store().caches().Open(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(DetailOf(status).field, field) << status;
  };
  refused([](CacheConfig& c) { c.model = ""; }, "model");
  refused([](CacheConfig& c) { c.model = "a\nlayers=3"; }, "model");
  refused([](CacheConfig& c) { c.tenant.assign(257, 'x'); }, "tenant");
  refused([](CacheConfig& c) { c.layers = 0; }, "layers");
  refused([](CacheConfig& c) { c.layers = CacheConfig::kLayersMax + 1; }, "layers");
  refused([](CacheConfig& c) { c.layout.dtype = DType::kFloat32; }, "dtype");
  refused([](CacheConfig& c) { c.layout.head_dim = 24; }, "head_dim");
  refused([](CacheConfig& c) { c.layout.page_tokens = 8; }, "page_tokens");
  refused([](CacheConfig& c) { c.layout.kv_heads = 0; }, "kv_heads");
  refused([](CacheConfig& c) { c.query_heads = 6; }, "query_heads");
  refused([](CacheConfig& c) { c.query_heads = 0; }, "query_heads");
  refused([](CacheConfig& c) { c.lag_pages = -1; }, "lag_pages");
  refused([](CacheConfig& c) { c.tensor_parallel_rank = 1; }, "tensor_parallel_rank");
  refused([](CacheConfig& c) { c.calibration_digest = "xyz"; }, "calibration_digest");
  CacheConfig unknown = MakeConfig("nonsense", 1);
  EXPECT_EQ(store().caches().Open(unknown).status().code(), absl::StatusCode::kInvalidArgument);
  CacheConfig huge = MakeConfig("fake", 1);
  huge.layout.kv_heads = huge.query_heads = 128;
  huge.layout.head_dim = 256;
  huge.layout.page_tokens = 64;
  EXPECT_EQ(store().caches().Open(huge).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store().caches().List().size(), 3u);
}

TEST_F(PageStoreTest, DigestKnowsEveryField) {
  std::set<Digest> digests;
  CacheConfig c = MakeConfig("fake", 1);
  const auto is_new = [&] { return digests.insert(DigestOf(c, 1)).second; };
  EXPECT_TRUE(is_new());
  EXPECT_FALSE(is_new());
  EXPECT_TRUE((c.model = "m", is_new()));
  EXPECT_TRUE((c.revision = "r", is_new()));
  EXPECT_TRUE((c.tenant = "t", is_new()));
  EXPECT_TRUE((c.rope = "x", is_new()));
  EXPECT_TRUE((c.calibration_digest = "ab", is_new()));
  EXPECT_TRUE((c.layers = 9, is_new()));
  EXPECT_TRUE((c.query_heads = 16, is_new()));
  EXPECT_TRUE((c.tensor_parallel_size = 4, is_new()));
  EXPECT_TRUE((c.tensor_parallel_rank = 3, is_new()));
  EXPECT_TRUE((c.layout.dtype = DType::kBFloat16, is_new()));
  EXPECT_TRUE((c.layout.kv_heads = 8, is_new()));
  EXPECT_TRUE((c.layout.head_dim = 64, is_new()));
  EXPECT_TRUE((c.layout.page_tokens = 32, is_new()));
  EXPECT_TRUE((c.codec = "raw", is_new()));
  EXPECT_TRUE((c.lag_pages = 7, is_new()));
  EXPECT_TRUE(digests.insert(DigestOf(c, 2)).second);
}

TEST_F(PageStoreTest, AppendRefusesAndChangesNothing) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  const CacheId other = test().Open(MakeConfig("raw", 1));
  const Text text = MakeText(100);
  const SequenceId a = Filled(cache, text, 20), b = Filled(cache, text, 5), c = Filled(other, text, 5);
  const KeysValues good = MakeKeysValues(config.layout, text, 20, 40, 0),
                   other_good = MakeKeysValues(config.layout, text, 5, 40, 0);
  const AppendEntry to_b{b, 5, 40, other_good.k.data(), other_good.v.data()};
  const uint64_t used = test().pool->used_bytes();
  const auto refused = [&](AppendEntry entry, absl::StatusCode code, absl::string_view field, int layer = 0) {
    const AppendEntry entries[] = {to_b, entry};
    const absl::Status status = store().Append(cache, layer, entries);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(DetailOf(status).field, field) << status;
    EXPECT_EQ(test().pool->used_bytes(), used);
    store().report().CheckInvariants();
    const auto lease = Attend(cache, b, 4, 1);
    EXPECT_TRUE(RawPrefixEquals(config.layout, lease->pages(0)[0].raw, MakeRawPage(config.layout, text, 0, 5, 0), 5));
  };
  const AppendEntry fine{a, 20, 40, good.k.data(), good.v.data()};
  AppendEntry bad = fine;
  bad.sequence = 999;
  refused(bad, absl::StatusCode::kNotFound, "");
  bad.sequence = c;
  refused(bad, absl::StatusCode::kInvalidArgument, "entries[1].sequence");
  bad = fine;
  bad.position = 19;
  refused(bad, absl::StatusCode::kFailedPrecondition, "entries[1].position");
  bad = fine;
  bad.tokens = 0;
  refused(bad, absl::StatusCode::kInvalidArgument, "entries[1].tokens");
  refused(to_b, absl::StatusCode::kInvalidArgument, "entries[1].sequence");
  refused(fine, absl::StatusCode::kInvalidArgument, "layer", 2);
  refused(fine, absl::StatusCode::kInvalidArgument, "layer", -1);
  for (uint16_t bits : {0x7c00, 0xfc00, 0x7e01}) {
    KeysValues poisoned = good;
    std::memcpy(poisoned.v.data() + ((33 * 4 + 2) * 32 + 31) * 2, &bits, 2);
    bad = fine;
    bad.v = poisoned.v.data();
    refused(bad, absl::StatusCode::kInvalidArgument, "entries[1].v[token 33][head 2][channel 31]");
  }
  const AppendEntry both[] = {to_b, fine};
  EXPECT_TRUE(store().Append(cache, 0, both).ok());
  EXPECT_EQ(store().Append(77, 0, both).code(), absl::StatusCode::kNotFound);
}

TEST_F(PageStoreTest, BFloat16IsCheckedByItsOwnExponent) {
  CacheConfig config = MakeConfig("raw", 1);
  config.layout.dtype = DType::kBFloat16;
  const CacheId cache = test().Open(config);
  const SequenceId sequence = Create(cache);
  std::vector<uint16_t> k(4 * 32, 0x7c00), v(4 * 32, 0x7f7f);
  AppendEntry entry{sequence, 0, 1, reinterpret_cast<uint8_t*>(k.data()), reinterpret_cast<uint8_t*>(v.data())};
  EXPECT_TRUE(store().Append(cache, 0, {&entry, 1}).ok());
  v[5] = 0x7f80;
  entry.position = 1;
  EXPECT_EQ(store().Append(cache, 0, {&entry, 1}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PageStoreTest, LagDecidesTheForm) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(100);
  const SequenceId sequence = Filled(cache, text, 4 * kPage);
  // The last query's page is 3: page 2 is in its lag, pages 0 and 1 are not; the first one's is 1.
  auto lease = Attend(cache, sequence, kPage, 3 * kPage);
  EXPECT_FALSE(lease->ready());
  bool called = false;
  lease->OnReady([&] { called = true; });
  test().executor.FinishAll();
  EXPECT_TRUE(called && lease->ready());
  auto pages = lease->pages(0);
  ASSERT_EQ(pages.size(), 4u);
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(pages[i].lag_applies);
    EXPECT_NE(pages[i].raw, nullptr);
    EXPECT_EQ(pages[i].encoded != nullptr, i < 2) << i;
  }
  lease = nullptr;
  // All raw until an append begins beyond the lag; then pages 0..2 have aged (the append begins in page 4).
  EXPECT_EQ(Gauge("kvmanager_page_bytes{codec=\"fake\",form=\"raw\",state=\"resident\",tier=\"host\"}"),
            2.0 * 4 * config.layout.raw_bytes());
  ASSERT_TRUE(test().AppendAll(cache, sequence, text, 4 * kPage, 1).ok());
  EXPECT_EQ(Gauge("kvmanager_page_bytes{codec=\"fake\",form=\"raw\",state=\"resident\",tier=\"host\"}"),
            2.0 * 1 * config.layout.raw_bytes());
  lease = Attend(cache, sequence, 4 * kPage, 1);
  ASSERT_TRUE(lease->ready());
  pages = lease->pages(0);
  ASSERT_EQ(pages.size(), 5u);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(pages[i].lag_applies, i >= 3);
    EXPECT_EQ(pages[i].raw != nullptr, i >= 3);
    EXPECT_EQ(pages[i].encoded != nullptr, i < 3);
  }
  lease = nullptr;
  // Still aged after a crop.
  ASSERT_TRUE(store().Crop(sequence, 3 * kPage).ok());
  lease = Attend(cache, sequence, 3 * kPage - 1, 1);
  EXPECT_FALSE(lease->pages(0)[2].lag_applies);
  EXPECT_EQ(lease->pages(0)[2].raw, nullptr);
}

TEST_F(PageStoreTest, DeclinedPagesStayRaw) {
  const CacheConfig config = MakeConfig("declining", 0);
  const CacheId cache = test().Open(config);
  test().executor.run_inline = true;
  const Text text = MakeText(40 * kPage);
  const SequenceId sequence = Filled(cache, text, 39 * kPage);
  ASSERT_TRUE(test().AppendAll(cache, sequence, text, 39 * kPage, 1).ok());
  const auto lease = Attend(cache, sequence, 39 * kPage, 1);
  int declined = 0;
  for (int i = 0; i < 39; ++i) {
    const auto raw = MakeRawPage(config.layout, text, i, kPage, 0);
    const AttentionPage& page = lease->pages(0)[i];
    EXPECT_FALSE(page.lag_applies);
    EXPECT_EQ(page.raw != nullptr, Declines(raw.data()));
    EXPECT_EQ(page.encoded == nullptr, Declines(raw.data()));
    declined += Declines(raw.data());
  }
  EXPECT_GT(declined, 0);
  EXPECT_LT(declined, 39);
}

TEST_F(PageStoreTest, IdentityNeverEncodes) {
  const CacheConfig config = MakeConfig("raw", 0);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(3 * kPage);
  const SequenceId sequence = Filled(cache, text, 3 * kPage);
  EXPECT_EQ(test().executor.jobs(), 0u);
  EXPECT_EQ(test().pool->used_bytes(), 2u * 3 * config.layout.raw_bytes());
  // Every page can be cropped into, aged or not.
  ASSERT_TRUE(store().Crop(sequence, 5).ok());
  const auto lease = Attend(cache, sequence, 4, 1);
  EXPECT_TRUE(RawPrefixEquals(config.layout, lease->pages(0)[0].raw, MakeRawPage(config.layout, text, 0, 5, 0), 5));
}

TEST_F(PageStoreTest, PrefixHitsShareBytesAndAreAged) {
  const CacheConfig config = MakeConfig("fake", 2);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(10 * kPage);
  const SequenceId a = Filled(cache, text, 8 * kPage);
  const auto names = Names(cache, text, 8);
  auto published = store().Publish(a, names);
  ASSERT_TRUE(published.ok());
  EXPECT_EQ(published->published, 8);
  // Found before its encoding has ended; attention waits.
  const auto b = store().Create(cache, names);
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(b->match.hit_blocks, 8);
  EXPECT_EQ(b->match.reason, MissReason::kNone);
  const uint64_t used = test().pool->used_bytes();
  auto lease = Attend(cache, b->sequence, 8 * kPage - 1, 1);
  EXPECT_FALSE(lease->ready());
  test().executor.FinishAll();
  ASSERT_TRUE(lease->ready());
  for (const AttentionPage& page : lease->pages(0)) {
    EXPECT_FALSE(page.lag_applies);
    EXPECT_EQ(page.raw, nullptr);
  }
  lease = nullptr;
  EXPECT_EQ(test().pool->used_bytes(), used);
  EXPECT_EQ(store().Describe(b->sequence)->tokens, 8u * kPage);
  EXPECT_EQ(store().Describe(b->sequence)->published_blocks, 8);
  store().Drop(a);
  EXPECT_EQ(test().pool->used_bytes(),
            2u * 8 * SlabAllocator::RoundedSlotBytes(store().caches().codec(cache)->info().encoded_bytes));
  EXPECT_EQ(Gauge("kvmanager_page_bytes{codec=\"fake\",form=\"encoded\",state=\"resident\",tier=\"host\"}"),
            static_cast<double>(test().pool->used_bytes()));
}

TEST_F(PageStoreTest, MissesHaveReasons) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const CacheId other = test().Open(MakeConfig("fake", 0, "b"));
  test().executor.run_inline = true;
  const Text text = MakeText(4 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage);
  const auto names = Names(cache, text, 4);
  ASSERT_TRUE(store().Publish(a, absl::MakeConstSpan(names).first(3)).ok());
  const auto match = [&](CacheId in, std::vector<BlockName> with) { return *store().caches().Match(in, with); };
  EXPECT_EQ(match(cache, names).hit_blocks, 3);
  EXPECT_EQ(match(cache, names).reason, MissReason::kNotFound);
  EXPECT_EQ(match(other, names).hit_blocks, 0);
  auto wrong = names;
  wrong[1].tokens.bytes[0] ^= 1;
  EXPECT_EQ(match(cache, wrong).hit_blocks, 1);
  EXPECT_EQ(match(cache, wrong).reason, MissReason::kTokenMismatch);
  // A block is found at its own place alone.
  EXPECT_EQ(match(cache, {names[1]}).hit_blocks, 0);
  EXPECT_EQ(store().caches().Match(cache, std::vector<BlockName>(CacheDirectory::kNamesMax + 1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store().caches().Match(99, names).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(PageStoreTest, ChangedBytesAreACountedMissAndNeverFoundAgain) {
  for (const std::string codec : {"fake", "raw"}) {
    const CacheId cache = test().Open(MakeConfig(codec, 0));
    test().executor.run_inline = true;
    const Text text = MakeText(3 * kPage);
    const SequenceId a = Filled(cache, text, 3 * kPage);
    const auto names = Names(cache, text, 3);
    ASSERT_TRUE(store().Publish(a, names).ok());
    ASSERT_EQ(store().Create(cache, names)->match.hit_blocks, 3);
    const SequenceId reader = store().Create(cache, names)->sequence;
    const auto lease = Attend(cache, reader, 3 * kPage - 1, 1, 1);
    const_cast<uint8_t*>(lease->pages(0)[1].encoded)[77] ^= 4;
    test().clock.AdvanceNs(BlockCheck::kVerifiedForNs + 2);  // or they pass for verified
    const double failures = test().store_metrics.checksum_failures.Value();
    EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 3) << "bytes are looked at by who reads them";
    const MatchResult match = store().Create(cache, names)->match;
    EXPECT_EQ(match.hit_blocks, 1);
    EXPECT_EQ(match.reason, MissReason::kChecksum);
    EXPECT_EQ(test().store_metrics.checksum_failures.Value(), failures + 1);
    EXPECT_EQ(store().caches().Match(cache, names)->reason, MissReason::kNotFound);
    // Its holder's publish does not bring it back; a good copy takes the name, and replaces it.
    EXPECT_EQ(store().Publish(a, names)->published, 0);
    const SequenceId good = Filled(cache, text, 3 * kPage);
    EXPECT_EQ(store().Publish(good, names)->published, 1);
    EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 3);
    EXPECT_EQ(store().Publish(reader, names)->shared, 1);
    store().report().CheckInvariants();
  }
}

TEST_F(PageStoreTest, PublishSharesWhatHasAgedAndDefersTheRest) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  test().executor.run_inline = true;
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage), b = Filled(cache, text, 4 * kPage);
  const auto names = Names(cache, text, 8);
  const auto four = absl::MakeConstSpan(names).first(4);
  EXPECT_EQ(store().Publish(a, four)->published, 4);
  EXPECT_EQ(store().Publish(b, four)->deferred, 4);
  // An append that begins in page 4 ages pages 0..2.
  ASSERT_TRUE(test().AppendAll(cache, b, text, 4 * kPage, 1).ok());
  const auto again = store().Publish(b, four);
  EXPECT_EQ(again->shared, 3);
  EXPECT_EQ(again->deferred, 1);
  EXPECT_EQ(store().Publish(b, four)->shared, 0);
  EXPECT_EQ(store().Publish(b, absl::MakeConstSpan(names).first(5)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  auto wrong = std::vector<BlockName>(four.begin(), four.end());
  wrong[3].tokens.bytes[5] ^= 1;
  EXPECT_EQ(store().Publish(b, wrong).status().code(), absl::StatusCode::kInvalidArgument);
  wrong[3] = names[7];
  EXPECT_EQ(store().Publish(a, wrong).status().code(), absl::StatusCode::kFailedPrecondition);
  wrong[3] = wrong[0];
  EXPECT_EQ(store().Publish(b, wrong).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PageStoreTest, ForkThenDiverge) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  Text left = MakeText(2 * kPage + 5);
  Text right = left;
  for (int i = 0; i < 2 * kPage; ++i) left.Add(1000 + i), right.Add(2000 + i);
  const SequenceId a = Filled(cache, left, 2 * kPage + 5);
  const uint64_t used = test().pool->used_bytes();
  const auto b = store().Fork(a);
  ASSERT_TRUE(b.ok());
  EXPECT_EQ(test().pool->used_bytes(), used + 2 * config.layout.raw_bytes());
  ASSERT_TRUE(test().AppendAll(cache, a, left, 2 * kPage + 5, 2 * kPage).ok());
  ASSERT_TRUE(test().AppendAll(cache, *b, right, 2 * kPage + 5, 2 * kPage).ok());
  test().executor.FinishAll();
  for (const auto& [sequence, text] : {std::pair(a, left), std::pair(*b, right)}) {
    for (int layer = 0; layer < 2; ++layer) {
      const auto lease = Attend(cache, sequence, 4 * kPage + 4, 1, layer);
      for (int i = 0; i < 5; ++i) {
        const int tokens = i == 4 ? 5 : kPage;
        const auto raw = MakeRawPage(config.layout, text, i, tokens, layer);
        const AttentionPage& page = lease->pages(0)[i];
        if (page.raw != nullptr) {
          EXPECT_TRUE(RawPrefixEquals(config.layout, page.raw, raw, tokens));
        }
        if (page.encoded != nullptr) {
          const auto encoded = MakeEncodedPage(*store().caches().codec(cache), raw, i, layer);
          EXPECT_EQ(std::memcmp(page.encoded, encoded.data(), encoded.size()), 0);
        }
      }
    }
  }
  EXPECT_EQ(store().Fork(12345).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(PageStoreTest, ForkNeedsEqualLayers) {
  const CacheId cache = test().Open(MakeConfig("fake", 1));
  const Text text = MakeText(10);
  const SequenceId a = Filled(cache, text, 5);
  ASSERT_TRUE(test().Append(cache, a, text, 5, 1, 0).ok());
  EXPECT_EQ(store().Fork(a).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store().exports().Whole(a).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(store().Crop(a, 5).ok());
  EXPECT_TRUE(store().Fork(a).ok());
}

TEST_F(PageStoreTest, CropNamesTheBoundaryAndSparesReaders) {
  const CacheConfig config = MakeConfig("fake", 1);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(6 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage);
  ASSERT_TRUE(test().AppendAll(cache, a, text, 4 * kPage, 10).ok());
  EXPECT_EQ(store().Crop(a, 4 * kPage + 11).code(), absl::StatusCode::kInvalidArgument);
  // Aged, though its raw form may still be there: encoding has not ended.
  const absl::Status inside = store().Crop(a, 2 * kPage + 3);
  EXPECT_EQ(inside.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(inside.message().find("32"), absl::string_view::npos) << inside;
  EXPECT_EQ(store().Describe(a)->tokens, 4u * kPage + 10);
  test().executor.FinishAll();
  const auto lease = Attend(cache, a, 4 * kPage + 9, 1);
  const uint8_t* open = lease->pages(0)[4].raw;
  const uint8_t* raw = lease->pages(0)[3].raw;
  // Into the open page, then over the cropped tokens with others: the reader sees what it saw.
  ASSERT_TRUE(store().Crop(a, 4 * kPage + 2).ok());
  Text other = MakeText(4 * kPage + 2);
  for (int i = 0; i < 30; ++i) other.Add(5000 + i);
  ASSERT_TRUE(test().AppendAll(cache, a, other, 4 * kPage + 2, 8).ok());
  // And into a raw full page.
  ASSERT_TRUE(store().Crop(a, 3 * kPage + 1).ok());
  other.Truncate(3 * kPage + 1);
  for (int i = 0; i < 30; ++i) other.Add(9000 + i);
  ASSERT_TRUE(test().AppendAll(cache, a, other, 3 * kPage + 1, 3).ok());
  EXPECT_TRUE(RawPrefixEquals(config.layout, open, MakeRawPage(config.layout, text, 4, 10, 0), 10));
  EXPECT_TRUE(RawPrefixEquals(config.layout, raw, MakeRawPage(config.layout, text, 3, kPage, 0), kPage));
  const auto now = Attend(cache, a, 3 * kPage + 3, 1);
  EXPECT_TRUE(RawPrefixEquals(config.layout, now->pages(0)[3].raw, MakeRawPage(config.layout, other, 3, 4, 0), 4));
  ASSERT_TRUE(store().Crop(a, 0).ok());
  EXPECT_EQ(store().Describe(a)->tokens, 0u);
}

// How tokens were cut into appends shows neither in what a crop refuses nor in what is read after it.
TEST_F(PageStoreTest, ChunksDoNotShowAfterACrop) {
  for (const int tokens : {6 * kPage, 6 * kPage + 1, 6 * kPage - 1}) {
    for (int to = tokens; to >= 0; --to) {
      pool_bytes_ = 4 << 20;
      test_ = nullptr;
      const CacheId cache = test().Open(MakeConfig("fake", 2));
      test().executor.run_inline = true;
      const Text text = MakeText(7 * kPage);
      const SequenceId chunked = Filled(cache, text, tokens), single = Create(cache);
      for (int at = 0; at < tokens; ++at) ASSERT_TRUE(test().AppendAll(cache, single, text, at, 1).ok());
      const absl::Status status = store().Crop(chunked, to);
      EXPECT_EQ(store().Crop(single, to), status) << to;
      EXPECT_EQ(status.ok(), to % kPage == 0 || to >= (tokens - 1) / kPage * kPage - 2 * kPage) << to << status;
      store().report().CheckInvariants();
      // A crop to the end takes nothing away and changes nothing.
      if (!status.ok() || to == tokens || to == 0) continue;
      for (const int at : {to - 1, std::min(to - 1, to / 2 / kPage * kPage + kPage - 1)}) {
        const auto a = Attend(cache, chunked, at, 1), b = Attend(cache, single, at, 1);
        ASSERT_EQ(a->pages(0).size(), b->pages(0).size());
        for (size_t i = 0; i < a->pages(0).size(); ++i) {
          EXPECT_EQ(a->pages(0)[i].lag_applies, b->pages(0)[i].lag_applies) << to << " page " << i;
          EXPECT_EQ(a->pages(0)[i].raw != nullptr, b->pages(0)[i].raw != nullptr) << to << " page " << i;
          EXPECT_EQ(a->pages(0)[i].encoded != nullptr, b->pages(0)[i].encoded != nullptr) << to << " page " << i;
        }
      }
    }
  }
}

TEST_F(PageStoreTest, ACropOfNothingChangesNothing) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  test().executor.run_inline = true;
  const SequenceId a = Filled(cache, MakeText(4 * kPage + 3), 4 * kPage + 3);
  ASSERT_TRUE(store().Crop(a, 4 * kPage + 3).ok());
  const auto lease = Attend(cache, a, kPage, 1);
  EXPECT_TRUE(lease->pages(0)[0].lag_applies);
}

TEST_F(PageStoreTest, DroppedPagesOfALeaseAreQuarantined) {
  const CacheConfig config = MakeConfig("fake", 0);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(3 * kPage);
  const SequenceId a = Filled(cache, text, 2 * kPage + 3);
  auto lease = Attend(cache, a, 2 * kPage + 2, 1);
  EXPECT_FALSE(lease->ready());
  store().Drop(a);
  store().report().CheckInvariants();
  EXPECT_GT(Gauge("kvmanager_pages{codec=\"fake\",state=\"quarantined\",tier=\"host\"}"), 0);
  // The cache cannot close under it, and the job's result still reaches it.
  EXPECT_EQ(*store().caches().Purge(cache), 0u);
  EXPECT_EQ(store().caches().List().size(), 1u);
  test().executor.FinishAll();
  ASSERT_TRUE(lease->ready());
  const auto encoded =
      MakeEncodedPage(*store().caches().codec(cache), MakeRawPage(config.layout, text, 1, kPage, 0), 1, 0);
  EXPECT_EQ(std::memcmp(lease->pages(0)[1].encoded, encoded.data(), encoded.size()), 0);
  EXPECT_GT(test().pool->used_bytes(), 0u);
  lease = nullptr;
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  EXPECT_EQ(*store().caches().Purge(cache), 0u);
  EXPECT_TRUE(store().caches().List().empty());
}

TEST_F(PageStoreTest, DropWhileEncodingFreesAtCompletion) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const SequenceId a = Filled(cache, MakeText(2 * kPage), 2 * kPage);
  store().Drop(a);
  EXPECT_GT(test().pool->used_bytes(), 0u);
  store().report().CheckInvariants();
  test().executor.FinishAll();
  EXPECT_EQ(test().pool->used_bytes(), 0u);
}

TEST_F(PageStoreTest, EvictsLeavesFirstThenRefusesNamingCaches) {
  pool_bytes_ = 2 << 20;  // 128 raw pages of 16 KiB
  CacheConfig config = MakeConfig("raw", 0);
  config.layout.kv_heads = config.query_heads = 16;
  ASSERT_EQ(config.layout.raw_bytes(), 32768u);  // 64 pages: 32 blocks
  const CacheId cache = test().Open(config);
  const Text text = MakeText(40 * kPage), other = MakeText(40 * kPage, 5);
  const SequenceId a = Filled(cache, text, 20 * kPage);
  const auto names = Names(cache, text, 20);
  ASSERT_TRUE(store().Publish(a, names).ok());
  store().Drop(a);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 20);
  const SequenceId b = Filled(cache, other, 20 * kPage);
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), 8);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 12);
  // What can never fit evicts nothing.
  const absl::Status refused = test().Append(cache, b, MakeText(100 * kPage, 5), 20 * kPage, 60 * kPage, 0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 12);
  EXPECT_NE(refused.message().find("host-pool-bytes"), absl::string_view::npos) << refused;
  EXPECT_NE(refused.message().find(absl::StrCat("2097152 in cache ", cache, " with 1 sequences")),
            absl::string_view::npos)
      << refused;
  // Pinned blocks stay.
  const auto reader = store().Create(cache, absl::MakeConstSpan(names).first(10));
  ASSERT_EQ(reader->match.hit_blocks, 10);
  ASSERT_TRUE(test().AppendAll(cache, b, other, 20 * kPage, 2 * kPage).ok());
  EXPECT_EQ(test().AppendAll(cache, b, other, 22 * kPage, kPage).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 10);
}

// Tenant a holds one page in each of the pool's 8 slabs; evicting its published blocks frees no slab.
TEST_F(PageStoreTest, ARefusedAppendEvictsNothing) {
  CacheConfig config = MakeConfig("raw", 0, "a", 1);
  config.layout.kv_heads = config.query_heads = 16;
  const CacheId a = test().Open(config);
  config.tenant = "b";
  const CacheId b = test().Open(config);
  const int pages_per_slab = static_cast<int>(test().pool->slab_bytes() / config.layout.raw_bytes());
  std::vector<SequenceId> pinned;
  int published = 0;
  for (uint32_t slab = 0; slab < 8; ++slab) {
    pinned.push_back(Filled(a, MakeText(kPage, 100 * slab), kPage));
    const Text text = MakeText((pages_per_slab - 1) * kPage, 100 * slab + 1);
    const SequenceId full = Filled(a, text, (pages_per_slab - 1) * kPage);
    published += store().Publish(full, Names(a, text, pages_per_slab - 1))->published;
    store().Drop(full);
  }
  ASSERT_EQ(published, 8 * (pages_per_slab - 1));
  ASSERT_EQ(test().pool->free_slabs(), 0u);
  const SequenceId other = Create(b);
  const absl::Status refused = test().AppendAll(b, other, MakeText(1), 0, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), 0);
  EXPECT_EQ(store().caches().Describe(a)->published_blocks, static_cast<uint64_t>(published));
  EXPECT_NE(refused.message().find("0 of them free"), absl::string_view::npos) << refused;
  EXPECT_NE(refused.message().find("1 slots of 32768"), absl::string_view::npos) << refused;
  // Tenant a itself finds room by evicting one block, and as many as it needs.
  ASSERT_TRUE(test().AppendAll(a, pinned[0], MakeText(2 * kPage), kPage, 1).ok());
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), 1);
  // Once one slab holds nothing but published blocks, tenant b gets it; it takes what is older with it, and no more.
  store().Drop(pinned[3]);
  ASSERT_TRUE(test().AppendAll(b, other, MakeText(1), 0, 1).ok());
  const double evicted = test().store_metrics.evicted_blocks.Value();
  EXPECT_GE(evicted, pages_per_slab - 1);
  EXPECT_LE(evicted, 4 * pages_per_slab);
  store().report().CheckInvariants();
  ASSERT_TRUE(test().AppendAll(b, other, MakeText(pages_per_slab * kPage), 1, pages_per_slab * kPage - 1).ok());
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), evicted);
  EXPECT_EQ(test().AppendAll(b, other, MakeText(pages_per_slab * kPage + 1), pages_per_slab * kPage, 1).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), evicted);
}

TEST_F(PageStoreTest, AFullTableClosesTheLeastRecentlyOpenedUnusedCache) {
  const auto open = [&](int number) {
    CacheConfig config = MakeConfig("raw", 0, number % 2 == 0 ? "a" : "b", 1);  // each has half of the places
    config.model = absl::StrCat("model ", number);
    return store().caches().Open(config);
  };
  const Text text = MakeText(kPage);
  const CacheId with_block = *open(0), with_sequence = *open(1), with_lease = *open(2), oldest = *open(3);
  const SequenceId named = Filled(with_block, text, kPage), kept = Create(with_sequence);
  ASSERT_TRUE(store().Publish(named, Names(with_block, text, 1)).ok());
  store().Drop(named);
  const SequenceId leased = Filled(with_lease, text, kPage);
  auto lease = Attend(with_lease, leased, 0, 1);
  store().Drop(leased);
  const int limit = static_cast<int>(CacheDirectory::kCachesMax);
  for (int i = 4; i < limit; ++i) ASSERT_TRUE(open(i).ok());
  EXPECT_EQ(*open(3), oldest);  // opened again: now the most recent
  ASSERT_TRUE(open(limit).ok());
  EXPECT_EQ(store().caches().List().size(), CacheDirectory::kCachesMax);
  uint64_t caches = 0, sequences = 0, blocks = 0, bytes = 0, same = 0;
  store().caches().ForEachUse([&](const CacheUse& use) {
    ++caches;
    sequences += use.sequences;
    blocks += use.published_blocks;
    bytes += use.raw_bytes + use.encoded_bytes;
  });
  for (const CacheInfo& cache : store().caches().List()) same += cache.raw_bytes + cache.encoded_bytes;
  EXPECT_EQ(caches, CacheDirectory::kCachesMax);
  EXPECT_EQ(sequences, 1u);
  EXPECT_EQ(blocks, 1u);
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(bytes, same);
  for (const CacheId cache : {with_block, with_sequence, with_lease, oldest}) {
    EXPECT_TRUE(store().caches().Describe(cache).ok());
  }
  EXPECT_EQ(store().caches().Describe(oldest + 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(store().caches().Describe(oldest + 2).ok());
  store().report().CheckInvariants();
  // What is in use stays, and is refused room only when all is in use.
  for (const CacheInfo& cache : store().caches().List()) {
    if (cache.sequences == 0 && cache.cache != with_block && cache.cache != with_lease) Create(cache.cache);
  }
  EXPECT_EQ(open(-2).status().code(), absl::StatusCode::kResourceExhausted);
  lease = nullptr;
  EXPECT_TRUE(open(-2).ok());
  EXPECT_FALSE(store().caches().Describe(with_lease).ok());
  store().Drop(kept);
}

TEST_F(PageStoreTest, DeferredPublishKeepsLeavesFirst) {
  pool_bytes_ = 2 << 20;
  CacheConfig config = MakeConfig("raw", 4);
  config.layout.kv_heads = config.query_heads = 16;  // 32 blocks
  const CacheId cache = test().Open(config);
  const Text text = MakeText(4 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage);
  const auto names = Names(cache, text, 4);
  ASSERT_TRUE(store().Publish(a, names).ok());
  store().Drop(a);
  const SequenceId b = Filled(cache, text, 4 * kPage);
  EXPECT_EQ(store().Publish(b, names)->deferred, 4);
  Filled(cache, MakeText(26 * kPage, 5), 26 * kPage);
  EXPECT_EQ(test().store_metrics.evicted_blocks.Value(), 2);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 2);
}

TEST_F(PageStoreTest, PagesUnderAttendLeasesAreBounded) {
  CacheConfig config = MakeConfig("raw", 0, "a", 1);
  config.layout.kv_heads = config.query_heads = 1;
  config.layout.head_dim = 16;
  const CacheId cache = test().Open(config);
  const SequenceId a = Create(cache);
  constexpr int kTokens = static_cast<int>(kLeasePagesMax / kStepEntriesMax + 1) * kPage;
  const std::vector<uint8_t> zeros(kTokens * 32);
  const AppendEntry append{a, 0, kTokens, zeros.data(), zeros.data()};
  ASSERT_TRUE(store().Append(cache, 0, {&append, 1}).ok());
  const std::vector<AttendEntry> entries(kStepEntriesMax, {a, kTokens - 1, 1});
  EXPECT_EQ(store().Attend(cache, 0, entries).status().code(), absl::StatusCode::kResourceExhausted);
  const auto lease = Attend(cache, a, kTokens - 1, 1);
  EXPECT_EQ(lease->pages(0).size(), size_t{kTokens / kPage});
}

TEST_F(PageStoreTest, PurgeDropsWhatNothingPinsAndClosesEmptyCaches) {
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const Text text = MakeText(4 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage);
  const auto names = Names(cache, text, 4);
  ASSERT_TRUE(store().Publish(a, names).ok());
  const SequenceId b = store().Create(cache, absl::MakeConstSpan(names).first(1))->sequence;
  store().Drop(a);
  EXPECT_EQ(*store().caches().Purge(cache), 3u);
  EXPECT_EQ(store().caches().Match(cache, names)->hit_blocks, 1);
  store().Drop(b);
  EXPECT_EQ(store().caches().PurgeAll(), 1u);
  EXPECT_TRUE(store().caches().List().empty());
  EXPECT_EQ(store().caches().Purge(cache).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store().caches().codec(cache), nullptr);
  EXPECT_EQ(store().caches().raw_attention(cache), nullptr);
  EXPECT_NE(test().Open(MakeConfig("raw", 0)), cache);
}

TEST_F(PageStoreTest, LeasesAndJobsMayEndAfterTheStore) {
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(2 * kPage + 1);
  const SequenceId a = Filled(cache, text, 2 * kPage + 1);
  auto lease = Attend(cache, a, 0, 1);
  auto waiting = Attend(cache, a, 2 * kPage, 1);
  auto hand_off = *store().exports().Whole(a);
  test().store = nullptr;
  test().executor.FinishAll();
  lease = nullptr;
  waiting = nullptr;
  hand_off = nullptr;
  test_ = nullptr;
}

}  // namespace
}  // namespace kvmanager
