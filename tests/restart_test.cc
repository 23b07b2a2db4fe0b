// A daemon whose host memory outlives it: purges, another pool size, a keeper that is gone, whose the folder is.
// outlive_test kills it.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "absl/strings/match.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/keep/keeper.h"
#include "kvmanager/keep/keeper_testing.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/restarted_daemon.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;

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

  void ExpectFoundAfterAKill(const CacheOptions& options, const Source& source, int blocks) {
    Kill();
    Start();
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    ASSERT_TRUE(AllClaimed());
    EXPECT_EQ(Compare(*cache, source, blocks), blocks);
  }

  const std::string state_ = directory_.path() + "/state";
};

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

TEST_F(RestartTest, WhereTheKeeperEndsAnotherOneTakesItsPlace) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  Publish(*cache, source, 4);
  ASSERT_TRUE(AllRecorded());
  const pid_t first = KeeperOf(state_);
  ASSERT_GT(first, 0);
  EXPECT_EQ(Metric("kvmanager_memory_kept"), 1);
  KillKeeperOf(state_);
  ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_memory_keepers_lost_total") == 1; }));
  ASSERT_TRUE(Eventually([&] { return log_.Says("another process keeps the memory now"); }));
  ASSERT_OK_AND_ASSIGN(const auto status, client_->Status());
  ASSERT_TRUE(status.kept_memory.has_value());
  EXPECT_EQ(status.kept_memory->state_dir, state_);
  EXPECT_EQ(status.kept_memory->pid, static_cast<uint32_t>(KeeperOf(state_)));
  EXPECT_NE(status.kept_memory->pid, static_cast<uint32_t>(first));
  cache.reset();
  ExpectFoundAfterAKill(options, source, 4);
}

// As where the service of the keeper is started behind the daemon's, or anew.
TEST_F(RestartTest, AServicesKeeperTakesThePlaceOfTheDaemons) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  Publish(*cache, source, 4);
  ASSERT_TRUE(AllRecorded());
  ASSERT_OK_AND_ASSIGN(const auto service,
                       ChildProcess::Start({DataPath("kvmanager/daemon/kvmanagerd"), kKeeperFlag, state_}));
  ASSERT_TRUE(Eventually([&] { return KeeperOf(state_) == service->pid(); }));
  ASSERT_TRUE(Eventually([&] { return log_.Says("another process keeps the memory now"); }));
  EXPECT_EQ(Metric("kvmanager_memory_kept"), 1);
  cache.reset();
  ExpectFoundAfterAKill(options, source, 4);
  EXPECT_EQ(KeeperOf(state_), service->pid());
}

TEST_F(RestartTest, AKeeperThatNobodyWouldFindIsReplaced) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  Publish(*cache, source, 4);
  ASSERT_TRUE(AllRecorded());
  ASSERT_EQ(unlink((state_ + "/" + kKeeperSocket).c_str()), 0);
  ASSERT_TRUE(Eventually([&] { return KeeperOf(state_) > 0; }));
  ASSERT_TRUE(Eventually([&] { return log_.Says("another process keeps the memory now"); }));
  cache.reset();
  ExpectFoundAfterAKill(options, source, 4);
}

TEST_F(RestartTest, WhereNobodyCanKeepTheMemoryTheDaemonSaysSoAndTriesAgain) {
  Start();
  // Where its socket was is a folder.
  const std::string socket = state_ + "/" + kKeeperSocket;
  daemon_->process().Signal(SIGSTOP);
  KillKeeperOf(state_);
  ASSERT_EQ(unlink(socket.c_str()), 0);
  ASSERT_EQ(mkdir(socket.c_str(), 0700), 0);
  daemon_->process().Signal(SIGCONT);
  ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_memory_kept") == 0; }, 30000));
  EXPECT_TRUE(log_.Says("nobody keeps the memory"));
  ASSERT_OK_AND_ASSIGN(const auto status, client_->Status());
  ASSERT_TRUE(status.kept_memory.has_value());
  EXPECT_EQ(status.kept_memory->pid, 0u);
  EXPECT_TRUE(absl::StrContains(status.kept_memory->state, "nobody keeps it")) << status.kept_memory->state;
  ASSERT_EQ(rmdir(socket.c_str()), 0);
  ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_memory_kept") == 1; }, 30000));
  EXPECT_GT(KeeperOf(state_), 0);
}

TEST_F(RestartTest, WhereDaemonAndKeeperEndTheNextOneBeginsEmpty) {
  const CacheOptions options = SmallCache("raw", 0);
  const Source source{1, Kind::kNormal, options};
  Start();
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    Publish(*cache, source, 4);
  }
  client_.reset();
  daemon_->process().Signal(SIGSTOP);
  KillKeeperOf(state_);
  Kill();
  Start();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  EXPECT_EQ(Compare(*cache, source, 4), 0);
  Publish(*cache, source, 4);
  ASSERT_TRUE(AllRecorded());
  cache.reset();
  ExpectFoundAfterAKill(options, source, 4);
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

}  // namespace
}  // namespace kvmanager::testing
