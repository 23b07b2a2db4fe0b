// Whole blocks that are read and written in stored form: their bytes, names, forms, limits, and what leases hold.
#include "kvmanager/store/block_transfers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::Text;

using Bytes = std::vector<uint8_t>;

class BlockTransfersTest : public testing::PageStoreTest {
 protected:
  static constexpr uint64_t kAlign = 64;

  CacheId Open(const std::string& codec, int lag_pages = 0) { return Open(MakeConfig(codec, lag_pages)); }
  CacheId Open(const CacheConfig& config) {
    config_ = config;
    test().executor.run_inline = true;
    cache_ = test().Open(config_);
    codec_ = store().caches().codec(cache_);
    return cache_;
  }
  // What an engine would store of page `index` of `text`, and whether that is raw.
  Bytes PageOf(const Text& text, uint32_t index, int layer, bool* raw) const {
    const Bytes page = MakeRawPage(config_.layout, text, index, kPage, layer);
    *raw = codec_->info().keeps_raw(layer, uint64_t{index} * kPage);
    if (*raw || codec_->info().identity) return page;
    Bytes encoded = MakeEncodedPage(*codec_, page, index, layer);
    *raw = encoded.empty();
    return *raw ? page : encoded;
  }
  Bytes Forms(const Text& text, uint32_t first, size_t blocks) const {
    Bytes forms;
    for (size_t i = 0; i < blocks * config_.layers; ++i) {
      bool raw;
      PageOf(text, first + i / config_.layers, i % config_.layers, &raw);
      forms.push_back(raw);
    }
    return forms;
  }
  std::vector<BlockName> NamesFrom(const Text& text, uint32_t first, size_t blocks) {
    auto names = Names(cache_, text, first + blocks);
    return {names.begin() + first, names.end()};
  }
  absl::StatusOr<std::unique_ptr<BlockWrites>> Begin(const Text& text, uint32_t first, size_t blocks) {
    return store().caches().WriteBlocks(cache_, first, NamesFrom(text, first, blocks), Forms(text, first, blocks));
  }
  // Puts the bytes in place and checks them.
  absl::StatusOr<std::vector<uint64_t>> Fill(BlockWrites& writes, const Text& text, uint32_t first) {
    std::vector<uint64_t> checksums(writes.pages().size());
    for (size_t i = 0; i < writes.pages().size(); ++i) {
      const StoredPage& page = writes.pages()[i];
      bool raw;
      const Bytes bytes = PageOf(text, first + i / config_.layers, page.layer, &raw);
      EXPECT_EQ(page.layer, i % config_.layers);
      EXPECT_EQ(page.raw, raw);
      EXPECT_EQ(page.bytes, bytes.size());
      if (page.data == nullptr) continue;
      KV_ASSIGN_OR_RETURN(checksums[i], writes.Put(i, bytes.data()));
      EXPECT_EQ(std::memcmp(page.data, bytes.data(), bytes.size()), 0);
    }
    return checksums;
  }
  size_t Write(const Text& text, uint32_t first, size_t blocks) {
    auto writes = Begin(text, first, blocks);
    EXPECT_TRUE(writes.ok()) << writes.status();
    const auto checksums = Fill(**writes, text, first);
    EXPECT_TRUE(checksums.ok()) << checksums.status();
    return *(*writes)->Commit(*checksums);
  }
  std::unique_ptr<BlockReads> Read(const Text& text, uint32_t first, size_t blocks, uint64_t bytes_max = UINT64_MAX) {
    auto reads = store().caches().ReadBlocks(cache_, first, NamesFrom(text, first, blocks), {bytes_max, kAlign});
    EXPECT_TRUE(reads.ok()) << reads.status();
    return *std::move(reads);
  }
  void ExpectPages(const BlockReads& reads, const Text& text, uint32_t first) {
    ASSERT_EQ(reads.pages().size(), reads.blocks() * config_.layers);
    for (size_t i = 0; i < reads.pages().size(); ++i) {
      const StoredPage& page = reads.pages()[i];
      bool raw;
      const Bytes want = PageOf(text, first + i / config_.layers, i % config_.layers, &raw);
      EXPECT_EQ(page.raw, raw) << i;
      EXPECT_TRUE(Bytes(page.data, page.data + page.bytes) == want) << i;
      EXPECT_TRUE(reads.Verify(i)) << i;
    }
  }

  CacheConfig config_;
  CacheId cache_ = 0;
  std::shared_ptr<const Codec> codec_;
};

TEST_F(BlockTransfersTest, WhatIsWrittenIsFoundReadAndAttendedTo) {
  for (const std::string codec : {"fake", "declining", "uneven", "sinks", "raw"}) {
    SCOPED_TRACE(codec);
    Open(codec);
    const Text text = MakeText(6 * kPage);
    EXPECT_EQ(Write(text, 0, 4), 4u);
    EXPECT_EQ(Write(text, 4, 2), 2u);
    EXPECT_EQ(store().caches().Match(cache_, Names(cache_, text, 6))->hit_blocks, 6);
    const auto reads = Read(text, 1, 5);
    EXPECT_EQ(reads->blocks(), 5u);
    EXPECT_EQ(reads->reason(), MissReason::kNone);
    ExpectPages(*reads, text, 1);
    // The same bytes as of a sequence that was appended to.
    const auto created = store().Create(cache_, Names(cache_, text, 6));
    ASSERT_TRUE(created.ok());
    EXPECT_EQ(created->match.hit_blocks, 6);
    for (int layer = 0; layer < config_.layers; ++layer) {
      const auto lease = Attend(cache_, created->sequence, 6 * kPage - 1, 1, layer);
      for (uint32_t i = 0; i < 6; ++i) {
        bool raw;
        const Bytes want = PageOf(text, i, layer, &raw);
        const AttentionPage& page = lease->pages(0)[i];
        const uint8_t* const got = raw ? page.raw : page.encoded;
        ASSERT_NE(got, nullptr);
        EXPECT_TRUE(std::equal(want.begin(), want.end(), got)) << i;
      }
    }
    store().Drop(created->sequence);
    EXPECT_GT(*store().caches().Purge(cache_), 0u);
  }
}

TEST_F(BlockTransfersTest, PagesThatAreAppendedReadTheSame) {
  Open("declining", 1);
  const Text text = MakeText(5 * kPage);
  const SequenceId sequence = Filled(cache_, text, 5 * kPage);
  ASSERT_TRUE(store().Publish(sequence, Names(cache_, text, 5)).ok());
  ExpectPages(*Read(text, 0, 5), text, 0);  // while the sequence still reads some of them raw
  store().Drop(sequence);
  ExpectPages(*Read(text, 0, 5), text, 0);
}

TEST_F(BlockTransfersTest, AReadEndsWhereABlockIsMissingIncompleteOrTooLarge) {
  Open("fake");
  const Text text = MakeText(6 * kPage);
  EXPECT_EQ(Write(text, 0, 3), 3u);
  EXPECT_EQ(Read(text, 0, 6)->blocks(), 3u);
  EXPECT_EQ(Read(text, 0, 6)->reason(), MissReason::kNotFound);
  EXPECT_EQ(Read(text, 3, 3)->blocks(), 0u);
  const uint64_t page = (codec_->info().encoded_bytes + kAlign - 1) / kAlign * kAlign;
  const uint64_t block = page * config_.layers;
  EXPECT_EQ(Read(text, 0, 3, 2 * block)->blocks(), 2u);
  EXPECT_EQ(Read(text, 0, 3, 2 * block)->reason(), MissReason::kNone);
  EXPECT_EQ(Read(text, 0, 3, 3 * block - 1)->blocks(), 2u);
  EXPECT_EQ(Read(text, 0, 3, block - 1)->blocks(), 0u);
  // A page that waits for its encoding.
  test().executor.run_inline = false;
  const Text other = MakeText(2 * kPage, 9);
  const SequenceId sequence = Filled(cache_, other, 2 * kPage);
  ASSERT_TRUE(store().Publish(sequence, Names(cache_, other, 2)).ok());
  EXPECT_EQ(Read(other, 0, 2)->blocks(), 0u);
  EXPECT_EQ(Read(other, 0, 2)->reason(), MissReason::kIncomplete);
  test().executor.FinishAll();
  EXPECT_EQ(Read(other, 0, 2)->blocks(), 2u);
}

TEST_F(BlockTransfersTest, WhatIsThereIsNotWrittenAgain) {
  Open("fake");
  const Text text = MakeText(4 * kPage);
  EXPECT_EQ(Write(text, 1, 2), 2u);
  const uint64_t used = test().pool->slot_bytes_used();
  auto writes = Begin(text, 0, 4);
  ASSERT_TRUE(writes.ok());
  EXPECT_EQ((*writes)->present(), 2u);
  EXPECT_EQ(test().pool->slot_bytes_used(), 2 * used);
  for (size_t i = 0; i < (*writes)->pages().size(); ++i) {
    const size_t block = i / config_.layers;
    EXPECT_EQ((*writes)->pages()[i].data == nullptr, block == 1 || block == 2);
  }
  const auto checksums = Fill(**writes, text, 0);
  EXPECT_EQ(*(*writes)->Commit(*checksums), 2u);
  ExpectPages(*Read(text, 0, 4), text, 0);
}

TEST_F(BlockTransfersTest, TheFirstOfTwoWhoWriteABlockNamesIt) {
  Open("fake");
  const Text text = MakeText(2 * kPage);
  auto first = Begin(text, 0, 2), second = Begin(text, 0, 2);
  ASSERT_TRUE(first.ok() && second.ok());
  const auto a = Fill(**first, text, 0), b = Fill(**second, text, 0);
  EXPECT_EQ(*(*second)->Commit(*b), 2u);
  EXPECT_EQ(*(*first)->Commit(*a), 0u);
  first->reset();
  second->reset();
  EXPECT_EQ(*store().caches().Purge(cache_), 2u);
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
}

TEST_F(BlockTransfersTest, AWriteThatIsGivenUpLeavesNothing) {
  Open("sinks");
  const Text text = MakeText(4 * kPage);
  auto writes = Begin(text, 0, 4);
  ASSERT_TRUE(writes.ok());
  EXPECT_GT(test().pool->slot_bytes_used(), 0u);
  store().report().CheckInvariants();
  EXPECT_EQ(store().caches().Match(cache_, Names(cache_, text, 4))->hit_blocks, 0);
  writes->reset();
  EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
}

TEST_F(BlockTransfersTest, LeasesKeepBlocksFromEvictionAndPurges) {
  pool_bytes_ = 4 << 20;
  Open("raw");
  const Text text = MakeText(3 * kPage);
  EXPECT_EQ(Write(text, 0, 3), 3u);
  auto reads = Read(text, 0, 3);
  EXPECT_EQ(*store().caches().Purge(cache_), 0u);
  // Others are written until the pool is full, and evict each other.
  uint32_t salt = 1;
  for (; salt < 3000 && Begin(MakeText(kPage, salt * 100003), 0, 1).ok(); ++salt) {
    Write(MakeText(kPage, salt * 100003), 0, 1);
  }
  EXPECT_GT(test().store_metrics.evicted_blocks.Value(), 0);
  ExpectPages(*reads, text, 0);
  reads.reset();
  store().report().CheckInvariants();
}

TEST_F(BlockTransfersTest, NoRoomIsAnErrorAndChangesNothing) {
  pool_bytes_ = 2 << 20;
  Open("raw");
  const Text text = MakeText(200 * kPage);
  const size_t blocks = (pool_bytes_ / config_.layout.raw_bytes() / config_.layers) + 1;
  ASSERT_LT(blocks, 200u);
  EXPECT_EQ(Write(text, 0, 2), 2u);
  const auto refused = Begin(text, 2, blocks);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(DetailOf(refused.status()).field, "host-pool-bytes");
  ExpectPages(*Read(text, 0, 2), text, 0);
}

TEST_F(BlockTransfersTest, ChangedBytesAreFoundByWhoReadsThem) {
  Open("fake");
  const Text text = MakeText(4 * kPage);
  EXPECT_EQ(Write(text, 0, 4), 4u);
  auto reads = Read(text, 0, 4);
  const size_t wrong = 2 * config_.layers + 1;
  reads->pages()[wrong].data[7] ^= 1;
  for (size_t i = 0; i < reads->pages().size(); ++i) EXPECT_EQ(reads->Verify(i), i != wrong) << i;
  reads->NoteVerified(2, /*corrupt=*/true);
  EXPECT_EQ(test().store_metrics.checksum_failures.Value(), 1);
  reads.reset();
  EXPECT_EQ(store().caches().Match(cache_, Names(cache_, text, 4))->hit_blocks, 2);
  // Verified blocks are not read again within a minute.
  reads = Read(text, 0, 2);
  reads->pages()[0].data[7] ^= 1;
  EXPECT_TRUE(reads->Verify(0));
  reads.reset();
  test().clock.AdvanceNs(BlockCheck::kVerifiedForNs + 2);
  EXPECT_FALSE(Read(text, 0, 2)->Verify(0));
}

TEST_F(BlockTransfersTest, BytesThatAreNoPageAreRefused) {
  Open("raw");
  const Text text = MakeText(2 * kPage);
  auto writes = Begin(text, 0, 2);
  ASSERT_TRUE(writes.ok());
  ASSERT_TRUE(Fill(**writes, text, 0).ok());
  const StoredPage& page = (*writes)->pages()[config_.layers];
  Bytes wrong(page.data, page.data + page.bytes);
  wrong[0] = 0x00;
  wrong[1] = 0x7c;  // infinity
  const absl::Status status = (*writes)->Put(config_.layers, wrong.data()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(status).field, "pages[block 1][layer 0].k[head 0][token 0][channel 0]");
}

// A device copies them there, and says what their checksums are: a page is compared when it is used first.
TEST_F(BlockTransfersTest, WhatADeviceHasPutInPlaceIsCheckedThere) {
  Open("sinks");
  const Text text = MakeText(4 * kPage);
  for (const bool wrong : {false, true}) {
    auto writes = Begin(text, 0, 4);
    ASSERT_TRUE(writes.ok()) << writes.status();
    std::vector<uint64_t> checksums;
    for (size_t i = 0; i < (*writes)->pages().size(); ++i) {
      const StoredPage& page = (*writes)->pages()[i];
      bool raw;
      const Bytes bytes = PageOf(text, i / config_.layers, page.layer, &raw);
      std::memcpy(page.data, bytes.data(), bytes.size());
      const uint64_t right = Checksum(bytes.data(), bytes.size());
      const uint64_t said = wrong && i / config_.layers == 2 ? right + 1 : i % 2 == 0 ? right : 0;
      const auto checksum = (*writes)->CheckPut(i, said);
      ASSERT_TRUE(checksum.ok()) << checksum.status();
      EXPECT_EQ(*checksum, raw || said == 0 ? right : said);  // of raw pages, and what is not known, it is made
      checksums.push_back(*checksum);
    }
    EXPECT_EQ(*(*writes)->Commit(checksums), 4);
    writes = absl::CancelledError();
    const auto created = store().Create(cache_, Names(cache_, text, 4));
    ASSERT_TRUE(created.ok()) << created.status();
    EXPECT_EQ(created->match.hit_blocks, wrong ? 2 : 4);
    store().Drop(created->sequence);
    EXPECT_EQ(store().caches().Match(cache_, Names(cache_, text, 4))->hit_blocks, wrong ? 2 : 4);
    store().caches().PurgeAll();
    Open("sinks");
  }
}

TEST_F(BlockTransfersTest, PagesOfAMiBAreWrittenAndCheckedAsSmallOnes) {
  CacheConfig config = MakeConfig("raw", 0);
  config.layout.kv_heads = config.query_heads = 64;
  config.layout.head_dim = 256;
  Open(config);
  EXPECT_EQ(config.layout.raw_bytes(), 1u << 20);
  const Text text = MakeText(2 * kPage);
  auto writes = Begin(text, 0, 2);
  ASSERT_TRUE(writes.ok());
  const auto checksums = Fill(**writes, text, 0);
  ASSERT_TRUE(checksums.ok());
  const StoredPage& page = (*writes)->pages()[config_.layers];
  Bytes wrong(page.data, page.data + page.bytes);
  wrong[1] = 0x7c;  // infinity, or no number
  EXPECT_EQ((*writes)->Put(config_.layers, wrong.data()).status().code(), absl::StatusCode::kInvalidArgument);
  bool raw;
  EXPECT_EQ(*(*writes)->Put(config_.layers, PageOf(text, 1, 0, &raw).data()), (*checksums)[config_.layers]);
  EXPECT_EQ(*(*writes)->Commit(*checksums), 2u);
  const auto reads = Read(text, 0, 2);
  ASSERT_EQ(reads->blocks(), 2u);
  for (size_t i = 0; i < reads->pages().size(); ++i) EXPECT_TRUE(reads->Compare(i)) << i;
}

TEST_F(BlockTransfersTest, ErrorsNameTheFieldAndTheBound) {
  Open("sinks");
  const Text text = MakeText(4 * kPage);
  const auto names = Names(cache_, text, 4);
  const auto field = [&](uint32_t first, const std::vector<BlockName>& of, const Bytes& raw, CacheId cache) {
    const auto refused = store().caches().WriteBlocks(cache, first, of, raw);
    EXPECT_FALSE(refused.ok());
    return DetailOf(refused.status()).field;
  };
  const Bytes forms = Forms(text, 0, 4);
  EXPECT_EQ(field(0, {}, {}, cache_), "names");
  EXPECT_EQ(field(0, std::vector<BlockName>(kTransferPagesMax / 2 + 1), {}, cache_), "names");
  EXPECT_EQ(field(kSequenceBlocksMax - 3, names, forms, cache_), "firstBlock");
  EXPECT_EQ(field(0, names, Bytes(forms.size() - 1), cache_), "raw");
  Bytes wrong = forms;
  wrong[0] = 0;  // a sink
  EXPECT_EQ(field(0, names, wrong, cache_), "raw[block 0][layer 0]");
  wrong = forms;
  wrong.back() = 2;
  EXPECT_EQ(field(0, names, wrong, cache_), "raw[block 3][layer 1]");
  auto twice = names;
  twice[3] = twice[0];
  EXPECT_EQ(field(0, twice, forms, cache_), "names[3]");
  EXPECT_EQ(field(0, names, forms, 99), "cache");
  EXPECT_EQ(Write(text, 0, 4), 4u);
  twice = names;
  twice[1].tokens.bytes[0] ^= 1;
  EXPECT_EQ(field(0, twice, forms, cache_), "names[1].tokens");
  EXPECT_EQ(field(2, {names[1], names[2]}, Forms(text, 2, 2), cache_), "names[0]");
  EXPECT_EQ(store().caches().ReadBlocks(cache_, 0, {}, {1, kAlign}).status().code(),
            absl::StatusCode::kInvalidArgument);
  Open("raw");
  EXPECT_EQ(field(0, Names(cache_, text, 1), {1, 0}, cache_), "raw[block 0][layer 0]");
}

TEST_F(BlockTransfersTest, OfAGpuTheyAreRefused) {
  device_bytes_ = 16 << 20;
  CacheConfig config = MakeConfig("fake", 0);
  config.device = testing::TestDevice::kOrdinal;
  const CacheId cache = test().Open(config);
  const Text text = MakeText(kPage);
  EXPECT_TRUE(IsWrongMemory(store().caches().ReadBlocks(cache, 0, Names(cache, text, 1), {1 << 20, kAlign}).status()));
  EXPECT_TRUE(IsWrongMemory(store().caches().WriteBlocks(cache, 0, Names(cache, text, 1), Bytes(2)).status()));
}

// Random writes, reads, appends and purges of a few texts, against what each block must be.
TEST_F(BlockTransfersTest, RandomOperationsKeepBytesAndBooks) {
  pool_bytes_ = 4 << 20;
  for (const std::string codec : {"declining", "sinks", "raw"}) {
    SCOPED_TRACE(codec);
    Open(codec);
    std::mt19937_64 random(17);
    std::vector<Text> texts;
    for (uint32_t i = 0; i < 4; ++i) texts.push_back(MakeText(24 * kPage, i * 1000));
    struct Reading {
      std::unique_ptr<BlockReads> reads;
      size_t text;
      uint32_t first;
    };
    std::vector<Reading> readings;
    std::vector<std::unique_ptr<BlockWrites>> given_up;
    std::vector<SequenceId> sequences;
    for (int step = 0; step < 600; ++step) {
      const size_t which = random() % texts.size();
      const Text& text = texts[which];
      const uint32_t first = random() % 20;
      const size_t blocks = 1 + random() % 4;
      switch (random() % 7) {
        case 0:
        case 1: {
          auto writes = Begin(text, first, blocks);
          if (!writes.ok()) {
            EXPECT_EQ(writes.status().code(), absl::StatusCode::kResourceExhausted) << writes.status();
            break;
          }
          const auto checksums = Fill(**writes, text, first);
          ASSERT_TRUE(checksums.ok());
          if (random() % 4 == 0) {
            given_up.push_back(*std::move(writes));
          } else {
            EXPECT_EQ(*(*writes)->Commit(*checksums) + (*writes)->present() <= blocks, true);
          }
          break;
        }
        case 2:
        case 3: {
          Reading reading{Read(text, first, blocks, random() % 3 == 0 ? random() % 100000 : UINT64_MAX), which, first};
          ExpectPages(*reading.reads, text, first);
          reading.reads->NoteVerified(reading.reads->blocks(), false);
          readings.push_back(std::move(reading));
          break;
        }
        case 4: {
          const auto created = store().Create(cache_, Names(cache_, text, 20));
          ASSERT_TRUE(created.ok());
          const uint64_t at = uint64_t(created->match.hit_blocks) * kPage;
          if (at < 20 * kPage &&
              test().AppendAll(cache_, created->sequence, text, at, static_cast<int>(20 * kPage - at)).ok()) {
            EXPECT_TRUE(store().Publish(created->sequence, Names(cache_, text, 20)).ok());
          }
          sequences.push_back(created->sequence);
          break;
        }
        case 5:
          if (random() % 20 == 0) {
            EXPECT_TRUE(store().caches().Purge(cache_).ok());
          }
          break;
        default:
          if (!readings.empty()) {
            std::swap(readings[random() % readings.size()], readings.back());
            ExpectPages(*readings.back().reads, texts[readings.back().text], readings.back().first);
            readings.pop_back();
          }
          if (!given_up.empty()) given_up.erase(given_up.begin());
          if (!sequences.empty()) {
            store().Drop(sequences.front());
            sequences.erase(sequences.begin());
          }
      }
      if (step % 20 == 0) store().report().CheckInvariants();
      if (store().caches().codec(cache_) == nullptr) cache_ = test().Open(config_);
    }
    readings.clear();
    given_up.clear();
    for (const SequenceId sequence : sequences) store().Drop(sequence);
    store().report().CheckInvariants();
    EXPECT_TRUE(store().caches().Purge(cache_).ok());
    EXPECT_EQ(test().pool->slot_bytes_used(), 0u);
  }
}

}  // namespace
}  // namespace kvmanager
