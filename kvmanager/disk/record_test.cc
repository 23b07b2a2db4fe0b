#include "kvmanager/disk/record.h"

#include <random>

#include "gtest/gtest.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/index_record.h"

namespace kvmanager::testing {
namespace {

absl::Span<const uint8_t> BytesOf(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(RecordTest, AHeaderComesBack) {
  for (const size_t pages : {1, 2, 7, 8, 64, 80, 1000, 1024}) {
    const TestBlock block = MakeTestBlock(1, pages, pages, 100);
    const std::string header = EncodeRecordHeader(block.record);
    EXPECT_EQ(header.size(), RecordHeaderBytes(pages));
    EXPECT_EQ(header.size() % 64, 0u);
    const absl::StatusOr<DiskRecord> parsed = ParseRecordHeader(BytesOf(header));
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->cache, block.record.cache);
    EXPECT_EQ(parsed->name.key, block.record.name.key);
    EXPECT_EQ(parsed->name.tokens, block.record.name.tokens);
    EXPECT_EQ(parsed->index, block.record.index);
    EXPECT_EQ(parsed->tokens, block.record.tokens);
    ASSERT_EQ(parsed->pages.size(), pages);
    for (size_t i = 0; i < pages; ++i) {
      EXPECT_EQ(parsed->pages[i].bytes, block.record.pages[i].bytes);
      EXPECT_EQ(parsed->pages[i].raw, block.record.pages[i].raw);
      EXPECT_EQ(parsed->pages[i].checksum, block.record.pages[i].checksum);
    }
    EXPECT_EQ(EncodeRecordHeader(*parsed), header);
  }
}

TEST(RecordTest, PagesAreAligned) {
  const std::vector<uint32_t> bytes = {1, 64, 65, 4096, 100000};
  const RecordLayout layout = RecordLayout::Of(bytes);
  uint64_t end = RecordHeaderBytes(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(layout.offsets[i] % 64, 0u);
    EXPECT_GE(layout.offsets[i], end);
    EXPECT_LT(layout.offsets[i], end + 64);
    end = layout.offsets[i] + bytes[i];
  }
  EXPECT_GE(layout.bytes, end);
  EXPECT_EQ(layout.bytes % 4096, 0u);
}

TEST(RecordTest, WhatIsNoRecord) {
  EXPECT_FALSE(IsRecord({}));
  EXPECT_FALSE(IsRecord({1, 0}));
  EXPECT_FALSE(IsRecord(std::vector<uint32_t>(1025, 1)));
  EXPECT_FALSE(IsRecord({1u << 30, 1}));
  EXPECT_TRUE(IsRecord({(1u << 30) - 4096}));
}

TEST(RecordTest, EveryFlippedBitIsFound) {
  const std::string header = EncodeRecordHeader(MakeTestBlock(1, 1, 5).record);
  const size_t meaning = 128 + 16 * 5 + 8;
  for (size_t bit = 0; bit < header.size() * 8; ++bit) {
    std::string bad = header;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ 1 << (bit % 8));
    EXPECT_EQ(ParseRecordHeader(BytesOf(bad)).ok(), bit / 8 >= meaning) << bit;
  }
  for (size_t size = 0; size < header.size(); ++size) {
    EXPECT_FALSE(ParseRecordHeader(BytesOf(header.substr(0, size))).ok()) << size;
  }
}

// Hostile fields under a right checksum.
TEST(RecordTest, HostileFieldsAreRefused) {
  const auto with = [](size_t at, uint32_t value) {
    std::string header = EncodeRecordHeader(MakeTestBlock(1, 1, 5).record);
    std::memcpy(header.data() + at, &value, sizeof value);
    const uint64_t checksum = Checksum(header.data(), 128 + 16 * 5);
    std::memcpy(header.data() + 128 + 16 * 5, &checksum, sizeof checksum);
    return ParseRecordHeader(BytesOf(header)).status();
  };
  EXPECT_TRUE(with(116, 17).ok());              // tokens: anything
  EXPECT_TRUE(absl::IsDataLoss(with(8, 2)));    // version
  EXPECT_TRUE(absl::IsDataLoss(with(12, 64)));  // header bytes
  EXPECT_TRUE(absl::IsDataLoss(with(120, 0)));  // pages
  EXPECT_TRUE(absl::IsDataLoss(with(120, 1025)));
  EXPECT_TRUE(absl::IsDataLoss(with(120, 0xffffffff)));
  EXPECT_TRUE(absl::IsDataLoss(with(124, 1)));
  EXPECT_TRUE(absl::IsDataLoss(with(128, 0)));  // bytes of a page
  EXPECT_TRUE(absl::IsDataLoss(with(128, 0xffffffff)));
  EXPECT_TRUE(absl::IsDataLoss(with(132, 2)));  // its form
}

TEST(RecordTest, IndexValues) {
  IndexRecord record;
  record.cache = TestDigest(1);
  record.key = TestDigest(2);
  record.tokens_digest = TestDigest(3);
  record.place = {7, 8192, 4096};
  record.index = 5;
  record.tokens = 64;
  record.header_checksum = 0x123456789abcdef0;
  record.layers = 11;
  record.raw = std::string("\x81\x07", 2);
  record.payer = "uid:1000";
  const std::string key = IndexKey(record.cache, record.key), value = EncodeIndexValue(record);
  IndexRecord back;
  ASSERT_TRUE(ParseIndexRecord(key, value, &back));
  EXPECT_EQ(EncodeIndexValue(back), value);
  EXPECT_EQ(IndexKey(back.cache, back.key), key);
  EXPECT_EQ(back.payer, "uid:1000");
  for (size_t size = 0; size < value.size(); ++size) {
    EXPECT_FALSE(ParseIndexRecord(key, value.substr(0, size), &back)) << size;
  }
  EXPECT_FALSE(ParseIndexRecord(key, value + "x", &back));
  EXPECT_FALSE(ParseIndexRecord(key + "x", value, &back));
  EXPECT_FALSE(ParseIndexRecord("meta", value, &back));
  std::mt19937_64 random(1);
  for (int i = 0; i < 100000; ++i) {
    std::string bad = value;
    for (int n = 1 + static_cast<int>(random() % 3); n > 0; --n) {
      bad[random() % bad.size()] = static_cast<char>(random());
    }
    if (!ParseIndexRecord(key, bad, &back)) continue;
    EXPECT_EQ(EncodeIndexValue(back), bad);
    EXPECT_EQ(back.place.bytes % 4096 + back.place.offset % 4096, 0u);
  }
}

}  // namespace
}  // namespace kvmanager::testing
