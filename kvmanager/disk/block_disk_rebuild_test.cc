// A disk whose index is damaged or missing makes it anew from its records: which blocks are found again, and which must
// not be.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kvmanager/base/captured_log_testing.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/index_db.h"
#include "kvmanager/disk/power_cut_testing.h"
#include "kvmanager/disk/record.h"
#include "kvmanager/disk/record_marks.h"
#include "kvmanager/disk/record_walk.h"

namespace kvmanager::testing {
namespace {

namespace fs = std::filesystem;

#ifdef KVMANAGER_SANITIZED
constexpr int kDamagesOfKind = 4;
#else
constexpr int kDamagesOfKind = 15;
#endif

/// A file system that gives nothing back: what was erased is still there.
class NothingGoes final : public RealFiles {
 public:
  int Reserve(int fd, uint64_t offset, uint64_t bytes) override { return 0; }
  int Punch(int fd, uint64_t offset, uint64_t bytes) override { return -EOPNOTSUPP; }
  int Unlink(const std::string& path) override { return unlink_result; }

  int unlink_result = 0;
};

/// One that does not replace files for a while.
class RefusesMarks final : public RealFiles {
 public:
  int Replace(const std::string& path, absl::string_view bytes) override {
    if (refuses) return -EIO;
    const int error = RealFiles::Replace(path, bytes);
    ++replaced;
    return error;
  }
  std::atomic<bool> refuses{false};
  std::atomic<int> replaced{0};
};

class BlockDiskRebuildTest : public ::testing::Test {
 protected:
  BlockDiskRebuildTest() {
    UseFolder(folder_.path() + "/d");
    options_.bytes = BlockDisk::kBytesMin;
    parts_.clock = &clock_;
  }
  ~BlockDiskRebuildTest() override { KV_CHECK(SetFailpoints("").ok()); }

  void UseFolder(const std::string& path) { options_.directory = path; }
  std::string Segment(int number) const { return absl::StrFormat("%s/segments/%08d", options_.directory, number); }
  void RemoveIndex() { fs::remove_all(options_.directory + "/index"); }
  void Write(TestDisk* disk, const std::vector<TestBlock>& blocks) {
    for (const TestBlock& block : blocks) ASSERT_TRUE(disk->Write(block));
  }
  // What was erased before is so for good.
  void Erased(TestDisk* disk) {
    absl::Status erased = absl::UnknownError("");
    (*disk)->WhenErased([&](const absl::Status& status) { erased = status; });
    ASSERT_TRUE(loop_.RunUntil([&] { return !absl::IsUnknown(erased); }));
    ASSERT_TRUE(erased.ok()) << erased;
  }
  // These are found, and no others.
  static void ExpectAll(TestDisk* disk, const std::vector<TestBlock>& blocks) {
    EXPECT_EQ((*disk)->use().blocks, blocks.size());
    for (const TestBlock& block : blocks) {
      ASSERT_TRUE(disk->Has(block)) << block.record.index;
      EXPECT_TRUE(disk->Read(block).ok()) << disk->Read(block);
    }
    (*disk)->CheckInvariants();
  }
  static std::vector<TestBlock> Blocks(uint64_t cache, int begin, int end) {
    std::vector<TestBlock> blocks;
    for (int i = begin; i < end; ++i) blocks.push_back(MakeTestBlock(cache, i, 0, 3000));
    return blocks;
  }
  static uint64_t BytesOf(const TestBlock& block) {
    std::vector<uint32_t> bytes;
    for (const DiskPage& page : block.record.pages) bytes.push_back(page.bytes);
    return RecordLayout::Of(bytes).bytes;
  }

  TestFolder folder_;
  TestLoop loop_;
  ManualClock clock_;
  BlockDisk::Options options_;
  BlockDiskParts parts_;
};

// Of a disk that nothing else is asked of.
TEST_F(BlockDiskRebuildTest, APurgeThatWasRefusedIsTriedAgain) {
  RefusesMarks files;
  parts_.files = &files;
  const std::vector<TestBlock> blocks = Blocks(1, 0, 5);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
    files.refuses = true;
    files.replaced = 0;
    EXPECT_EQ(disk->EraseAll(), blocks.size());
    absl::Status erased;
    disk->WhenErased([&](const absl::Status& status) { erased = status; });
    ASSERT_TRUE(loop_.RunUntil([&] { return !erased.ok(); }));
    ASSERT_TRUE(loop_.RunUntil([&] { return !disk->TakesWrites(); }));
    files.refuses = false;
    disk->Look();
    EXPECT_EQ(files.replaced, 0) << "not before the pause is over";
    clock_.AdvanceNs(2000000000);
    disk->Look();
    ASSERT_TRUE(loop_.RunUntil([&] { return files.replaced > 0; }));
  }
  RemoveIndex();
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load());
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, {}));
}

TEST_F(BlockDiskRebuildTest, AMissingIndexIsMadeAnew) {
  std::vector<TestBlock> blocks = Blocks(1, 0, 30);
  blocks.push_back(MakeTestBlock(2, 100, 3, 3 << 20));
  blocks.push_back(MakeTestBlock(2, 101, 1024, 40));
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  RemoveIndex();
  {
    CapturedLog log;
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.status().ok()) << disk.status();
    EXPECT_STREQ(disk->state(), "making its index anew from its records");
    EXPECT_FALSE(disk->CanWrite(1));
    EXPECT_TRUE(fs::exists(options_.directory + "/damaged"));
    ASSERT_TRUE(disk.Load());
    EXPECT_STREQ(disk->state(), "ready");
    EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
    ASSERT_TRUE(loop_.RunUntil([&] { return !log.Lines({"was made anew"}).empty(); }));
    EXPECT_EQ(log.Lines({"is damaged", " is missing", "it is made anew"}).size(), 1u);
    EXPECT_EQ(log.Lines({"was made anew", options_.directory, "32 blocks were found in 0.0 s"}).size(), 1u);
    EXPECT_FALSE(fs::exists(options_.directory + "/damaged"));
    EXPECT_EQ(disk.metrics().set_aside.Value(), 0.0);
    EXPECT_EQ(disk.metrics().errors("index").Value(), 1.0);
    blocks.push_back(MakeTestBlock(1, 50));
    ASSERT_TRUE(disk.Write(blocks.back()));
  }
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.status().ok()) << disk.status();
  EXPECT_STREQ(disk->state(), "reading its index");
  ASSERT_TRUE(disk.Load());
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
  EXPECT_EQ(disk.metrics().errors("index").Value(), 0.0);
}

// As after a kill: nothing is sealed.
TEST_F(BlockDiskRebuildTest, AMissingLogLosesNothing) {
  const std::vector<TestBlock> blocks = Blocks(1, 0, 30);
  for (int life = 0; life < 2; ++life) {  // the second one has what the first wrote in a table
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, {blocks.begin() + 15 * life, blocks.begin() + 15 * life + 15}));
  }
  ASSERT_TRUE(fs::remove(options_.directory + "/sealed"));
  std::vector<fs::path> logs;
  for (const auto& entry : fs::directory_iterator(options_.directory + "/index")) {
    if (entry.path().extension() == ".log") logs.push_back(entry.path());
  }
  ASSERT_FALSE(logs.empty());
  for (const fs::path& log : logs) fs::remove(log);
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.status().ok()) << disk.status();
  EXPECT_STREQ(disk->state(), "making its index anew from its records");
  ASSERT_TRUE(disk.Load());
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
}

// Several lives, so that the index has tables and a log. A damage that RocksDB finds only while it reads costs a start.
TEST_F(BlockDiskRebuildTest, DamageOfEachKindOfFileLosesNothing) {
  const uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::vector<TestBlock> blocks;
  for (int life = 0; life < 4; ++life) {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (const TestBlock& block : Blocks(1, life * 10, life * 10 + 10)) blocks.push_back(block);
    for (size_t i = blocks.size() - 10; i < blocks.size(); ++i) ASSERT_TRUE(disk.Write(blocks[i]));
    ASSERT_NO_FATAL_FAILURE(Write(&disk, Blocks(2 + life, 100, 105)));
    EXPECT_EQ(disk->EraseCache(TestDigest(2 + life)), 5u);
    disk->Erase(blocks.back().record.cache, blocks.back().record.name.key);
    blocks.pop_back();
    if (life == 3) {
      ASSERT_NO_FATAL_FAILURE(Erased(&disk));
    }
  }
  const std::string pristine = options_.directory, copy = folder_.path() + "/copy";
  int anew = 0, trials = 0;
  for (const char* const kind : {"CURRENT", "MANIFEST", ".sst", ".log", "OPTIONS", "IDENTITY"}) {
    for (int i = 0; i < kDamagesOfKind; ++i) {
      fs::remove_all(copy);
      fs::copy(pristine, copy, fs::copy_options::recursive);
      std::vector<fs::path> files;
      for (const auto& entry : fs::directory_iterator(copy + "/index")) {
        const std::string name = entry.path().filename();
        if ((absl::StartsWith(name, kind) || absl::EndsWith(name, kind)) && entry.file_size() > 0) {
          files.push_back(entry.path());
        }
      }
      ASSERT_FALSE(files.empty()) << kind;
      const fs::path file = files[random() % files.size()];
      const uint64_t at = random() % fs::file_size(file);
      const int how = i % 3;
      if (how == 0) fs::resize_file(file, at);
      if (how == 1) {
        ASSERT_NO_FATAL_FAILURE(Flip(file, at));
      }
      if (how == 2 && i == 2) fs::remove(file);
      if (how == 2 && i != 2) {
        ASSERT_NO_FATAL_FAILURE(Flip(file, fs::file_size(file) - 1 - at % 50));
      }
      SCOPED_TRACE(absl::StrCat(file.filename().string(), " of ", how, " at ", at));
      UseFolder(copy);
      for (int start = 0; start < 2; ++start) {
        TestDisk disk(&loop_, options_, parts_);
        ASSERT_TRUE(disk.Load()) << disk.status();
        anew += disk.metrics().errors("index").Value() > 0 ? 1 : 0;
        EXPECT_EQ(disk.metrics().set_aside.Value(), 0.0);
        if (start == 0 && !disk->TakesWrites()) continue;
        ASSERT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
        break;
      }
      ++trials;
    }
  }
  std::printf("%d of %d damages were found\n", anew, trials);
  EXPECT_GT(anew, trials / 3);
}

TEST_F(BlockDiskRebuildTest, WhatWasPurgedStaysSo) {
  for (const bool all : {false, true}) {
    for (const bool early : {false, true}) {
      SCOPED_TRACE(absl::StrCat("all ", all, ", before it was loaded ", early));
      UseFolder(folder_.path() + absl::StrCat("/", all, early));
      NothingGoes files;
      files.unlink_result = -EIO;
      parts_.files = &files;
      std::vector<TestBlock> stay = Blocks(2, 0, 20);
      {
        TestDisk disk(&loop_, options_, parts_);
        ASSERT_TRUE(disk.Load()) << disk.status();
        ASSERT_NO_FATAL_FAILURE(Write(&disk, Blocks(1, 20, 40)));
        ASSERT_NO_FATAL_FAILURE(Write(&disk, stay));
        if (all) stay.clear();
        if (early) {
          disk.Close();
          TestDisk again(&loop_, options_, parts_);
          ASSERT_TRUE(again.status().ok());
          all ? again->EraseAll() : again->EraseCache(TestDigest(1));
          ASSERT_TRUE(again.Load());
          ASSERT_NO_FATAL_FAILURE(Erased(&again));
        } else {
          all ? disk->EraseAll() : disk->EraseCache(TestDigest(1));
          ASSERT_NO_FATAL_FAILURE(Erased(&disk));
        }
      }
      // Behind it, in segments of later lives.
      for (int life = 0; life < 2; ++life) {
        TestDisk disk(&loop_, options_, parts_);
        ASSERT_TRUE(disk.Load()) << disk.status();
        for (const TestBlock& block : Blocks(1, 18 + 4 * life, 22 + 4 * life)) stay.push_back(block);
        for (size_t i = stay.size() - 4; i < stay.size(); ++i) ASSERT_TRUE(disk.Write(stay[i]));
        if (life == 0) continue;
        disk.Close();
        RemoveIndex();
        for (DiskFiles* const each : {parts_.files, static_cast<DiskFiles*>(nullptr)}) {
          parts_.files = each;
          TestDisk anew(&loop_, options_, parts_);
          ASSERT_TRUE(anew.Load()) << anew.status();
          EXPECT_NO_FATAL_FAILURE(ExpectAll(&anew, stay));
          anew.Close();
          RemoveIndex();
        }
      }
    }
  }
}

// The same in one life, with writes of the purged cache right behind the purge, and a power cut.
TEST_F(BlockDiskRebuildTest, APurgeOutlivesAPowerCutAndTheIndex) {
  const uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  PowerCut power(seed);
  parts_.make_io = [&] { return power.WrapIo(MakeThreadIo()); };
  parts_.files = power.files();
  parts_.index_files = power.file_system();
  for (int round = 0; round < 12; ++round) {
    UseFolder(folder_.path() + absl::StrCat("/", round));
    const std::vector<TestBlock> purged = Blocks(1, 0, 20), other = Blocks(2, 0, 10), behind = Blocks(1, 15, 30);
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, purged));
    ASSERT_NO_FATAL_FAILURE(Write(&disk, other));
    round % 2 == 0 ? disk->EraseCache(TestDigest(1)) : disk->EraseAll();
    if (round % 4 < 2) {
      ASSERT_NO_FATAL_FAILURE(Erased(&disk));
    } else {
      ASSERT_NO_FATAL_FAILURE(Write(&disk, behind));  // which are durable only behind the purge
    }
    power.Cut();
    disk.Close();
    power.Lose();
    RemoveIndex();
    TestDisk anew(&loop_, options_, parts_);
    ASSERT_TRUE(anew.Load()) << anew.status();
    std::vector<TestBlock> stay;
    if (round % 2 == 0) stay = other;
    if (round % 4 >= 2) stay.insert(stay.end(), behind.begin(), behind.end());
    EXPECT_NO_FATAL_FAILURE(ExpectAll(&anew, stay)) << round;
  }
}

// Marks go once a start has given back what they name: then the bytes alone say it.
TEST_F(BlockDiskRebuildTest, MarksGoOnceTheBytesHave) {
  const auto marks = [&] { return *RecordMarks::Read(options_.directory + "/marks"); };
  NothingGoes files;
  parts_.files = &files;
  const std::vector<TestBlock> stay = Blocks(2, 0, 20);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, Blocks(1, 0, 20)));
    ASSERT_NO_FATAL_FAILURE(Write(&disk, stay));
    EXPECT_TRUE(marks().empty());
    disk->EraseCache(TestDigest(1));
    ASSERT_NO_FATAL_FAILURE(Erased(&disk));
    EXPECT_FALSE(marks().empty());
  }
  const RecordSeal before = marks().seal();
  parts_.files = nullptr;
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_TRUE(loop_.RunUntil([&] {
      usleep(1000);
      return marks().empty();
    }));
  }
  EXPECT_EQ(marks().seal().secret(), before.secret());
  RemoveIndex();
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, stay));
}

TEST_F(BlockDiskRebuildTest, AFlippedByteOfAHeaderLosesThatBlock) {
  const std::vector<TestBlock> blocks = Blocks(1, 0, 60);
  std::vector<uint64_t> places;
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  std::mt19937_64 random(7);
  uint64_t at = 0;
  std::vector<TestBlock> stay;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const size_t pages = blocks[i].record.pages.size();
    const uint64_t covered = 136 + 16 * pages, whole = RecordHeaderBytes(pages);
    // Between checksum and tag is nothing. All fields of the first 136 bytes have their turn.
    if (i % 2 == 0) {
      ASSERT_NO_FATAL_FAILURE(Flip(Segment(1), at + (i % 8 == 0 ? whole - 3 : random() % covered)));
    }
    if (i % 2 != 0) stay.push_back(blocks[i]);
    at += BytesOf(blocks[i]);
  }
  RemoveIndex();
  for (int start = 0; start < 2; ++start) {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, stay));
  }
}

// A client writes what looks like a record of somebody else's into a page of its own, and the header before is lost.
TEST_F(BlockDiskRebuildTest, ARecordInsideAPageIsNone) {
  const TestBlock good = MakeTestBlock(1, 1, 2, 3000);
  TestBlock forged = MakeTestBlock(1, 2, 1, 3000), bad = MakeTestBlock(3, 3, 1, 3000);
  bad.pages[0].assign(40960, 7);
  const uint64_t offset = RecordHeaderBytes(1);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_TRUE(disk.Write(good));
    // Without a tag, and with the one of the record before, of which nobody knows.
    const std::string plain = EncodeRecordHeader(forged.record);
    std::copy(plain.begin(), plain.end(), bad.pages[0].begin() + static_cast<std::ptrdiff_t>(4096 - offset));
    std::ifstream in(Segment(1), std::ios::binary);
    std::vector<char> copied(BytesOf(good));
    in.read(copied.data(), static_cast<std::streamsize>(copied.size()));
    ASSERT_LE(8192 + copied.size(), 40960u);
    std::copy(copied.begin(), copied.end(), bad.pages[0].begin() + static_cast<std::ptrdiff_t>(8192 - offset));
    bad.record.pages[0] = {40960, false, Checksum(bad.pages[0].data(), bad.pages[0].size())};
    ASSERT_TRUE(disk.Write(bad));
    disk->Erase(good.record.cache, good.record.name.key);
    ASSERT_NO_FATAL_FAILURE(Erased(&disk));
  }
  ASSERT_NO_FATAL_FAILURE(Flip(Segment(1), BytesOf(good) + 20));
  RemoveIndex();
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_EQ(disk->use().blocks, 0u);
}

TEST_F(BlockDiskRebuildTest, OfTwoRecordsOfOneNameTheLaterCounts) {
  NothingGoes files;
  parts_.files = &files;
  const std::vector<TestBlock> blocks = Blocks(1, 0, 20);
  for (int life = 0; life < 3; ++life) {  // in one segment, and in several
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (int again = 0; again < 2; ++again) {
      for (const TestBlock& block : blocks) {
        if (disk.Has(block)) disk->Erase(block.record.cache, block.record.name.key);
        ASSERT_TRUE(disk.Write(block));
      }
    }
  }
  // All but the last are wrong.
  uint64_t bytes = 0;
  for (const TestBlock& block : blocks) {
    for (int segment = 1; segment <= 3; ++segment) {
      ASSERT_NO_FATAL_FAILURE(Flip(Segment(segment), bytes + RecordHeaderBytes(block.record.pages.size())));
    }
    bytes += BytesOf(block);
  }
  for (const TestBlock& block : blocks) {
    for (int segment = 1; segment <= 2; ++segment) {
      ASSERT_NO_FATAL_FAILURE(Flip(Segment(segment), bytes + RecordHeaderBytes(block.record.pages.size())));
    }
    bytes += BytesOf(block);
  }
  parts_.files = nullptr;
  RemoveIndex();
  for (int start = 0; start < 2; ++start) {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
  }
}

TEST_F(BlockDiskRebuildTest, OneThatIsCutShortIsBegunAgain) {
  std::vector<TestBlock> blocks = Blocks(1, 0, 600);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  RemoveIndex();
  for (int start = 0; start < 5; ++start) {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.status().ok()) << disk.status();
    if (start == 0) {
      EXPECT_STREQ(disk->state(), "making its index anew from its records");
    }
    if (start > 0) {
      ASSERT_TRUE(loop_.RunUntil([&] { return disk->use().blocks > 0; }));
    }
  }
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.status().ok()) << disk.status();
  // What is erased meanwhile is so.
  disk->Erase(blocks[3].record.cache, blocks[3].record.name.key);
  blocks.erase(blocks.begin() + 3);
  ASSERT_TRUE(disk.Load());
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
  ASSERT_NO_FATAL_FAILURE(Erased(&disk));
  disk.Close();
  TestDisk again(&loop_, options_, parts_);
  ASSERT_TRUE(again.Load());
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&again, blocks));
}

// Not the records' fault: they are found by a start that can read them.
TEST_F(BlockDiskRebuildTest, ADeviceThatFailsIsNoLoss) {
  const std::vector<TestBlock> blocks = Blocks(1, 0, 300);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  RemoveIndex();
  {
    ASSERT_TRUE(SetFailpoints("disk.read=1/1").ok());
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_EQ(disk->use().blocks, 0u);
    EXPECT_STREQ(disk->state(), "its index could not be read: nothing is written until the next start");
    disk.Close();
    ASSERT_TRUE(SetFailpoints("").ok());
  }
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
}

TEST_F(BlockDiskRebuildTest, AFlippedByteOfTheMarks) {
  const std::vector<TestBlock> blocks = Blocks(1, 0, 20), later = Blocks(1, 20, 30);
  const std::string marks = options_.directory + "/marks";
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  // The index is there: nothing is lost, and what is written from now on can be found without it.
  ASSERT_NO_FATAL_FAILURE(Flip(marks, 20));
  {
    CapturedLog log;
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
    EXPECT_EQ(log.Lines({marks, "their checksum differs"}).size(), 1u);
    ASSERT_NO_FATAL_FAILURE(Write(&disk, later));
  }
  RemoveIndex();
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, later));
  }
  // Both: nothing is made anew.
  ASSERT_NO_FATAL_FAILURE(Flip(marks, 20));
  RemoveIndex();
  CapturedLog log;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_EQ(disk->use().blocks, 0u);
  EXPECT_EQ(disk.metrics().set_aside.Value(), 1.0);
  EXPECT_EQ(log.Lines({"cannot be found without it", "their checksum differs"}).size(), 1u);
  ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
}

// What is no segment of this disk is neither read nor removed.
TEST_F(BlockDiskRebuildTest, FoldersAndPipesInPlaceOfFilesOfOurs) {
  const std::vector<TestBlock> blocks = Blocks(1, 0, 3);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  for (const char* const name : {"marks", "sealed", "damaged"}) {
    const std::string path = options_.directory + "/" + name, away = folder_.path() + "/away";
    if (fs::exists(path)) fs::rename(path, away);
    fs::create_directory(path);
    EXPECT_TRUE(absl::StrContains(TestDisk(&loop_, options_, parts_).status().message(),
                                  absl::StrCat(path, " is a folder, must be a file: move it away")))
        << name;
    fs::remove(path);
    if (fs::exists(away)) fs::rename(away, path);
  }
  ASSERT_EQ(mkfifo((options_.directory + "/damaged").c_str(), 0600), 0);
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_NO_FATAL_FAILURE(ExpectAll(&disk, blocks));
}

TEST_F(BlockDiskRebuildTest, LinksAreNotFollowed) {
  const std::vector<TestBlock> blocks = Blocks(1, 0, 20);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  const std::string outside = folder_.path() + "/outside";
  fs::rename(Segment(1), outside);
  fs::create_symlink(outside, Segment(9));
  RemoveIndex();
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_EQ(disk->use().blocks, 0u);
  EXPECT_TRUE(fs::exists(outside) && fs::is_symlink(Segment(9)));
  ASSERT_TRUE(disk.Write(blocks[0])) << "beside it";
}

}  // namespace
}  // namespace kvmanager::testing
