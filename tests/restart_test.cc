// A daemon whose host memory outlives it: what was published is found again after kill -9 and SIGTERM, verified, and
// nothing else comes back.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
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

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

class RestartTest : public RestartedDaemonTest {
 protected:
  RestartTest() { flags_ = {"--state-dir", state_, "--state-keep-s", "60"}; }
  void TearDown() override {
    RestartedDaemonTest::TearDown();
    daemon_.reset();
    KillKeeperOf(state_);
  }
  bool AllRecorded() {
    return Eventually([&] {
      const auto page = Scrape(*daemon_);
      return page.ok() && page->Sum("kvmanager_recorded_blocks") == page->Sum("kvmanager_published_blocks");
    });
  }
  bool AllClaimed() {
    return Eventually([&] { return Metric("kvmanager_unclaimed_blocks") == 0; });
  }

  const std::string state_ = directory_.path() + "/state";
};

TEST_F(RestartTest, EveryCodecsBlocksOutliveAKillAndASigterm) {
  const char* const codecs[] = {"raw", "hack:k_bits=3,v_bits=2", "hack:k_bits=4,v_bits=3", "pq"};
  Start();
  for (uint64_t i = 0; i < std::size(codecs); ++i) {
    const CacheOptions options = SmallCache(codecs[i]);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, {i + 1, Kind::kNormal, options}, 9);
  }
  ASSERT_TRUE(AllRecorded());
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
    EXPECT_EQ(Metric("kvmanager_recovered_blocks_total"), 36);
    EXPECT_EQ(Metric("kvmanager_unrecovered_blocks_total"), 0);
    for (uint64_t i = 0; i < std::size(codecs); ++i) {
      SCOPED_TRACE(codecs[i]);
      const CacheOptions options = SmallCache(codecs[i]);
      ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
      const Source source{i + 1, Kind::kNormal, options};
      ASSERT_TRUE(Eventually([&] { return Found(*cache, source, 9) == 9; }));
      EXPECT_EQ(Compare(*cache, source, 9), 9);
      EXPECT_EQ(Found(*cache, {99, Kind::kNormal, options}, 9), 0);
    }
    EXPECT_EQ(Metric("kvmanager_unclaimed_blocks"), 0);
  }
}

TEST_F(RestartTest, TenThousandBlocksOutliveAKill) {
  constexpr uint64_t kTexts = 100;
  constexpr int kBlocks = 100, kAll = kTexts * kBlocks;
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 0);
  Start(128 << 20);
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    for (uint64_t seed = 1; seed <= kTexts; ++seed) Publish(*cache, {seed, Kind::kNormal, options}, kBlocks);
  }
  ASSERT_TRUE(AllRecorded());
  ASSERT_EQ(Metric("kvmanager_published_blocks"), kAll);
  Kill();
  const auto begin = std::chrono::steady_clock::now();
  Start(128 << 20);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source first{1, Kind::kNormal, options};
  ASSERT_TRUE(Eventually([&] { return Found(*cache, first, kBlocks) == kBlocks; }));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("the first prefix was hit %.3f s after the daemon was started\n", seconds.count());
  ASSERT_TRUE(AllClaimed());
  int found = 0;
  for (uint64_t seed = 1; seed <= kTexts; ++seed) found += Found(*cache, {seed, Kind::kNormal, options}, kBlocks);
  EXPECT_GE(found, kAll - kAll / 1000);
  for (uint64_t seed = 1; seed <= kTexts; seed += 7) {
    const Source source{seed, Kind::kNormal, options};
    EXPECT_EQ(Compare(*cache, source, kBlocks), Found(*cache, source, kBlocks)) << seed;
  }
}

TEST_F(RestartTest, APurgeIsForEver) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start();
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, source, 4);
    ASSERT_TRUE(AllRecorded());
    ASSERT_OK(client_->Purge(Client::kAllCaches));
    // And what is unclaimed.
    Publish(*cache, source, 4);
    ASSERT_TRUE(AllRecorded());
  }
  Kill();
  Start();
  EXPECT_EQ(Metric("kvmanager_unclaimed_blocks"), 4);
  ASSERT_OK_AND_ASSIGN(const uint64_t purged, client_->Purge(Client::kAllCaches));
  EXPECT_EQ(purged, 4u);
  Kill();
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  EXPECT_EQ(Metric("kvmanager_recovered_blocks_total"), 0);
  EXPECT_EQ(Compare(*cache, source, 4), 0);
}

TEST_F(RestartTest, APoolOfAnotherSizeBeginsEmpty) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start(64 << 20);
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, source, 4);
    ASSERT_TRUE(AllRecorded());
  }
  Kill();
  Start(96 << 20);
  EXPECT_TRUE(log_.Says("the memory of an earlier daemon is given up"));
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    EXPECT_EQ(Compare(*cache, source, 4), 0);
    Publish(*cache, source, 3);
    ASSERT_TRUE(AllRecorded());
  }
  Kill();
  Start(96 << 20);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_TRUE(AllClaimed());
  EXPECT_EQ(Compare(*cache, source, 4), 3);
}

TEST_F(RestartTest, WithoutItsKeeperADaemonServesAndTheNextOneBeginsEmpty) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start();
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, source, 4);
    KillKeeperOf(state_);
    EXPECT_EQ(Compare(*cache, source, 4), 4);
  }
  Kill();
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  EXPECT_EQ(Compare(*cache, source, 4), 0);
  Publish(*cache, source, 4);
  ASSERT_TRUE(AllRecorded());
  cache.reset();
  Kill();
  Start();
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options));
  ASSERT_TRUE(AllClaimed());
  EXPECT_EQ(Compare(*cache, source, 4), 4);
}

TEST_F(RestartTest, AFolderIsOfOneDaemonAndOfItsUserAlone) {
  Start();
  DaemonOptions options;
  options.program = log_.program();
  options.more_flags = flags_;
  EXPECT_FALSE(DaemonProcess::Start(options).ok());
  EXPECT_TRUE(log_.Says("--state-dir is " + state_ + ", open in another process"));
  struct stat info;
  ASSERT_EQ(stat(state_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  const std::string open_folder = directory_.path() + "/open";
  ASSERT_EQ(mkdir(open_folder.c_str(), 0755), 0);
  ASSERT_EQ(chmod(open_folder.c_str(), 0755), 0);
  options.more_flags = {"--state-dir", open_folder};
  EXPECT_FALSE(DaemonProcess::Start(options).ok());
  EXPECT_TRUE(log_.Says("chmod 700"));
}

// Sequences under way go, and what they had published is found; whatever was recorded before a kill at any moment is
// found with its bytes.
TEST_F(RestartTest, KillsAtRandom) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 0);
  std::map<uint64_t, int> recorded;  // blocks of each text
  uint64_t next = 1;
  for (int round = 0; round < 12; ++round) {
    Start(32 << 20);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    ASSERT_TRUE(AllClaimed());
    for (const auto& [text, blocks] : recorded) {
      const Source source{text, Kind::kNormal, options};
      ASSERT_EQ(Found(*cache, source, blocks), blocks) << "text " << text;
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
      ASSERT_TRUE(AllRecorded());
      recorded.merge(published);
    }
    ASSERT_OK_AND_ASSIGN(CreatedSequence held, cache->CreateSequence());
    ASSERT_OK(testing::Load(*cache, held.sequence->id(), {next, Kind::kNormal, options}, 0, 3 * kPageTokens, 1024));
    ASSERT_OK(held.sequence->Publish(Names(*cache, {next, Kind::kNormal, options}, 3)));
    if (AllRecorded()) {
      recorded.merge(published);
      recorded[next] = 3;
    }
    ++next;
    Publish(*cache, {next++, Kind::kNormal, options}, 6);  // perhaps not yet encoded when it is killed
    daemon_->Kill();
    held = {};
    cache.reset();
    Kill();
  }
  EXPECT_GT(recorded.size(), 10u);
}

}  // namespace
}  // namespace kvmanager::testing
