// Codec plug-ins in a process of their own (--codec-plugin-process) that crash, loop, and are killed: others are served
// meanwhile, errors are honest, and nothing is left behind.
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;

constexpr int kTokens = 400, kLagPages = 1, kChunk = 50;

/// A daemon with a plug-in, codec "copy", of which pages are what they are when they are raw.
class PluginProcessTest : public ::testing::Test {
 protected:
  void Start(const std::string& variant) {
    DaemonOptions options;
    options.peers = false;
    options.more_flags = {"--threads", "2", "--codec-plugin", DataPath(absl::StrCat("codecs/abi/bad/", variant, ".so")),
                          "--codec-plugin-process"};
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  }

  /// Appends and attends in a new sequence; the outputs.
  static absl::StatusOr<std::vector<float>> FeedAnew(Client& client, const std::string& codec) {
    const CacheOptions options = SmallCache(codec, kLagPages);
    const Source source{1, Kind::kNormal, options};
    auto cache = client.OpenCache(options);
    if (!cache.ok()) return cache.status();
    auto made = (*cache)->CreateSequence();
    if (!made.ok()) return made.status();
    return Feed(**cache, made->sequence->id(), source, 0, kTokens, kChunk);
  }
  double Metric(absl::string_view name) const { return Scrape(*daemon_)->Sum(name, {"codec=\"copy\""}); }

  /// The plug-in's process; 0: there is none.
  pid_t Host() const {
    pid_t found = 0;
    for (const auto& thread : std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/task"))) {
      std::ifstream children(thread.path() / "children");
      while (children >> found) {
      }
    }
    return found;
  }
  int Descriptors() const {
    const auto all = std::filesystem::directory_iterator(absl::StrCat("/proc/", daemon_->pid(), "/fd"));
    return int(std::distance(begin(all), end(all)));
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(PluginProcessTest, AWellBehavedPluginServesAsInTheDaemon) {
  ASSERT_NO_FATAL_FAILURE(Start("good"));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> expected, FeedAnew(*client_, "raw"));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> got, FeedAnew(*client_, "copy;sinks=0"));
  EXPECT_LT(RelativeError(got, std::vector<double>(expected.begin(), expected.end())), 1e-4);
  EXPECT_EQ(Metric("kvmanager_codec_plugin_unanswered_total"), 0);
  EXPECT_EQ(Metric("kvmanager_codec_plugin_restarts_total"), 0);
  // What it says is the client's error.
  const absl::Status refused = client_->OpenCache(SmallCache("copy:level=9", kLagPages)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_NE(refused.message().find("it takes no parameters"), absl::string_view::npos) << refused;
}

TEST_F(PluginProcessTest, PagesStayRawWhereEncodingCrashesOrExits) {
  for (const char* variant : {"bad_crashes", "bad_exits"}) {
    ASSERT_NO_FATAL_FAILURE(Start(variant));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> expected, FeedAnew(*client_, "raw"));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> got, FeedAnew(*client_, "copy;sinks=0"));
    EXPECT_EQ(got, expected);
    EXPECT_TRUE(Eventually([&] { return Metric("kvmanager_codec_plugin_restarts_total") >= 1; }));
    EXPECT_GE(Metric("kvmanager_codec_plugin_unanswered_total"), 1);
    EXPECT_OK(FeedAnew(*client_, "hack"));
  }
}

TEST_F(PluginProcessTest, OthersAreServedWhileAPluginLoops) {
  ASSERT_NO_FATAL_FAILURE(Start("bad_attend_loops"));
  std::atomic<bool> done{false};
  absl::Status status;
  std::thread looping([&] {
    auto client = Client::Connect(daemon_->listen(), {});
    if (client.ok()) status = FeedAnew(**client, "copy;sinks=0").status();
    done = true;
  });
  // Each opens a cache, appends, encodes and attends by workers.
  int served = 0, while_it_looped = 0;
  for (; !done; ++served) {
    ASSERT_OK(FeedAnew(*client_, served % 2 == 0 ? "hack" : "raw"));
    while_it_looped += done ? 0 : 1;
  }
  looping.join();
  EXPECT_GT(while_it_looped, 5);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.message().find("the process of codec copy"), absl::string_view::npos) << status;
  EXPECT_TRUE(Eventually([&] { return Metric("kvmanager_codec_plugin_restarts_total") >= 1; }));
  // What it does well it does again: encoding. Until the process has loaded the object, the daemon says UNAVAILABLE.
  absl::Status opened;
  EXPECT_TRUE(Eventually([&] {
    opened = client_->OpenCache(SmallCache("copy;sinks=0", kLagPages)).status();
    return opened.code() != absl::StatusCode::kUnavailable;
  }));
  EXPECT_OK(opened);
}

TEST_F(PluginProcessTest, KillingTheProcessUnderLoadIsAnErrorOrNothing) {
  ASSERT_NO_FATAL_FAILURE(Start("good"));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> expected, FeedAnew(*client_, "raw"));
  const std::vector<double> wanted(expected.begin(), expected.end());
  ASSERT_OK(FeedAnew(*client_, "copy;sinks=0"));
  const int descriptors = Descriptors();
  std::atomic<bool> stop{false};
  std::atomic<int> well{0};
  std::thread load([&] {
    auto client = Client::Connect(daemon_->listen(), {});
    ASSERT_OK(client);
    while (!stop) {
      const auto got = FeedAnew(**client, "copy;sinks=0");
      if (got.ok()) {
        EXPECT_LT(RelativeError(*got, wanted), 1e-4);
        ++well;
      } else {
        EXPECT_EQ(got.status().code(), absl::StatusCode::kUnavailable) << got.status();
      }
    }
  });
  for (int kills = 1; kills <= 3; ++kills) {
    const int then = well;
    ASSERT_TRUE(Eventually([&] { return well > then && Host() != 0; }, 30000));
    const pid_t host = Host();
    ASSERT_EQ(::kill(host, SIGKILL), 0);
    ASSERT_TRUE(Eventually([&] { return Metric("kvmanager_codec_plugin_restarts_total") == kills; }));
    EXPECT_OK(FeedAnew(*client_, "hack"));
  }
  const int then = well;
  EXPECT_TRUE(Eventually([&] { return well > then; }, 30000));
  stop = true;
  load.join();
  EXPECT_TRUE(Eventually([&] { return Descriptors() == descriptors; })) << Descriptors() << " " << descriptors;
}

TEST_F(PluginProcessTest, TheProcessEndsWithItsDaemon) {
  for (const bool kill : {false, true}) {
    ASSERT_NO_FATAL_FAILURE(Start("good"));
    const pid_t host = Host();
    ASSERT_NE(host, 0);
    client_.reset();
    if (kill) {
      daemon_->Kill();
    } else {
      ASSERT_OK_AND_ASSIGN(const int status, daemon_->Terminate());
      EXPECT_EQ(status, 0);
    }
    EXPECT_TRUE(Eventually([&] { return ::kill(host, 0) != 0; }));
  }
}

TEST_F(PluginProcessTest, ABadObjectStopsTheStartWithASentence) {
  const auto run =
      RunCommand({DataPath("kvmanager/daemon/kvmanagerd"), "--listen", "tcp:127.0.0.1:0", "--host-pool-bytes", "4MiB",
                  "--codec-plugin", DataPath("codecs/abi/bad/bad_null_entry.so"), "--codec-plugin-process"});
  ASSERT_OK(run);
  EXPECT_EQ(run->status, 2);
}

}  // namespace
}  // namespace kvmanager::testing
