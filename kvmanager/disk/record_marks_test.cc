#include "kvmanager/disk/record_marks.h"

#include <fstream>

#include "gtest/gtest.h"
#include "kvmanager/disk/disk_testing.h"

namespace kvmanager::testing {
namespace {

TEST(RecordMarksTest, APurgeCoversWhatBeganBefore) {
  RecordMarks marks = RecordMarks::New();
  const CacheDigest cache = TestDigest(1), other = TestDigest(2);
  EXPECT_TRUE(marks.empty());
  EXPECT_EQ(marks.segment_of_most(), 0u);
  marks.NotePurge(cache, {3, 8192});
  for (const RecordMarks& each : {marks, *RecordMarks::Parse(marks.Encode())}) {
    EXPECT_TRUE(each.IsPurged(cache, {1, 1 << 30}));
    EXPECT_TRUE(each.IsPurged(cache, {3, 4096}));
    EXPECT_FALSE(each.IsPurged(cache, {3, 8192}));
    EXPECT_FALSE(each.IsPurged(cache, {4, 0}));
    EXPECT_FALSE(each.IsPurged(other, {1, 0}));
    EXPECT_EQ(each.segment_of_most(), 3u);
    EXPECT_FALSE(each.empty());
  }
  marks.NotePurge(cache, {2, 0});  // an older one takes nothing back
  EXPECT_TRUE(marks.IsPurged(cache, {3, 4096}));
  marks.NotePurgeOfAll({5, 4096});
  const RecordMarks both = *RecordMarks::Parse(marks.Encode());
  EXPECT_TRUE(both.IsPurged(other, {5, 0}));
  EXPECT_FALSE(both.IsPurged(other, {5, 4096}));
}

TEST(RecordMarksTest, WhatWasNotedLaterIsNotDropped) {
  RecordMarks marks = RecordMarks::New();
  marks.NotePurge(TestDigest(1), {3, 0});
  marks.NotePurge(TestDigest(2), {3, 0});
  const RecordMarks earlier = marks;
  marks.NotePurge(TestDigest(1), {4, 0});
  marks.NotePurgeOfAll({2, 0});
  marks.Drop(earlier);
  EXPECT_TRUE(marks.IsPurged(TestDigest(1), {3, 4096}));
  EXPECT_FALSE(marks.IsPurged(TestDigest(2), {2, 0}));
  EXPECT_TRUE(marks.IsPurged(TestDigest(2), {1, 0}));
  marks.Drop(RecordMarks(marks));
  EXPECT_TRUE(marks.empty());
}

// What is left of them says too much rather than too little, and the index that is there loses nothing by it.
TEST(RecordMarksTest, TooManyBecomeOne) {
  RecordMarks marks = RecordMarks::New();
  for (uint32_t i = 0; i <= RecordMarks::kCachesMax; ++i) marks.NotePurge(TestDigest(i), {i + 1, 0});
  const RecordMarks read = *RecordMarks::Parse(marks.Encode());
  for (const uint32_t i : {0u, 100u, uint32_t{RecordMarks::kCachesMax}}) {
    EXPECT_TRUE(read.MayBePurged(TestDigest(i), {i, 0}));
  }
  EXPECT_TRUE(read.MayBePurged(TestDigest(1000000), {1, 0}));
  EXPECT_FALSE(read.IsPurged(TestDigest(1000000), {1, 0}));
  EXPECT_FALSE(read.MayBePurged(TestDigest(1), {uint32_t{RecordMarks::kCachesMax} + 1, 0}));
  EXPECT_LE(marks.Encode().size(), RecordMarks::kBytesMax);
}

TEST(RecordMarksTest, EachFlippedByteAndEachCutIsNoticed) {
  RecordMarks marks = RecordMarks::New();
  for (int i = 0; i < 3; ++i) marks.NotePurge(TestDigest(i), {7, 4096});
  const std::string bytes = marks.Encode();
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string other = bytes;
    other[i] = static_cast<char>(other[i] ^ 1 << (i % 8));
    EXPECT_TRUE(absl::IsDataLoss(RecordMarks::Parse(other).status())) << i;
    EXPECT_TRUE(absl::IsDataLoss(RecordMarks::Parse(bytes.substr(0, i)).status())) << i;
  }
  EXPECT_TRUE(absl::IsDataLoss(RecordMarks::Parse(bytes + "x").status()));
  RecordMarks far = RecordMarks::New();
  far.NotePurgeOfAll({kSegmentMax + 1, 0});
  EXPECT_TRUE(absl::IsDataLoss(RecordMarks::Parse(far.Encode()).status()));
}

TEST(RecordMarksTest, TheFile) {
  TestFolder folder;
  const std::string path = folder.path() + "/marks";
  const auto files = MakeDiskFiles();
  EXPECT_TRUE(absl::IsNotFound(RecordMarks::Read(path).status()));
  RecordMarks marks = RecordMarks::New();
  ASSERT_TRUE(marks.Write(path, files.get()).ok());
  marks.NotePurge(TestDigest(1), {7, 4096});
  ASSERT_TRUE(marks.Write(path, files.get()).ok());
  EXPECT_EQ(RecordMarks::Read(path)->Encode(), marks.Encode());
  std::ofstream(path) << "garbage";
  EXPECT_TRUE(absl::IsDataLoss(RecordMarks::Read(path).status()));
  std::filesystem::remove(path);
  std::filesystem::create_symlink("/dev/zero", path);
  EXPECT_FALSE(RecordMarks::Read(path).ok());
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_FALSE(RecordMarks::Read(path).ok());
  EXPECT_FALSE(marks.Write(path, files.get()).ok());
}

// A header is this disk's, and of this place.
TEST(RecordSealTest, AHeaderIsSignedForItsPlace) {
  for (const size_t pages : {1, 2, 3, 4, 5, 80, 1024}) {
    const RecordSeal seal = RecordMarks::New().seal(), other = RecordMarks::New().seal();
    const std::string plain = EncodeRecordHeader(MakeTestBlock(1, pages, pages, 100).record);
    std::string header = plain;
    const absl::Span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(header.data()), header.size());
    EXPECT_FALSE(seal.IsSigned({1, 4096}, bytes));
    seal.Sign({1, 4096}, &header);
    EXPECT_TRUE(seal.IsSigned({1, 4096}, bytes));
    EXPECT_FALSE(seal.IsSigned({1, 8192}, bytes));
    EXPECT_FALSE(seal.IsSigned({2, 4096}, bytes));
    EXPECT_FALSE(other.IsSigned({1, 4096}, bytes));
    // It is in no byte that the header has.
    EXPECT_EQ(header.substr(0, 136 + 16 * pages), plain.substr(0, 136 + 16 * pages));
    EXPECT_TRUE(ParseRecordHeader(bytes).ok());
  }
}

}  // namespace
}  // namespace kvmanager::testing
