// What somebody else does to a disk's files: changed bytes, a damaged index, a folder that was removed. What is lost,
// what the log and state() say of it, and what is not touched.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kvmanager/base/captured_log_testing.h"
#include "kvmanager/base/log_limit.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/disk_folder.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/index_db.h"
#include "kvmanager/disk/record.h"

namespace kvmanager::testing {
namespace {

class BlockDiskFaultsTest : public ::testing::Test {
 protected:
  BlockDiskFaultsTest() {
    options_.directory = folder_.path() + "/d";
    options_.bytes = BlockDisk::kBytesMin;
    parts_.clock = &clock_;
  }

  std::string Segment(int number) const { return absl::StrFormat("%s/segments/%08d", options_.directory, number); }
  std::vector<std::string> Names(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  // All together.
  void Write(TestDisk* disk, const std::vector<TestBlock>& blocks) {
    size_t durable = 0;
    for (const TestBlock& block : blocks) {
      (*disk)->Write(block.record, "p", block.sources(), [&](bool ok) { durable += ok ? 1 : 0; });
    }
    ASSERT_TRUE(loop_.RunUntil([&] { return durable == blocks.size(); }));
  }
  static std::string KeyOf(const TestBlock& block) { return block.record.name.key.ToHex(8); }

  TestFolder folder_;
  TestLoop loop_;
  ManualClock clock_;
  BlockDisk::Options options_;
  BlockDiskParts parts_;
};

TEST_F(BlockDiskFaultsTest, ABadRecordHasALineThatSaysWhereItIs) {
  constexpr int kBlocks = 47;
  std::vector<TestBlock> blocks;
  std::vector<uint64_t> places;
  uint64_t end = 0;
  for (int i = 0; i < kBlocks; ++i) {
    blocks.push_back(MakeTestBlock(1, i, 2, 5000));
    places.push_back(end);
    end += RecordLayout::Of({blocks[i].record.pages[0].bytes, blocks[i].record.pages[1].bytes}).bytes;
  }
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    for (const TestBlock& block : blocks) ASSERT_TRUE(disk.Write(block));
  }
  for (const uint64_t place : places) Flip(Segment(1), place + 50);  // in its key
  CapturedLog log;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  for (const TestBlock& block : blocks) EXPECT_TRUE(absl::IsDataLoss(disk.Read(block)));
  EXPECT_EQ(disk.metrics().errors("loss").Value(), double{kBlocks});
  EXPECT_EQ(log.Lines({"is bad"}).size(), size_t{LogLimit::kLinesMax});
  for (int i = 0; i < LogLimit::kLinesMax; ++i) {
    const std::string where = absl::StrCat("at byte ", places[i], " of ", Segment(1), ".");
    EXPECT_EQ(log.Lines({"block " + KeyOf(blocks[i]), "record header: it has checksum ", where}).size(), 1u) << i;
  }
  clock_.AdvanceNs(LogLimit::kNs);
  disk->Look();
  disk->Look();
  EXPECT_EQ(log.Lines({absl::StrCat(kBlocks - LogLimit::kLinesMax, " more blocks of the disk were bad")}).size(), 1u);
  disk->CheckInvariants();
}

TEST_F(BlockDiskFaultsTest, ABadPageHasALineAndLosesItsBlock) {
  const TestBlock bad = MakeTestBlock(1, 1, 3, 5000), good = MakeTestBlock(1, 2, 3, 5000);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_TRUE(disk.Write(good));
    ASSERT_TRUE(disk.Write(bad));
    std::vector<DiskLoss> losses;
    disk->OnGone([&](const CacheDigest&, const BlockKey& key, DiskLoss loss) {
      EXPECT_EQ(key, bad.record.name.key);
      losses.push_back(loss);
    });
    CapturedLog log;
    const auto erase = [&] { disk->EraseBad(bad.record.cache, bad.record.name.key, {.layer = 2, .checksum = 0xabc}); };
    erase();
    erase();  // it is there no more
    EXPECT_EQ(losses, std::vector<DiskLoss>{DiskLoss::kChecksum});
    EXPECT_FALSE(disk.Has(bad));
    EXPECT_EQ(disk.metrics().errors("loss").Value(), 1.0);
    EXPECT_EQ(log.Lines({"is bad"}).size(), 1u);
    EXPECT_EQ(log.Lines({"block " + KeyOf(bad),
                         "the page of layer 2 has checksum 0000000000000abc, its header says 0000000000000000",
                         " of " + Segment(1) + "."})
                  .size(),
              1u);
  }
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_FALSE(disk.Has(bad));
  EXPECT_TRUE(disk.Read(good).ok());
}

// RocksDB finds a part of it, and names the file that is wrong.
TEST_F(BlockDiskFaultsTest, ADamagedIndexIsReadInPartAndMadeAnewByTheNextStart) {
  std::vector<TestBlock> blocks;
  for (int i = 0; i < 1000; ++i) blocks.push_back(MakeTestBlock(1, i, 1, 100));
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_NO_FATAL_FAILURE(Write(&disk, blocks));
  }
  {
    TestDisk disk(&loop_, options_, parts_);  // which puts the log's records into a table
    ASSERT_TRUE(disk.Load()) << disk.status();
  }
  std::filesystem::path table;
  for (const auto& entry : std::filesystem::directory_iterator(options_.directory + "/index")) {
    if (entry.path().extension() != ".sst") continue;
    if (table.empty() || entry.file_size() > std::filesystem::file_size(table)) table = entry.path();
  }
  ASSERT_FALSE(table.empty());
  Flip(table, std::filesystem::file_size(table) / 2);
  {
    CapturedLog log;
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_GT(disk->use().blocks, 0u);
    EXPECT_LT(disk->use().blocks, blocks.size());
    EXPECT_STREQ(disk->state(), "its index is damaged: nothing is written until the next start");
    EXPECT_FALSE(disk->TakesWrites());
    EXPECT_FALSE(disk->TakesWritesWithin(int64_t{1} << 60));
    EXPECT_FALSE(disk.Write(MakeTestBlock(2, 1)));
    EXPECT_EQ(disk.metrics().errors("index").Value(), 1.0);
    EXPECT_EQ(
        log.Lines({"the disk's index in " + options_.directory + " is damaged", table.filename(), "restart"}).size(),
        1u);
  }
  CapturedLog log;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_EQ(disk->use().blocks, blocks.size());
  EXPECT_STREQ(disk->state(), "ready");
  EXPECT_EQ(disk.metrics().set_aside.Value(), 0.0);
  EXPECT_EQ(disk.metrics().errors("index").Value(), 1.0);
  EXPECT_EQ(
      log.Lines({"the disk's index in " + options_.directory + " is damaged", table.filename(), "made anew"}).size(),
      1u);
  EXPECT_TRUE(disk.Read(blocks[0]).ok());
  EXPECT_TRUE(disk.Write(MakeTestBlock(2, 1)));
}

TEST_F(BlockDiskFaultsTest, AnIndexOfAnotherVersionCanBePutBack) {
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
  }
  {
    absl::StatusOr<std::unique_ptr<IndexDb>> db = IndexDb::Open(options_.directory + "/index", nullptr);
    ASSERT_TRUE(db.ok()) << db.status();
    (*db)->Put("meta", "kvmanager disk index 2");
    ASSERT_TRUE((*db)->Commit().ok());
  }
  CapturedLog log;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  const auto lines = log.Lines({"of another version", "kvmanager disk index 2", "move those back"});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_FALSE(absl::StrContains(lines[0], "damaged"));
}

TEST_F(BlockDiskFaultsTest, AfterAnErrorItSaysHowSoonItTakesWrites) {
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_TRUE(disk->TakesWritesWithin(0));
  const TestBlock block = MakeTestBlock(1, 1);
  ASSERT_TRUE(disk.Write(block));
  ASSERT_EQ(unlink(Segment(1).c_str()), 0);
  ASSERT_FALSE(disk.Write(MakeTestBlock(1, 2)));
  EXPECT_FALSE(disk->TakesWrites());
  EXPECT_FALSE(disk->TakesWritesWithin(999999999));
  EXPECT_TRUE(disk->TakesWritesWithin(1000000000));
}

// Only folders that this makes are removed, and nothing behind a link.
TEST_F(BlockDiskFaultsTest, OldFoldersThatWereSetAsideAreRemoved) {
  namespace fs = std::filesystem;
  const fs::path directory = options_.directory, outside = folder_.path() + "/outside";
  const auto make = [&](const fs::path& path) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "x";
  };
  fs::create_directory(directory);
  fs::permissions(directory, fs::perms::owner_all);
  make(directory / "damaged");
  make(outside / "file");
  // Ours: the two newest stay, with the one that is to come.
  make(directory / "set-aside-20200101T000000Z/index/1.sst");
  make(directory / "set-aside-20200101T000000Z/segments/00000001");
  fs::create_symlink(outside / "file", directory / "set-aside-20200101T000000Z/segments/00000002");
  make(directory / "set-aside-20210101T000000Z/segments/00000001");
  make(directory / "set-aside-20210101T000000Z-2/segments/00000001");
  make(directory / "set-aside-20210101T000000Z-10/segments/00000001");
  // Ours, with something that is not.
  make(directory / "set-aside-20180101T000000Z/index/1.sst");
  make(directory / "set-aside-20180101T000000Z/notes");
  fs::create_directory(directory / "set-aside-20180102T000000Z");
  fs::create_directory_symlink(outside, directory / "set-aside-20180102T000000Z/index");
  // Not ours.
  const std::vector<std::string> foreign = {"set-aside-",
                                            "set-aside-20170101T000000",
                                            "set-aside-20170101T000000Zx",
                                            "set-aside-20170101T000000Z-",
                                            "set-aside-20170101T000000Z-01",
                                            "set-aside-20170101T000000Z-0",
                                            "set-aside-20170101T000000Z-1001",
                                            "set-aside-x"};
  for (const std::string& name : foreign) make(directory / name / "index/1.sst");
  fs::create_directory_symlink(outside, directory / "set-aside-20160101T000000Z");
  std::ofstream(directory / "set-aside-20150101T000000Z") << "a file";

  CapturedLog log;
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_EQ(disk.metrics().set_aside.Value(), 1.0);
  std::vector<std::string> names = Names(directory);
  std::erase_if(names, [](const std::string& name) { return !absl::StartsWith(name, "set-aside-202"); });
  ASSERT_EQ(names.size(), size_t{DiskFolder::kSetAsideMax});
  EXPECT_EQ(names[0], "set-aside-20210101T000000Z-10");
  for (const char* const gone : {"20200101T000000Z", "20210101T000000Z", "20210101T000000Z-2"}) {
    EXPECT_EQ(log.Lines({absl::StrCat("/set-aside-", gone, " is removed")}).size(), 1u) << gone;
  }
  for (const char* const stays : {"20180101T000000Z", "20180102T000000Z"}) {
    EXPECT_EQ(log.Lines({absl::StrCat("/set-aside-", stays, " could not be removed")}).size(), 1u) << stays;
  }
  EXPECT_EQ(Names(directory / "set-aside-20180101T000000Z"), std::vector<std::string>{"notes"});
  for (const std::string& name : foreign) EXPECT_TRUE(fs::exists(directory / name / "index/1.sst")) << name;
  EXPECT_TRUE(fs::is_symlink(directory / "set-aside-20160101T000000Z"));
  EXPECT_TRUE(fs::exists(directory / "set-aside-20150101T000000Z"));
  EXPECT_EQ(Names(outside), std::vector<std::string>{"file"});
}

TEST_F(BlockDiskFaultsTest, ASegmentThatIsRemovedWhileItIsWrittenIsNoticed) {
  const TestBlock before = MakeTestBlock(1, 1), lost = MakeTestBlock(1, 2), after = MakeTestBlock(1, 3);
  {
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    ASSERT_TRUE(disk.Write(before));
    CapturedLog log;
    ASSERT_EQ(unlink(Segment(1).c_str()), 0);
    EXPECT_FALSE(disk.Write(lost));
    EXPECT_EQ(disk.metrics().errors("sync").Value(), 1.0);
    EXPECT_EQ(log.Lines({"the disk failed", Segment(1) + " was removed"}).size(), 1u);
    EXPECT_STREQ(disk->state(), "nothing is written for a while, after an error");
    clock_.AdvanceNs(1000000000);
    EXPECT_TRUE(disk.Write(after));
    disk->CheckInvariants();
  }
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  EXPECT_FALSE(disk.Has(before));
  EXPECT_FALSE(disk.Has(lost));
  EXPECT_TRUE(disk.Read(after).ok());
}

TEST_F(BlockDiskFaultsTest, AFolderThatIsRemovedIsNoticed) {
  for (const char* const what : {"", "/index", "/segments", "/lock"}) {
    SCOPED_TRACE(what);
    const TestBlock block = MakeTestBlock(1, 1), more = MakeTestBlock(1, 2);
    {
      TestDisk disk(&loop_, options_, parts_);
      ASSERT_TRUE(disk.Load()) << disk.status();
      if (!disk.Has(block)) {
        ASSERT_TRUE(disk.Write(block));
      }
      CapturedLog log;
      disk->Look();
      ASSERT_TRUE(disk.Read(block).ok());  // behind the look, perhaps
      std::filesystem::remove_all(options_.directory + what);
      disk->Look();
      ASSERT_TRUE(loop_.RunUntil([&] { return !disk->TakesWrites(); }));
      EXPECT_STREQ(disk->state(), "its folder was removed or replaced: nothing is written until the next start");
      EXPECT_FALSE(disk->TakesWritesWithin(int64_t{1} << 60));
      EXPECT_FALSE(disk.Write(more));
      EXPECT_TRUE(disk.Read(block).ok());  // of the file that is open
      for (int again = 0; again < 3; ++again) disk->Look();
      disk.Close();
      EXPECT_EQ(disk.metrics().errors("write").Value(), 1.0);
      EXPECT_EQ(log.Lines({"the disk's folder " + options_.directory, " is gone"}).size(), 1u);
    }
    TestDisk disk(&loop_, options_, parts_);
    ASSERT_TRUE(disk.Load()) << disk.status();
    EXPECT_STREQ(disk->state(), "ready");
    ASSERT_FALSE(disk.Has(more));
  }
}

// It is another daemon's by then.
TEST_F(BlockDiskFaultsTest, AFolderThatTookThePlaceIsLeftAlone) {
  const TestBlock block = MakeTestBlock(1, 1, 1, 8 << 20);
  ASSERT_GT(block.pages[0].size(), size_t{1} << 20);  // its segment is removed once it is empty
  TestDisk disk(&loop_, options_, parts_);
  ASSERT_TRUE(disk.Load()) << disk.status();
  ASSERT_TRUE(disk.Write(block));
  std::filesystem::rename(options_.directory, options_.directory + ".old");
  std::filesystem::create_directories(options_.directory + "/segments");
  std::filesystem::create_directory(options_.directory + "/index");
  std::ofstream(options_.directory + "/lock") << "";
  std::ofstream(Segment(1)) << "theirs";
  CapturedLog log;
  disk->Look();
  ASSERT_TRUE(loop_.RunUntil([&] { return !disk->TakesWrites(); }));
  EXPECT_EQ(log.Lines({"the disk's folder " + options_.directory, " is another than at the start"}).size(), 1u);
  EXPECT_EQ(disk->EraseAll(), 1u);
  disk.Close();
  EXPECT_EQ(std::filesystem::file_size(Segment(1)), 6u);
  EXPECT_EQ(Names(options_.directory + "/segments").size(), 1u);
}

TEST_F(BlockDiskFaultsTest, AnErrorAtTheStartNamesTheOptionAndTheFolder) {
  ASSERT_EQ(mkdir(options_.directory.c_str(), 0700), 0);
  std::ofstream(options_.directory + "/index") << "a file where RocksDB wants a folder";
  const absl::Status status = TestDisk(&loop_, options_, parts_).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(DetailOf(status).field, "--disk-path");
  EXPECT_TRUE(absl::StartsWith(status.message(), "--disk-path is " + options_.directory + " (")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "mounted read-write")) << status;
}

}  // namespace
}  // namespace kvmanager::testing
