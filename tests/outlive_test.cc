// What is published outlives its daemon: on a disk, or in memory that a keeper holds. The same tests for both.
#include <chrono>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/keep/keeper_testing.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/restarted_daemon.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::CreatedSequence;

enum class Where { kDisk, kMemory };

class OutliveTest : public RestartedDaemonTest, public ::testing::WithParamInterface<Where> {
 protected:
  OutliveTest() {
    if (GetParam() == Where::kDisk) {
      flags_ = {"--disk-path", directory_.path() + "/disk", "--disk-bytes", "4GiB"};
    } else {
      flags_ = {"--state-dir", state_, "--state-keep-s", "60"};
    }
  }
  void TearDown() override {
    RestartedDaemonTest::TearDown();
    daemon_.reset();
    if (GetParam() == Where::kMemory) KillKeeperOf(state_);
  }

  // All that is published outlives the daemon from now on.
  bool AllSafe() {
    return Eventually(
        [&] {
          const auto page = Scrape(*daemon_);
          if (!page.ok()) return false;
          if (GetParam() == Where::kDisk) return page->Sum("kvmanager_disk_unwritten_blocks") == 0;
          return page->Sum("kvmanager_recorded_blocks") == page->Sum("kvmanager_published_blocks");
        },
        60000);
  }

 private:
  const std::string state_ = directory_.path() + "/state";
};

TEST_P(OutliveTest, EveryCodecsBlocksOutliveAKillAndASigterm) {
  const char* const codecs[] = {"raw", "hack:k_bits=3,v_bits=2", "hack:k_bits=4,v_bits=3", "pq"};
  Start();
  for (uint64_t i = 0; i < std::size(codecs); ++i) {
    const CacheOptions options = SmallCache(codecs[i]);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, {i + 1, Kind::kNormal, options}, 9);
  }
  ASSERT_TRUE(AllSafe());
  const bool on_disk = GetParam() == Where::kDisk;
  if (on_disk) EXPECT_EQ(Metric("kvmanager_disk_blocks"), 36);
  for (const bool gently : {false, true}) {
    SCOPED_TRACE(gently);
    if (gently) {
      client_.reset();
      ASSERT_OK_AND_ASSIGN(const int status, daemon_->Terminate());
      EXPECT_EQ(status, 0);
    } else {
      Kill();
    }
    Start();
    EXPECT_EQ(Metric("kvmanager_recovered_blocks_total"), on_disk ? 0 : 36);
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
    EXPECT_EQ(Metric("kvmanager_unrecovered_blocks_total"), 0);
    EXPECT_EQ(Metric("kvmanager_unclaimed_blocks"), 0);
  }
}

TEST_P(OutliveTest, TenThousandBlocksOutliveAKill) {
  constexpr uint64_t kTexts = 100;
  constexpr int kBlocks = 100, kAll = kTexts * kBlocks;
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 0);
  Start(128 << 20);
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    for (uint64_t seed = 1; seed <= kTexts; ++seed) Publish(*cache, {seed, Kind::kNormal, options}, kBlocks);
  }
  ASSERT_TRUE(AllSafe());
  ASSERT_EQ(Metric("kvmanager_published_blocks"), kAll);
  Kill();
  const auto begin = std::chrono::steady_clock::now();
  Start(GetParam() == Where::kDisk ? 64 << 20 : 128 << 20);  // memory that is kept has its size
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source first{1, Kind::kNormal, options};
  ASSERT_TRUE(Eventually([&] { return Found(*cache, first, kBlocks) == kBlocks; }));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("the first prefix was hit %.3f s after the daemon was started\n", seconds.count());
  const auto found = [&] {
    int blocks = 0;
    for (uint64_t seed = 1; seed <= kTexts; ++seed) blocks += Found(*cache, {seed, Kind::kNormal, options}, kBlocks);
    return blocks;
  };
  EXPECT_TRUE(Eventually([&] { return found() >= kAll - kAll / 1000; })) << found() << " blocks";
  for (uint64_t seed = 1; seed <= kTexts; seed += 7) {
    EXPECT_EQ(Compare(*cache, {seed, Kind::kNormal, options}, kBlocks), kBlocks) << seed;
  }
}

// Whatever was safe before a kill at any moment is found with its bytes. Sequences under way go, and what they had
// published is found.
TEST_P(OutliveTest, KillsAtRandomLoseNothingThatWasSafe) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 0);
  std::map<uint64_t, int> safe;  // blocks of each text
  uint64_t next = 1;
  for (int round = 0; round < 12; ++round) {
    Start(32 << 20);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    for (const auto& [text, blocks] : safe) {
      const Source source{text, Kind::kNormal, options};
      ASSERT_TRUE(Eventually([&] { return Found(*cache, source, blocks) == blocks; })) << "text " << text;
      if (random() % 4 > 0) continue;
      ASSERT_EQ(Compare(*cache, source, blocks), blocks) << "text " << text;
    }
    EXPECT_EQ(Metric("kvmanager_checksum_failures_total"), 0);
    std::map<uint64_t, int> published;
    for (uint32_t texts = 4 + random() % 20; texts > 0; --texts) {
      const int blocks = 1 + static_cast<int>(random() % 6);
      Publish(*cache, {next, Kind::kNormal, options}, blocks);
      published[next++] = blocks;
      if (random() % 8 != 0) continue;
      ASSERT_TRUE(AllSafe());
      safe.merge(published);
    }
    ASSERT_OK_AND_ASSIGN(CreatedSequence held, cache->CreateSequence());
    ASSERT_OK(testing::Load(*cache, held.sequence->id(), {next, Kind::kNormal, options}, 0, 3 * kPageTokens, 1024));
    ASSERT_OK(held.sequence->Publish(Names(*cache, {next, Kind::kNormal, options}, 3)));
    if (random() % 2 == 0) {
      ASSERT_TRUE(AllSafe());
      safe.merge(published);
      safe[next] = 3;
    }
    ++next;
    Publish(*cache, {next++, Kind::kNormal, options}, 6);  // perhaps not yet encoded when it is killed
    daemon_->Kill();
    held = {};
    cache.reset();
    Kill();
  }
  EXPECT_GT(safe.size(), 10u);
}

INSTANTIATE_TEST_SUITE_P(Wheres, OutliveTest, ::testing::Values(Where::kDisk, Where::kMemory),
                         [](const auto& info) { return info.param == Where::kDisk ? "disk" : "memory"; });

}  // namespace
}  // namespace kvmanager::testing
