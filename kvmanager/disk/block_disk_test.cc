#include "kvmanager/disk/block_disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/disk/disk_folder.h"
#include "kvmanager/disk/disk_state.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/index_db.h"
#include "kvmanager/disk/record.h"

namespace kvmanager::testing {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

/// A file system that punches no holes.
class NoHoles : public RealFiles {
 public:
  int Reserve(int fd, uint64_t offset, uint64_t bytes) override { return -EOPNOTSUPP; }
  int Punch(int fd, uint64_t offset, uint64_t bytes) override { return -EOPNOTSUPP; }
};

/// One that takes its time for each.
class SlowHoles final : public NoHoles {
 public:
  int Punch(int fd, uint64_t offset, uint64_t bytes) override {
    usleep(300);
    ++punched;
    return 0;
  }
  std::atomic<int> punched{0};
};

class BlockDiskTest : public ::testing::TestWithParam<bool> {
 protected:
  BlockDiskTest() {
    options_.directory = folder_.path() + "/d";
    options_.bytes = 64 * kMiB;
    parts_.make_io = GetParam() ? MakeThreadIo : MakeUringIo;
    parts_.clock = &clock_;
  }
  ~BlockDiskTest() override { KV_CHECK(SetFailpoints("").ok()); }

  uint64_t DiskUse() {
    uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory + "/segments")) {
      struct stat status;
      if (stat(entry.path().c_str(), &status) == 0) bytes += static_cast<uint64_t>(status.st_blocks) * 512;
    }
    return bytes;
  }
  std::vector<std::string> Segments() {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory + "/segments")) {
      names.insert(entry.path());
    }
    return {names.begin(), names.end()};
  }
  // All is committed and given back.
  void Settle(TestDisk* disk) {
    ASSERT_TRUE(loop_.RunUntil([&] { return (*disk)->use().writing_bytes == 0; }));
  }

  TestFolder folder_;
  TestLoop loop_;
  ManualClock clock_;
  BlockDisk::Options options_;
  BlockDiskParts parts_;
};
INSTANTIATE_TEST_SUITE_P(Io, BlockDiskTest, ::testing::Bool(),
                         [](const auto& of) { return std::string(of.param ? "Threads" : "Uring"); });

TEST_P(BlockDiskTest, WritesReadsAndFindsAgain) {
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 40; ++i) blocks.push_back(MakeTestBlock(i % 3, i));
  blocks.push_back(MakeTestBlock(1, 100, 3, 3 << 20));  // of several pieces
  blocks.push_back(MakeTestBlock(1, 101, 1024, 40));
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_EQ(disk->use().blocks, 0u);
    for (const TestBlock& block : blocks) {
      EXPECT_FALSE(disk.Has(block));
      EXPECT_TRUE(absl::IsNotFound(disk.Read(block)));
      EXPECT_TRUE(disk->CanWrite(100000));
      ASSERT_TRUE(disk.Write(block));
      EXPECT_TRUE(disk.Has(block));
      EXPECT_TRUE(disk.Read(block).ok());
      disk->CheckInvariants();
    }
    EXPECT_FALSE(disk.Write(blocks[0]));  // it is there
    EXPECT_EQ(disk->use().blocks, blocks.size());
    EXPECT_EQ(disk.metrics().written_blocks.Value(), double(blocks.size()));
    EXPECT_EQ(disk.metrics().read_blocks.Value(), double(blocks.size()));
  }
  struct stat status;
  ASSERT_EQ(stat(options_.directory.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700u);
  ASSERT_EQ(stat(Segments()[0].c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  for (int again = 0; again < 3; ++again) {
    TestDisk disk(&loop_, options_, parts_);
    EXPECT_FALSE(disk->CanWrite(100));
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_EQ(disk->use().blocks, blocks.size());
    for (const TestBlock& block : blocks) {
      EXPECT_TRUE(disk.Has(block));
      EXPECT_TRUE(disk.Read(block).ok()) << disk.Read(block);
    }
    disk->CheckInvariants();
  }
}

TEST_P(BlockDiskTest, ManyAreOnTheirWayTogether) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 200; ++i) blocks.push_back(MakeTestBlock(1, i));
  int durable = 0;
  for (const TestBlock& block : blocks) {
    disk->Write(block.record, "a", block.sources(), [&](bool ok) { durable += ok ? 1 : 0; });
    disk->CheckInvariants();
  }
  ASSERT_TRUE(loop_.RunUntil([&] { return durable == 200; }));
  int read = 0;
  std::vector<std::vector<std::vector<uint8_t>>> pages(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    std::vector<BlockDisk::Target> targets;
    for (const DiskPage& page : blocks[i].record.pages) pages[i].emplace_back(page.bytes);
    for (auto& page : pages[i]) targets.push_back({page.data(), static_cast<uint32_t>(page.size())});
    disk->Read(blocks[i].record.cache, blocks[i].record.name.key, targets, [&, i](auto checksums) {
      ASSERT_TRUE(checksums.ok()) << checksums.status();
      EXPECT_TRUE(TestDisk::Compare(blocks[i], *checksums, pages[i]).ok());
      ++read;
    });
  }
  disk->CheckInvariants();
  EXPECT_GT(disk->use().reading_bytes, 0u);
  ASSERT_TRUE(loop_.RunUntil([&] { return read == 200; }));
  EXPECT_EQ(disk->use().reading_bytes, 0u);
}

TEST_P(BlockDiskTest, ClosingMakesDurableWhatWasBegun) {
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 50; ++i) blocks.push_back(MakeTestBlock(1, i));
  auto token = std::make_shared<int>(0);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (const TestBlock& block : blocks) {
      disk->Write(block.record, "a", block.sources(), [token](bool) { ADD_FAILURE(); });
    }
  }
  EXPECT_EQ(token.use_count(), 1);  // callbacks were destroyed
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  for (const TestBlock& block : blocks) EXPECT_TRUE(disk.Read(block).ok());
}

TEST_P(BlockDiskTest, EvictsWhatWasUsedLongestAgoOfWhoHasMost) {
  options_.eviction = EvictionKind::kLru;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  std::vector<std::pair<CacheDigest, BlockKey>> gone;
  disk->OnGone([&](const CacheDigest& cache, const BlockKey& key, DiskLoss loss) {
    EXPECT_EQ(loss, DiskLoss::kEvicted);
    gone.emplace_back(cache, key);
  });
  std::vector<TestBlock> small, large;
  for (int i = 0; i < 4; ++i) small.push_back(MakeTestBlock(7, 1000 + i, 1, 100000));
  for (const TestBlock& block : small) ASSERT_TRUE(disk.Write(block, "small"));
  int n = 0;
  while (gone.size() < 20) {
    large.push_back(MakeTestBlock(8, n++, 1, 4 << 20));
    // Bytes of what was evicted are given back behind it: much of them has to be waited for.
    ASSERT_TRUE(loop_.RunUntil([&] { return disk->CanWrite(large.back().pages[0].size()); }));
    ASSERT_TRUE(disk.Write(large.back(), "large"));
    disk->CheckInvariants();
    const BlockDisk::Use use = disk->use();
    EXPECT_LE(use.used_bytes, use.capacity_bytes);
    EXPECT_LT(DiskUse(), options_.bytes);
  }
  for (const TestBlock& block : small) EXPECT_TRUE(disk.Has(block));
  EXPECT_EQ(disk.metrics().evicted_blocks.Value(), double(gone.size()));
  for (size_t i = 0; i < large.size(); ++i) EXPECT_EQ(disk.Has(large[i]), i >= gone.size());
  // A use saves the oldest.
  disk->NoteUse(large[gone.size()].record.cache, {large[gone.size()].record.name});
  const size_t oldest = gone.size();
  while (gone.size() == oldest) {
    large.push_back(MakeTestBlock(8, n++, 1, 4 << 20));
    ASSERT_TRUE(disk.Write(large.back(), "large"));
  }
  EXPECT_TRUE(disk.Has(large[oldest]));
  EXPECT_FALSE(disk.Has(large[oldest + 1]));
}

TEST_P(BlockDiskTest, ErasedBytesAreGivenBack) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(MakeTestBlock(i % 2, i, 1, 2 << 20));
  for (const TestBlock& block : blocks) ASSERT_TRUE(disk.Write(block));
  const uint64_t full = DiskUse(), used = disk->use().used_bytes;
  uint64_t erased = 0;
  for (const TestBlock& block : blocks) {
    if (block.record.cache == TestDigest(0)) erased += RecordLayout::Of({block.record.pages[0].bytes}).bytes;
  }
  int told = 0;
  disk->OnGone([&](const CacheDigest&, const BlockKey&, DiskLoss loss) { told += loss == DiskLoss::kErased; });
  EXPECT_EQ(disk->EraseCache(TestDigest(0)), 10u);
  EXPECT_EQ(told, 10);
  EXPECT_EQ(disk->use().used_bytes, used - erased);
  ASSERT_TRUE(loop_.RunUntil([&] { return DiskUse() <= full - erased; }));
  for (const TestBlock& block : blocks) {
    EXPECT_EQ(disk.Read(block).ok(), block.record.cache == TestDigest(1));
  }
  EXPECT_EQ(disk->EraseAll(), 10u);
  EXPECT_EQ(disk->use().used_bytes, 0u);
  disk.Close();
  TestDisk again(&loop_, options_, parts_);
  ASSERT_TRUE(again.Load()) << again.status();
  EXPECT_EQ(again->use().blocks, 0u);
  ASSERT_TRUE(again.Write(blocks[0]));
  EXPECT_EQ(Segments().size(), 1u);
}

// Thousands of holes take seconds, and a segment that becomes empty needs none.
TEST_P(BlockDiskTest, APurgeAndWhatIsWrittenBehindItDoNotWaitForHoles) {
  constexpr int kBlocks = 600;  // of one segment
  SlowHoles files;
  parts_.files = &files;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  std::vector<TestBlock> blocks;
  for (int i = 0; i <= kBlocks; ++i) blocks.push_back(MakeTestBlock(1, i, 1, 400));
  const TestBlock stays = MakeTestBlock(2, 0, 1, 400);
  ASSERT_TRUE(disk.Write(stays));
  int written = 0;
  for (int i = 0; i < kBlocks; ++i) {
    ASSERT_TRUE(loop_.RunUntil([&] { return disk->CanWrite(400); }));
    disk->Write(blocks[i].record, "a", blocks[i].sources(), [&](bool durable) { written += durable; });
  }
  ASSERT_TRUE(loop_.RunUntil([&] { return written == kBlocks; }));
  ASSERT_EQ(Segments().size(), 1u);
  absl::Status erased = absl::UnknownError("");
  EXPECT_EQ(disk->EraseCache(TestDigest(1)), uint64_t{kBlocks});
  disk->WhenErased([&](const absl::Status& status) { erased = status; });
  ASSERT_TRUE(loop_.RunUntil([&] { return !absl::IsUnknown(erased); }));
  EXPECT_TRUE(erased.ok()) << erased;
  EXPECT_LT(files.punched, kBlocks / 2);
  EXPECT_TRUE(disk.Write(blocks.back()));
  EXPECT_LT(files.punched, kBlocks);
  disk->CheckInvariants();
  ASSERT_TRUE(loop_.RunUntil([&] { return files.punched == kBlocks; }));
  EXPECT_TRUE(disk.Read(stays).ok());
  EXPECT_EQ(disk->EraseAll(), 2u);
  EXPECT_TRUE(disk.Write(blocks.back()));
  ASSERT_TRUE(loop_.RunUntil([&] { return Segments().size() == 1; }));  // perhaps behind the write
  EXPECT_LE(files.punched, kBlocks + 2);
}

// Bytes count until their segment is empty, and the disk stays within its bounds.
TEST_P(BlockDiskTest, WithoutHoles) {
  NoHoles files;
  parts_.files = &files;
  options_.eviction = EvictionKind::kLru;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  int written = 0, late = 0;
  for (int i = 0; i < 400; ++i) {
    const TestBlock block = MakeTestBlock(1, i, 1, 2 << 20);
    if (disk->CanWrite(block.pages[0].size()) && disk.Write(block)) {
      ++written;
      late += i >= 350 ? 1 : 0;
      EXPECT_TRUE(disk.Read(block).ok());
    }
    disk->CheckInvariants();
    EXPECT_LE(DiskUse(), options_.bytes);
  }
  EXPECT_GT(late, 0) << "it was full, and stayed so";
  std::printf("%d of 400 blocks were written, %d of the last 50\n", written, late);
}

TEST_P(BlockDiskTest, WhatIsErasedOnItsWayIsNotThere) {
  for (int way = 0; way < 3; ++way) {
    TestBlock block = MakeTestBlock(way, 1);
    {
      TestDisk disk(&loop_, options_, parts_);
      ASSERT_TRUE(disk.Load()) << disk.status();
      int result = -1, again = -1;
      disk->Write(block.record, "a", block.sources(), [&](bool durable) { result = durable; });
      if (way == 0) disk->Erase(block.record.cache, block.record.name.key);
      if (way == 1) {
        EXPECT_EQ(disk->EraseCache(block.record.cache), 0u);
      }
      if (way == 2) {
        EXPECT_EQ(disk->EraseAll(), 0u);
      }
      disk->CheckInvariants();
      if (way == 0) disk->Write(block.record, "a", block.sources(), [&](bool durable) { again = durable; });
      ASSERT_TRUE(loop_.RunUntil([&] { return result >= 0 && (way != 0 || again >= 0); }));
      EXPECT_EQ(result, 0);
      EXPECT_EQ(disk.Has(block), way == 0);
      disk->CheckInvariants();
      if (way == 0) {
        EXPECT_TRUE(disk.Read(block).ok());
      }
    }
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_EQ(disk.Has(block), way == 0);
    EXPECT_EQ(disk->use().blocks, way == 0 ? 1u : 0u);
    disk->EraseAll();
  }
}

TEST_P(BlockDiskTest, WhatIsErasedBeforeItIsLoadedIsNotThere) {
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 30; ++i) blocks.push_back(MakeTestBlock(i % 3, i));
  for (int way = 0; way < 3; ++way) {
    {
      TestDisk disk(&loop_, options_, parts_);
      ASSERT_TRUE(disk.Load()) << disk.status();
      for (const TestBlock& block : blocks) {
        if (!disk.Has(block)) {
          ASSERT_TRUE(disk.Write(block));
        }
      }
    }
    for (int again = 0; again < 2; ++again) {
      TestDisk disk(&loop_, options_, parts_);
      ASSERT_TRUE(disk.status().ok());
      if (again == 0 && way == 0) disk->Erase(blocks[4].record.cache, blocks[4].record.name.key);
      if (again == 0 && way == 1) disk->EraseCache(TestDigest(1));
      if (again == 0 && way == 2) disk->EraseAll();
      ASSERT_TRUE(disk.Load());
      disk->CheckInvariants();
      for (int i = 0; i < 30; ++i) {
        EXPECT_EQ(disk.Has(blocks[i]), way == 0 ? i != 4 : (way == 1 ? i % 3 != 1 : false)) << way << " " << i;
      }
    }
  }
}

TEST_P(BlockDiskTest, ABlockThatIsReadStaysUntilThen) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  const TestBlock block = MakeTestBlock(1, 1, 4, 1 << 20);
  ASSERT_TRUE(disk.Write(block));
  std::vector<std::vector<uint8_t>> pages;
  std::vector<BlockDisk::Target> targets;
  for (const DiskPage& page : block.record.pages) pages.emplace_back(page.bytes);
  for (auto& page : pages) targets.push_back({page.data(), static_cast<uint32_t>(page.size())});
  absl::Status result = absl::UnknownError("");
  disk->Read(block.record.cache, block.record.name.key, targets, [&](auto checksums) { result = checksums.status(); });
  disk->Erase(block.record.cache, block.record.name.key);
  EXPECT_FALSE(disk.Has(block));
  disk->CheckInvariants();
  EXPECT_GT(disk->use().used_bytes, 0u);
  ASSERT_TRUE(disk.Write(block));  // anew, while the old one is perhaps being read
  ASSERT_TRUE(loop_.RunUntil([&] { return !absl::IsUnknown(result); }));
  EXPECT_TRUE(absl::IsNotFound(result)) << result;
  EXPECT_TRUE(disk.Read(block).ok());
  disk->CheckInvariants();
}

TEST_P(BlockDiskTest, OtherSizesAreALoss) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  for (const bool other_total : {true, false}) {
    TestBlock block = MakeTestBlock(1, 1, 2, 100);
    block.pages = {std::vector<uint8_t>(100), std::vector<uint8_t>(200)};
    block.record.pages = {{100, false, 1}, {200, false, 2}};
    ASSERT_TRUE(disk.Write(block));
    TestBlock asked = block;
    asked.record.pages[0].bytes = other_total ? 100000 : 101;
    EXPECT_TRUE(absl::IsDataLoss(disk.Read(asked)));
    EXPECT_FALSE(disk.Has(block));
    disk->CheckInvariants();
  }
}

TEST_P(BlockDiskTest, FlippedBytesLoseThatBlockAlone) {
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 30; ++i) blocks.push_back(MakeTestBlock(1, i, 2, 5000));
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (const TestBlock& block : blocks) ASSERT_TRUE(disk.Write(block));
  }
  // Records follow one another.
  const int fd = open(Segments()[0].c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  uint64_t at = 0;
  for (int i = 0; i < 30; ++i) {
    const RecordLayout layout = RecordLayout::Of({blocks[i].record.pages[0].bytes, blocks[i].record.pages[1].bytes});
    if (i % 3 != 0) {
      const off_t where = static_cast<off_t>(at + (i % 3 == 1 ? 50 : layout.offsets[1]));
      uint8_t byte;
      ASSERT_EQ(pread(fd, &byte, 1, where), 1);
      byte ^= 4;
      ASSERT_EQ(pwrite(fd, &byte, 1, where), 1);
    }
    at += layout.bytes;
  }
  ASSERT_EQ(fsync(fd), 0);
  close(fd);
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  for (int i = 0; i < 30; ++i) {
    const absl::Status status = disk.Read(blocks[i]);
    if (i % 3 == 0) {
      EXPECT_TRUE(status.ok()) << status;
    }
    if (i % 3 != 0) {
      EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    }
    EXPECT_EQ(disk.Has(blocks[i]), i % 3 != 1);  // the header is looked at here, pages by the reader
  }
  disk->CheckInvariants();
}

TEST_P(BlockDiskTest, SegmentsThatAreCutOrGone) {
  std::vector<TestBlock> blocks;
  for (int round = 0; round < 3; ++round) {  // each in a segment of its own
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (int i = 0; i < 10; ++i) {
      blocks.push_back(MakeTestBlock(1, round * 10 + i, 1, 5000));
      ASSERT_TRUE(disk.Write(blocks.back()));
    }
  }
  const std::vector<std::string> segments = Segments();
  ASSERT_EQ(segments.size(), 3u);
  const uint64_t half = RecordLayout::Of({blocks[10].record.pages[0].bytes}).bytes;
  ASSERT_EQ(truncate(segments[1].c_str(), static_cast<off_t>(half)), 0);
  ASSERT_EQ(unlink(segments[2].c_str()), 0);
  for (int again = 0; again < 2; ++again) {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (int i = 0; i < 30; ++i) EXPECT_EQ(disk.Read(blocks[i]).ok(), i <= 10) << i;
    EXPECT_EQ(disk.metrics().errors("index").Value(), again == 0 ? 19.0 : 0.0);
    disk->CheckInvariants();
  }
  // While it is open.
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  ASSERT_EQ(truncate(segments[0].c_str(), 4096), 0);
  ASSERT_EQ(unlink(segments[1].c_str()), 0);
  EXPECT_TRUE(absl::IsDataLoss(disk.Read(blocks[9])));
  EXPECT_FALSE(disk.Has(blocks[9]));
  EXPECT_TRUE(absl::IsDataLoss(disk.Read(blocks[10])));
  EXPECT_FALSE(disk.Has(blocks[10]));
}

// One that is damaged is made anew: block_disk_rebuild_test.cc.
TEST_P(BlockDiskTest, AForeignIndexIsSetAside) {
  const auto asides = [&] {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(options_.directory)) {
      count += absl::StartsWith(entry.path().filename().string(), "set-aside-") ? 1 : 0;
    }
    return count;
  };
  const TestBlock block = MakeTestBlock(1, 1);
  size_t expected = 0;
  for (const char* const damage :
       {"CURRENT", "MANIFEST", "no manifest", "no index", "other version", "marker", "CURRENT, no marks",
        "MANIFEST, no marks", "no manifest, no marks", "no index, no marks", "marker, no marks"}) {
    {
      TestDisk disk(&loop_, options_, parts_);
      ASSERT_TRUE(disk.Load()) << disk.status();
      if (!disk.Has(block)) {
        ASSERT_TRUE(disk.Write(block));
      }
      ASSERT_TRUE(loop_.RunUntil([&] { return !std::filesystem::exists(options_.directory + "/damaged"); }));
    }
    if (absl::EndsWith(damage, "no marks")) std::filesystem::remove(options_.directory + "/marks");
    if (absl::StartsWith(damage, "marker")) {
      std::ofstream(options_.directory + "/damaged") << "";
    } else if (absl::StartsWith(damage, "no manifest")) {
      std::filesystem::remove_all(options_.directory + "/index");
      std::filesystem::create_directory(options_.directory + "/index");
      std::ofstream(options_.directory + "/index/CURRENT") << "MANIFEST-000001\n";
    } else if (absl::StartsWith(damage, "no index")) {
      std::filesystem::remove_all(options_.directory + "/index");
    } else if (std::string(damage) == "other version") {
      absl::StatusOr<std::unique_ptr<IndexDb>> db = IndexDb::Open(options_.directory + "/index", nullptr);
      ASSERT_TRUE(db.ok()) << db.status();
      (*db)->Put("meta", "kvmanager disk index 2");
      ASSERT_TRUE((*db)->Commit().ok());
    } else {
      for (const auto& entry : std::filesystem::directory_iterator(options_.directory + "/index")) {
        if (absl::StartsWith(entry.path().filename().string(), std::string(damage).substr(0, 7))) {
          std::ofstream(entry.path(), std::ios::trunc) << "garbage";
        }
      }
    }
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << damage << ": " << disk.status();
    const bool is_aside = std::string(damage) == "other version" || absl::EndsWith(damage, "no marks");
    EXPECT_EQ(disk.Read(block).ok(), !is_aside) << damage;
    EXPECT_EQ(disk.metrics().set_aside.Value(), is_aside ? 1.0 : 0.0) << damage;
    if (is_aside) expected = std::min(expected + 1, DiskFolder::kSetAsideMax);
    EXPECT_EQ(asides(), expected) << damage;
    EXPECT_EQ(disk.Write(block), is_aside);
  }
}

TEST_P(BlockDiskTest, AValueThatCannotBeReadIsDropped) {
  const TestBlock block = MakeTestBlock(1, 1), other = MakeTestBlock(1, 2);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_TRUE(disk.Write(block));
    ASSERT_TRUE(disk.Write(other));
  }
  {
    absl::StatusOr<std::unique_ptr<IndexDb>> db = IndexDb::Open(options_.directory + "/index", nullptr);
    ASSERT_TRUE(db.ok()) << db.status();
    (*db)->Put(IndexKey(block.record.cache, block.record.name.key), "no value");
    (*db)->Put("bad", "");
    ASSERT_TRUE((*db)->Commit().ok());
  }
  for (const double dropped : {2.0, 0.0}) {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_FALSE(disk.Has(block));
    EXPECT_TRUE(disk.Read(other).ok());
    EXPECT_EQ(disk.metrics().errors("index").Value(), dropped);
    EXPECT_EQ(disk.metrics().set_aside.Value(), 0.0);
  }
}

// Records that share bytes: neither is trusted.
TEST_P(BlockDiskTest, OverlappingRecordsAreDropped) {
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(MakeTestBlock(1, i, 1, 5000));
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (const TestBlock& block : blocks) ASSERT_TRUE(disk.Write(block));
  }
  {
    absl::StatusOr<std::unique_ptr<IndexDb>> db = IndexDb::Open(options_.directory + "/index", nullptr);
    ASSERT_TRUE(db.ok()) << db.status();
    IndexRecord record;
    ASSERT_TRUE((*db)
                    ->Scan([&](absl::string_view key, absl::string_view value) {
                      EXPECT_TRUE(ParseIndexRecord(key, value, &record));
                      return record.key != blocks[1].record.name.key;
                    })
                    .ok());
    record.key = TestDigest(77);
    (*db)->Put(IndexKey(record.cache, record.key), EncodeIndexValue(record));
    ASSERT_TRUE((*db)->Commit().ok());
  }
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(disk.Read(blocks[i]).ok(), i != 1);
  EXPECT_EQ(disk->use().blocks, 3u);
  disk->CheckInvariants();
}

TEST_P(BlockDiskTest, ASecondOpenerIsRefused) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  TestDisk second(&loop_, options_, parts_);
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  ASSERT_TRUE(disk.Write(MakeTestBlock(1, 1)));
  disk.Close();
  TestDisk third(&loop_, options_, parts_);
  EXPECT_TRUE(third.Load()) << third.status();
}

TEST_P(BlockDiskTest, OptionsAreChecked) {
  options_.bytes = BlockDisk::kBytesMin - 1;
  EXPECT_TRUE(absl::IsInvalidArgument(TestDisk(&loop_, options_, parts_).status()));
  options_.bytes = BlockDisk::kBytesMin;
  options_.directory = folder_.path() + "/no/parent";
  EXPECT_TRUE(absl::IsInvalidArgument(TestDisk(&loop_, options_, parts_).status()));
  options_.directory = folder_.path() + "/open";
  ASSERT_EQ(mkdir(options_.directory.c_str(), 0755), 0);
  ASSERT_EQ(chmod(options_.directory.c_str(), 0755), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(TestDisk(&loop_, options_, parts_).status()));
}

TEST_P(BlockDiskTest, AfterAnErrorNothingIsWrittenForAWhile) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  int n = 0;
  for (const char* const op : {"write", "sync"}) {
    int64_t back_off_ns = 1000000000;
    const TestBlock before = MakeTestBlock(1, n++);
    ASSERT_TRUE(disk.Write(before));
    for (int failure = 0; failure < 8; ++failure) {
      ASSERT_TRUE(SetFailpoints(absl::StrCat("disk.", op, "=1/1")).ok());
      const TestBlock block = MakeTestBlock(1, n++);
      ASSERT_TRUE(disk->CanWrite(1));
      EXPECT_FALSE(disk.Write(block));
      EXPECT_FALSE(disk.Has(block));
      EXPECT_FALSE(disk->CanWrite(1));
      EXPECT_FALSE(disk.Write(block));  // at once
      EXPECT_EQ(disk.metrics().errors(op).Value(), failure + 1.0);
      clock_.AdvanceNs(back_off_ns - 1);
      EXPECT_FALSE(disk->CanWrite(1));
      clock_.AdvanceNs(1);
      EXPECT_TRUE(disk->CanWrite(1));
      back_off_ns = std::min<int64_t>(back_off_ns * 2, 60000000000);
      ASSERT_TRUE(SetFailpoints("").ok());
      EXPECT_TRUE(disk.Read(before).ok());
      disk->CheckInvariants();
    }
    const TestBlock after = MakeTestBlock(1, n++);
    EXPECT_TRUE(disk.Write(after));
    EXPECT_TRUE(disk.Read(after).ok());
    EXPECT_TRUE(disk->CanWrite(1));
  }
}

TEST_P(BlockDiskTest, ABlockThatCannotBeReadIsNotFoundForAWhile) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  const TestBlock block = MakeTestBlock(1, 1);
  ASSERT_TRUE(disk.Write(block));
  ASSERT_TRUE(SetFailpoints("disk.read=1/1").ok());
  EXPECT_TRUE(absl::IsUnavailable(disk.Read(block)));
  ASSERT_TRUE(SetFailpoints("").ok());
  EXPECT_FALSE(disk.Has(block));
  EXPECT_TRUE(disk->CanWrite(1));
  clock_.AdvanceNs(FailedReads::kNs);
  ASSERT_TRUE(disk.Has(block));
  EXPECT_TRUE(disk.Read(block).ok());
  // Written anew meanwhile, it takes its own place.
  ASSERT_TRUE(SetFailpoints("disk.read=1/1").ok());
  EXPECT_TRUE(absl::IsUnavailable(disk.Read(block)));
  ASSERT_TRUE(SetFailpoints("").ok());
  ASSERT_TRUE(disk.Write(block));
  EXPECT_TRUE(disk.Read(block).ok());
  EXPECT_EQ(disk->use().blocks, 1u);
  disk->CheckInvariants();
}

}  // namespace
}  // namespace kvmanager::testing
