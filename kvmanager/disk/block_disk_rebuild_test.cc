// A disk whose index is damaged or missing makes it anew from its records: which blocks are found again, and which must
// not be.
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/captured_log_testing.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/block_disk_rebuild_testing.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/record.h"

namespace kvmanager::testing {
namespace {

namespace fs = std::filesystem;

#ifdef KVMANAGER_SANITIZED
constexpr int kDamagesOfKind = 4;
#else
constexpr int kDamagesOfKind = 15;
#endif

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
