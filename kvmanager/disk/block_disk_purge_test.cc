// What a disk's purges mark, so that an index that is made anew from its records has nothing of what was purged.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "kvmanager/base/captured_log_testing.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/block_disk_rebuild_testing.h"
#include "kvmanager/disk/disk_io.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/power_cut_testing.h"
#include "kvmanager/disk/record_marks.h"

namespace kvmanager::testing {
namespace {

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

using BlockDiskPurgeTest = BlockDiskRebuildTest;

// Of a disk that nothing else is asked of.
TEST_F(BlockDiskPurgeTest, APurgeThatWasRefusedIsTriedAgain) {
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

TEST_F(BlockDiskPurgeTest, WhatWasPurgedStaysSo) {
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
TEST_F(BlockDiskPurgeTest, APurgeOutlivesAPowerCutAndTheIndex) {
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
TEST_F(BlockDiskPurgeTest, MarksGoOnceTheBytesHave) {
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

TEST_F(BlockDiskPurgeTest, AFlippedByteOfTheMarks) {
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

}  // namespace
}  // namespace kvmanager::testing
