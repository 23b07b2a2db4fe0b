#include "kvmanager/memory/region.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <sstream>

namespace kvmanager {
namespace {

Region::Options Sized(size_t bytes, Region::Sharing sharing) {
  Region::Options options;
  options.bytes = bytes;
  options.sharing = sharing;
  return options;
}

TEST(Region, RefusesSizesOutOfRange) {
  EXPECT_EQ(Region::Create(Sized(0, Region::Sharing::kWritable)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Region::Create(Sized(Region::kBytesMax + 1, Region::Sharing::kWritable)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Region, RefusesMoreThanTheHostHas) {
  EXPECT_EQ(Region::Create(Sized(Region::kBytesMax, Region::Sharing::kWritable)).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(Region, CachedFilesDoNotCountAsUsed) {
  std::istringstream stat("anon 1000\nfile 900\nshmem 200\ninactive_file 300\nactive_file 40\nslab_reclaimable 5\n");
  EXPECT_EQ(ReclaimableBytes(stat), 345u);
  std::istringstream nothing("");
  EXPECT_EQ(ReclaimableBytes(nothing), 0u);
}

TEST(Region, ArenaIsWritableByOthersAndNeverChangesSize) {
  auto region = Region::Create(Sized(100000, Region::Sharing::kWritable));
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_GE((*region)->bytes(), 100000u);
  for (size_t i = 0; i < (*region)->bytes(); ++i) ASSERT_EQ((*region)->data()[i], 0);
  EXPECT_NE(ftruncate((*region)->fd(), 1), 0);
  EXPECT_NE(ftruncate((*region)->fd(), 1 << 20), 0);
  auto other = Region::Map(dup((*region)->fd()), (*region)->bytes(), /*writable=*/true);
  ASSERT_TRUE(other.ok()) << other.status();
  (*other)->data()[99999] = 7;
  EXPECT_EQ((*region)->data()[99999], 7);
}

TEST(Region, ReadOnlyRegionIsWrittenByItsOwnerAlone) {
  auto region = Region::Create(Sized(4096, Region::Sharing::kReadOnly));
  ASSERT_TRUE(region.ok()) << region.status();
  auto reader = Region::Map(dup((*region)->fd()), 4096, /*writable=*/false);
  ASSERT_TRUE(reader.ok()) << reader.status();
  (*region)->data()[17] = 3;
  EXPECT_EQ((*reader)->data()[17], 3);
  EXPECT_FALSE(Region::Map(dup((*region)->fd()), 4096, /*writable=*/true).ok());
  EXPECT_NE(pwrite((*region)->fd(), "x", 1, 0), 1);
}

TEST(Region, KeptRegionIsTakenOverByItsKeepersDescriptorAlone) {
  auto region = Region::Create(Sized(8192, Region::Sharing::kKept));
  ASSERT_TRUE(region.ok()) << region.status();
  const int reads = dup((*region)->fd()), keeps = dup((*region)->keeper_fd());
  EXPECT_FALSE(Region::Map(dup(reads), 8192, /*writable=*/true).ok());
  EXPECT_NE(pwrite(reads, "x", 1, 0), 1);
  EXPECT_NE(ftruncate(keeps, 4096), 0);
  struct stat info;
  ASSERT_EQ(fstat(reads, &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0400u);  // of another user nobody opens it for writing by way of /proc
  (*region)->data()[8191] = 5;
  region->reset();
  EXPECT_EQ(Region::TakeOver(dup(keeps), 4096).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Region::TakeOver(dup(keeps), 12288).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(Region::TakeOver(dup(reads), 8192).ok());
  auto taken = Region::TakeOver(keeps, 8192);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ((*taken)->data()[8191], 5);
  (*taken)->data()[0] = 6;
  auto reader = Region::Map(reads, 8192, /*writable=*/false);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->data()[0], 6);
  EXPECT_GE((*taken)->fd(), 0);
  EXPECT_FALSE(Region::Map(dup((*taken)->fd()), 8192, /*writable=*/true).ok());
}

TEST(Region, MapRefusesWhatCouldShrinkOrIsTooSmall) {
  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, 4096), 0);
  EXPECT_EQ(Region::Map(unsealed, 4096, true).status().code(), absl::StatusCode::kFailedPrecondition);
  auto region = Region::Create(Sized(4096, Region::Sharing::kWritable));
  ASSERT_TRUE(region.ok());
  EXPECT_EQ(Region::Map(dup((*region)->fd()), 4097, true).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Region::Map(dup((*region)->fd()), 0, true).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Region, FallsBackWhereHugePagesCannotBeHad) {
  Region::Options options = Sized(5 << 20, Region::Sharing::kReadOnly);
  options.huge_pages = true;
  auto region = Region::Create(options);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ((*region)->bytes(), 6u << 20);
  std::memset((*region)->data(), 1, (*region)->bytes());
}

}  // namespace
}  // namespace kvmanager
