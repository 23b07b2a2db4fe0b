// A daemon with a disk: what it writes when it drains, a working set beyond the host's pool, damage, purges.
// outlive_test kills it.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/restarted_daemon.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;

class DiskTest : public RestartedDaemonTest {
 protected:
  DiskTest() { flags_ = {"--disk-path", disk_, "--disk-bytes", "4GiB"}; }
  bool AllWritten() {
    return Eventually([&] { return Metric("kvmanager_disk_unwritten_blocks") == 0; }, 60000);
  }
  std::vector<std::filesystem::path> Segments() const {
    std::vector<std::filesystem::path> files;
    for (const auto& each : std::filesystem::directory_iterator(disk_ + "/segments")) files.push_back(each.path());
    return files;
  }

  const std::string disk_ = directory_.path() + "/disk";
};

TEST_F(DiskTest, ADaemonThatDrainsWritesWhatIsLeft) {
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2");
  Start();
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    for (uint64_t seed = 1; seed <= 40; ++seed) Publish(*cache, {seed, Kind::kNormal, options}, 4);
  }
  client_.reset();
  ASSERT_OK_AND_ASSIGN(const int status, daemon_->Terminate());
  EXPECT_EQ(status, 0);
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const Source source{seed, Kind::kNormal, options};
    EXPECT_TRUE(Eventually([&] { return Found(*cache, source, 4) == 4; })) << seed;
  }
}

// Four times what the host's pool holds.
TEST_F(DiskTest, AWorkingSetBeyondThePoolIsReadBackEqual) {
  const CacheOptions options = SmallCache("raw", 0);
  const uint64_t page_bytes = uint64_t{kPageTokens} * 2 * 64 * 2 * 2, block_bytes = page_bytes * 2;
  constexpr uint64_t kPool = 16 << 20;
  constexpr int kBlocks = 8;
  const uint64_t texts = 4 * kPool / (kBlocks * block_bytes);
  Start(kPool);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  for (uint64_t seed = 1; seed <= texts; ++seed) {
    Publish(*cache, {seed, Kind::kNormal, options}, kBlocks);
    if (seed % 8 != 0) continue;
    ASSERT_TRUE(AllWritten());  // the host's blocks go once they are written
  }
  ASSERT_TRUE(AllWritten());
  EXPECT_EQ(Metric("kvmanager_disk_blocks"), double(texts * kBlocks));
  for (uint64_t seed = 1; seed <= texts; ++seed) {
    ASSERT_EQ(Compare(*cache, {seed, Kind::kNormal, options}, kBlocks), kBlocks) << seed;
  }
  EXPECT_GT(Metric("kvmanager_disk_read_blocks_total"), double(texts * kBlocks / 2));
}

TEST_F(DiskTest, AFlippedByteLosesItsBlock) {
  const CacheOptions options = SmallCache("raw", 0);
  Start();
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    for (uint64_t seed = 1; seed <= 10; ++seed) Publish(*cache, {seed, Kind::kNormal, options}, 1);
    ASSERT_TRUE(AllWritten());
  }
  Kill();
  const auto segments = Segments();
  ASSERT_FALSE(segments.empty());
  int flipped = 0;
  for (const auto& path : segments) {
    // In the middle of its first record, if it has one.
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(20000);
    char byte = 0;
    if (!file.get(byte)) continue;
    file.seekp(20000);
    file.put(static_cast<char>(byte ^ 0x10));
    ++flipped;
  }
  ASSERT_EQ(flipped, 1);
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_disk_blocks") == 10; }));
  int found = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) found += Compare(*cache, {seed, Kind::kNormal, options}, 1);
  EXPECT_EQ(found, 9);
  EXPECT_EQ(Metric("kvmanager_checksum_failures_total"), 1);
  EXPECT_EQ(Metric("kvmanager_disk_errors_total"), 1);
  EXPECT_EQ(Metric("kvmanager_disk_blocks"), 9);
  // The log says which block, where it was and what was wrong; an explanation, how it went.
  int lost = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const std::vector<BlockName> names = Names(*cache, {seed, Kind::kNormal, options}, 1);
    ASSERT_OK_AND_ASSIGN(const client::Explanation all, client_->Explain(cache->description().id, names));
    ASSERT_EQ(all.blocks.size(), 1u);
    if (all.blocks[0].place != client::BlockPlace::kNowhere) continue;
    ++lost;
    EXPECT_EQ(all.blocks[0].loss, client::BlockLoss::kChecksum);
    EXPECT_EQ(all.blocks[0].tier, "disk");
    EXPECT_TRUE(log_.Says("block " + names[0].key.ToHex(8) + " of the disk is bad: the page of layer "));
    EXPECT_TRUE(log_.Says("its record is at byte 0 of " + disk_ + "/segments/"));
  }
  EXPECT_EQ(lost, 1);
}

// What will never be written is not waited for.
TEST_F(DiskTest, AFolderThatIsRemovedIsNoticedAndHoldsUpNoEnd) {
  const CacheOptions options = SmallCache("raw", 0);
  Start(64 << 20, {"--drain-s", "60"});
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, {1, Kind::kNormal, options}, 4);
    ASSERT_TRUE(AllWritten());
    std::filesystem::remove_all(disk_);
    ASSERT_TRUE(Eventually([&] {
      const auto status = client_->Status();
      return status.ok() && status->disk.has_value() && status->disk->state.find("removed") != std::string::npos;
    }));
    EXPECT_TRUE(log_.Says("the disk's folder " + disk_ + " was removed or replaced"));
    EXPECT_EQ(Metric("kvmanager_disk_errors_total"), 1);
    const Source late{2, Kind::kNormal, options};
    Publish(*cache, late, 4);
    EXPECT_EQ(Found(*cache, late, 4), 4);  // in memory
    EXPECT_EQ(Metric("kvmanager_disk_unwritten_blocks"), 4);
  }
  client_.reset();
  ASSERT_OK_AND_ASSIGN(const int status, daemon_->Terminate(/*deadline_ms=*/20000));
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(log_.Says("4 blocks are not on the disk"));
}

TEST_F(DiskTest, APurgeOutlivesAKill) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start();
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, source, 4);
    ASSERT_TRUE(AllWritten());
    ASSERT_OK(client_->Purge(Client::kAllCaches));
  }
  Kill();
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  EXPECT_EQ(Compare(*cache, source, 4), 0);
}

TEST_F(DiskTest, TwoDaemonsDoNotShareAFolder) {
  Start();
  DaemonOptions options;
  options.program = log_.program();
  options.more_flags = {"--disk-path", disk_, "--disk-bytes", "4GiB"};
  EXPECT_FALSE(DaemonProcess::Start(options).ok());
  EXPECT_TRUE(log_.Says("--disk-path"));
  ASSERT_OK_AND_ASSIGN(const auto status, client_->Status());
  ASSERT_TRUE(status.disk.has_value());
  EXPECT_EQ(status.disk->path, disk_);
  EXPECT_EQ(status.disk->state, "ready");
}

}  // namespace
}  // namespace kvmanager::testing
