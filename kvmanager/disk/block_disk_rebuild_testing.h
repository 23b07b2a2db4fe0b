#ifndef KVMANAGER_DISK_BLOCK_DISK_REBUILD_TESTING_H_
#define KVMANAGER_DISK_BLOCK_DISK_REBUILD_TESTING_H_

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/disk_testing.h"
#include "kvmanager/disk/record.h"

namespace kvmanager::testing {

/// A file system that gives nothing back: what was erased is still there.
class NothingGoes final : public RealFiles {
 public:
  int Reserve(int fd, uint64_t offset, uint64_t bytes) override { return 0; }
  int Punch(int fd, uint64_t offset, uint64_t bytes) override { return -EOPNOTSUPP; }
  int Unlink(const std::string& path) override { return unlink_result; }

  int unlink_result = 0;
};

/// A disk whose index a test removes, so that the next one makes it anew from the records.
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
  void RemoveIndex() { std::filesystem::remove_all(options_.directory + "/index"); }
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

}  // namespace kvmanager::testing

#endif  // KVMANAGER_DISK_BLOCK_DISK_REBUILD_TESTING_H_
