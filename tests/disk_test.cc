// A daemon with a disk: what was published outlives kill -9, SIGTERM and the host's pool, and nothing else comes back.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
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

TEST_F(DiskTest, EveryCodecsBlocksOutliveAKill) {
  const char* const codecs[] = {"raw", "hack:k_bits=3,v_bits=2", "hack:k_bits=4,v_bits=3", "pq"};
  Start();
  for (uint64_t i = 0; i < std::size(codecs); ++i) {
    const CacheOptions options = SmallCache(codecs[i]);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, {i + 1, Kind::kNormal, options}, 9);
  }
  ASSERT_TRUE(AllWritten());
  EXPECT_EQ(Metric("kvmanager_disk_blocks"), 36);
  Kill();
  Start();
  for (uint64_t i = 0; i < std::size(codecs); ++i) {
    SCOPED_TRACE(codecs[i]);
    const CacheOptions options = SmallCache(codecs[i]);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    const Source source{i + 1, Kind::kNormal, options};
    ASSERT_TRUE(Eventually([&] { return Found(*cache, source, 9) == 9; }));
    EXPECT_EQ(Compare(*cache, source, 9), 9);
    EXPECT_EQ(Found(*cache, {99, Kind::kNormal, options}, 9), 0);
  }
  EXPECT_EQ(Metric("kvmanager_disk_written_blocks_total"), 0);
}

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

TEST_F(DiskTest, TenThousandBlocksOutliveAKill) {
  constexpr uint64_t kTexts = 100;
  constexpr int kBlocks = 100;
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 0);
  Start(128 << 20);
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    for (uint64_t seed = 1; seed <= kTexts; ++seed) {
      const Source source{seed, Kind::kNormal, options};
      Publish(*cache, source, kBlocks);
      ASSERT_EQ(Found(*cache, source, kBlocks), kBlocks);
    }
  }
  ASSERT_TRUE(AllWritten());
  Kill();
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const auto found = [&] {
    int blocks = 0;
    for (uint64_t seed = 1; seed <= kTexts; ++seed) blocks += Found(*cache, {seed, Kind::kNormal, options}, kBlocks);
    return blocks;
  };
  constexpr int kAll = kTexts * kBlocks;
  EXPECT_TRUE(Eventually([&] { return found() >= kAll - kAll / 1000; })) << found() << " blocks";
  for (uint64_t seed = 1; seed <= kTexts; seed += 7) {
    const Source source{seed, Kind::kNormal, options};
    EXPECT_EQ(Compare(*cache, source, kBlocks), Found(*cache, source, kBlocks)) << seed;
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
  EXPECT_EQ(Metric("kvmanager_disk_blocks"), 9);
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
    ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_disk_blocks") == 0; }));
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

// What was known to be durable is there after every kill, whenever it comes.
TEST_F(DiskTest, KillsAtRandomLoseNothingThatWasDurable) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 0);
  std::map<uint64_t, int> durable;  // blocks of each text
  uint64_t next = 1;
  for (int round = 0; round < 12; ++round) {
    Start(32 << 20);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    for (const auto& [text, blocks] : durable) {
      const Source source{text, Kind::kNormal, options};
      EXPECT_TRUE(Eventually([&] { return Found(*cache, source, blocks) == blocks; })) << "text " << text;
    }
    for (int i = 0; i < 3 && !durable.empty(); ++i) {
      auto which = durable.begin();
      std::advance(which, random() % durable.size());
      EXPECT_EQ(Compare(*cache, {which->first, Kind::kNormal, options}, which->second), which->second);
    }
    std::map<uint64_t, int> published;
    for (uint32_t texts = 4 + random() % 20; texts > 0; --texts) {
      const int blocks = 1 + static_cast<int>(random() % 6);
      Publish(*cache, {next, Kind::kNormal, options}, blocks);
      published[next++] = blocks;
      if (random() % 8 != 0) continue;
      ASSERT_TRUE(AllWritten());
      durable.merge(published);
    }
    cache.reset();
    Kill();
  }
  EXPECT_GT(durable.size(), 10u);
}

}  // namespace
}  // namespace kvmanager::testing
