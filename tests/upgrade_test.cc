// An upgrade: another program goes on in the daemon's process, with its sockets and its memory, and clients see no more
// of it than of a daemon that was away for a moment.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper_testing.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/restarted_daemon.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;

class UpgradeTest : public RestartedDaemonTest {
 protected:
  void TearDown() override {
    RestartedDaemonTest::TearDown();
    daemon_.reset();
    KillKeeperOf(state_);
  }

  void StartKept(const std::vector<std::string>& more = {}) {
    flags_ = {"--state-dir", state_, "--state-keep-s", "60"};
    Start(64 << 20, more);
  }
  // kvctl upgrade: what it prints, errors too.
  CommandResult Upgrade(const std::vector<std::string>& flags = {}) {
    std::vector<std::string> command = {
        "/bin/sh",         "-c",     "exec \"$@\" 2>&1", "sh", DataPath("client/cli/kvctl"), "--connect",
        daemon_->listen(), "upgrade"};
    command.insert(command.end(), flags.begin(), flags.end());
    const auto result = RunCommand(command, 90000);
    EXPECT_OK(result);
    return result.value_or(CommandResult{.status = -1});
  }
  void ExpectUpgrade(const std::vector<std::string>& flags = {}) {
    const CommandResult result = Upgrade(flags);
    EXPECT_EQ(result.status, 0) << result.output;
    std::printf("%s", result.output.c_str());
    ASSERT_OK(client_->Reconnect());
  }
  void ExpectRefusal(const std::vector<std::string>& flags, const std::string& words) {
    SCOPED_TRACE(words);
    const CommandResult result = Upgrade(flags);
    EXPECT_EQ(result.status, 1) << result.output;
    EXPECT_NE(result.output.find(words), std::string::npos) << result.output;
    EXPECT_EQ(result.output.find("is the daemon running"), std::string::npos) << result.output;
    ASSERT_OK_AND_ASSIGN(const client::DaemonDescription now, client_->Status());
    EXPECT_EQ(now.boot_epoch, boot_epoch_) << "the daemon is not to notice";
    EXPECT_FALSE(now.draining);
  }
  void NoteBoot() {
    ASSERT_OK_AND_ASSIGN(const client::DaemonDescription now, client_->Status());
    boot_epoch_ = now.boot_epoch;
  }
  std::string Program() const {
    std::error_code error;
    return std::filesystem::read_symlink(absl::StrCat("/proc/", daemon_->pid(), "/exe"), error).string();
  }
  // A program of the test's own: a copy of the daemon, or a script.
  std::string Copy(const std::string& name) {
    const std::string path = absl::StrCat(directory_.path(), "/", name);
    std::filesystem::copy_file(std::filesystem::canonical(DataPath("kvmanager/daemon/kvmanagerd")), path);
    EXPECT_EQ(chmod(path.c_str(), 0755), 0);
    return path;
  }
  std::string Script(const std::string& name, const std::string& text, mode_t mode = 0755) {
    const std::string path = absl::StrCat(directory_.path(), "/", name);
    std::ofstream(path) << "#!/bin/sh\n" << text << "\n";
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  static std::string Real() { return DataPath("kvmanager/daemon/kvmanagerd"); }

  const std::string state_ = directory_.path() + "/state";
  const CacheOptions options_ = SmallCache("hack:k_bits=3,v_bits=2", 0);
  uint64_t boot_epoch_ = 0;
};

// What an engine's connector does: it publishes texts and reads them back, and where the daemon is away it connects
// again. Meanwhile others connect all the time.
TEST_F(UpgradeTest, ClientsSeeADaemonThatIsAwayForAMomentAndLoseNothing) {
  StartKept({"--http-listen", "127.0.0.1:0", "--peer-listen", "127.0.0.1:0"});
  constexpr int kBlocks = 4, kUpgrades = 4;
  std::atomic<bool> over{false};
  std::atomic<uint64_t> published{0};
  std::vector<uint64_t> safe;
  int64_t longest_gap_ms = 0, longest_call_ms = 0;
  int away = 0, calls = 0;
  std::thread engine([&] {
    auto client = Client::Connect(daemon_->listen(), {});
    ASSERT_OK(client);
    auto cache = (*client)->OpenCache(options_);
    ASSERT_OK(cache);
    int64_t last_ms = NowMs();
    const auto publish = [&](uint64_t text) -> absl::Status {
      auto made = (*cache)->CreateSequence();
      if (!made.ok()) return made.status();
      const Source source{text, Kind::kNormal, options_};
      KV_RETURN_IF_ERROR(testing::Load(**cache, made->sequence->id(), source, 0, kBlocks * kPageTokens, 1024));
      return made->sequence->Publish(Names(**cache, source, kBlocks)).status();
    };
    const auto read = [&](uint64_t text) -> absl::Status {
      const Source source{text, Kind::kNormal, options_};
      auto made = (*cache)->CreateSequence(Names(**cache, source, kBlocks));
      if (!made.ok()) return made.status();
      if (made->match.hit_blocks != kBlocks) return absl::DataLossError(absl::StrCat("text ", text, " is gone"));
      const auto layer = LayerThatDiffers(**cache, made->sequence->id(), source, kBlocks * kPageTokens);
      if (!layer.ok()) return layer.status();
      return *layer == kNoLayer ? absl::OkStatus() : absl::DataLossError(absl::StrCat("text ", text, " differs"));
    };
    const auto connect = [&]() -> absl::Status {
      KV_RETURN_IF_ERROR((*client)->Reconnect());
      cache = (*client)->OpenCache(options_);
      return cache.status();
    };
    uint64_t next = 1;
    while (!over) {
      const int64_t begin_ms = NowMs();
      const bool writes = next % 2 == 1 || safe.empty();
      absl::Status status = writes ? publish(next) : read(safe[next * 7919 % safe.size()]);
      if (status.ok() && writes) {
        safe.push_back(next);
        published = safe.size();
      }
      ++calls;
      ++next;
      if (!status.ok()) {
        ASSERT_TRUE(absl::IsUnavailable(status)) << status;
        ++away;
        status = connect();
        while (absl::IsUnavailable(status)) status = connect();
        ASSERT_OK(status);
        longest_gap_ms = std::max(longest_gap_ms, NowMs() - last_ms);
      } else {
        longest_call_ms = std::max(longest_call_ms, NowMs() - begin_ms);
      }
      last_ms = NowMs();
    }
  });
  std::atomic<int> refused{0}, connected{0};
  std::thread others([&] {
    while (!over) {
      for (const std::string& address : {daemon_->listen(), daemon_->peer(), daemon_->metrics(), daemon_->http()}) {
        const int fd = ConnectSocket(address);
        ++(fd >= 0 ? connected : refused);
        if (fd >= 0) close(fd);
      }
      usleep(2000);
    }
  });
  const pid_t pid = daemon_->pid();
  for (int i = 0; i < kUpgrades; ++i) {
    const uint64_t before = published;
    EXPECT_TRUE(Eventually([&] { return published >= before + 10; }, 60000));
    ExpectUpgrade();
  }
  const uint64_t before = published;
  EXPECT_TRUE(Eventually([&] { return published >= before + 10; }, 60000));
  over = true;
  engine.join();
  others.join();
  std::printf("%d calls, %d of them while the daemon was away; longest gap %lld ms, longest call beside %lld ms\n",
              calls, away, static_cast<long long>(longest_gap_ms), static_cast<long long>(longest_call_ms));
  EXPECT_GE(away, 1);
  EXPECT_LE(away, kUpgrades * 3);
  EXPECT_LT(longest_gap_ms, 20000 * kSlowdown);  // the bound is two seconds: where nothing else runs
  EXPECT_EQ(refused, 0) << "of " << connected + refused << " connections";
  EXPECT_EQ(daemon_->pid(), pid);
  EXPECT_TRUE(daemon_->process().running());
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  for (const uint64_t text : safe) {
    ASSERT_EQ(Compare(*cache, {text, Kind::kNormal, options_}, kBlocks), kBlocks) << "text " << text;
  }
  EXPECT_GT(Metric("kvmanager_recovered_blocks_total"), 0);
  EXPECT_EQ(Metric("kvmanager_unrecovered_blocks_total"), 0);
}

// Everything that was published counts, at once: an upgrade waits until it is encoded.
TEST_F(UpgradeTest, WhatWasPublishedAMomentBeforeIsFound) {
  StartKept({"--threads", "1"});
  {
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
    for (uint64_t text = 1; text <= 8; ++text) Publish(*cache, {text, Kind::kNormal, options_}, 16);
    ASSERT_OK(client_->Upgrade("", false));
  }
  // The connection may not have ended yet.
  ASSERT_TRUE(Eventually([&] { return !client_->Ping().ok(); }));
  ASSERT_OK(client_->Reconnect());
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  for (uint64_t text = 1; text <= 8; ++text) EXPECT_EQ(Compare(*cache, {text, Kind::kNormal, options_}, 16), 16);
}

TEST_F(UpgradeTest, AnotherProgramGoesOn) {
  const std::string first = Copy("first"), second = Copy("second");
  StartKept();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  Publish(*cache, {1, Kind::kNormal, options_}, 5);
  cache.reset();
  ExpectUpgrade({"--program", first});
  EXPECT_EQ(Program(), first);
  // What is installed in its place, as install(1) and package managers do.
  ASSERT_EQ(rename(second.c_str(), first.c_str()), 0);
  ExpectUpgrade();
  EXPECT_EQ(Program(), first);
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 5), 5);
  // It is told to end as any.
  cache.reset();
  client_.reset();
  ASSERT_OK_AND_ASSIGN(const int status, daemon_->Terminate());
  EXPECT_EQ(status, 0);
}

TEST_F(UpgradeTest, AProgramThatCannotGoOnIsRefusedAndTheDaemonServesOn) {
  const std::string config = directory_.path() + "/config";
  std::ofstream(config) << "state-dir = \"" << state_ << "\"\nstate-keep-s = 60\n";
  flags_ = {"--config", config};
  Start();
  NoteBoot();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  Publish(*cache, {1, Kind::kNormal, options_}, 5);
  const auto refuses = [&](const std::string& program, const std::string& words) {
    ExpectRefusal({"--program", program}, absl::StrCat("program is ", program, words));
  };
  refuses(directory_.path() + "/nowhere", ", No such file or directory, must be a program");
  refuses(directory_.path(), ", no regular file, must be a program");
  refuses(Script("text", "", 0644), ", Permission denied, must be executable");
  refuses(Script("open", "", 0775), ", which others may write, must be its owner's alone to write: chmod go-w");
  if (geteuid() == 0) {
    const std::string foreign = Script("foreign", "");
    ASSERT_EQ(chown(foreign.c_str(), 12345, 12345), 0);
    refuses(foreign, ", of user 12345, must be root's or the daemon's user's");
  }
  refuses(
      Script("other", "exit 3"),
      ", must be a kvmanagerd that takes this one's flags; with --check before them: exit status 3: it says nothing");
  refuses(Script("earlier", "echo The following argument was not expected: $1 >&2; exit 2"),
          ", must be a kvmanagerd that takes this one's flags; with --check before them: exit status 2: The following "
          "argument was not expected: --check");
  refuses(Script("crashes", "kill -9 $$"),
          ", must be a kvmanagerd that takes this one's flags; with --check before them: signal 9");
  refuses(Script("waits", "sleep 30"),
          ", must be a kvmanagerd that takes this one's flags; with --check before them: it had not ended after 4 s");
  std::ofstream(config) << "state-dir = \"" << state_ << "\"\nno-flag = 1\n";
  ExpectRefusal({}, absl::StrCat("no-flag in ", config, " is unknown"));
  // What would be given up is said.
  std::ofstream(config) << "state-dir = \"" << state_ << "2\"\nstate-keep-s = 60\n";
  ExpectRefusal({}, absl::StrCat("whose memory is: --state-dir ", state_, "2, --host-pool-bytes 67108864"));
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 5), 5);
  cache.reset();
  ExpectUpgrade({"--cold"});
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  EXPECT_EQ(Found(*cache, {1, Kind::kNormal, options_}, 5), 0);
  cache.reset();
  RestartedDaemonTest::TearDown();
  daemon_.reset();
  KillKeeperOf(state_ + "2");
}

TEST_F(UpgradeTest, WhereTheKeeperHasGoneAnotherOneKeepsTheMemory) {
  StartKept();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  Publish(*cache, {1, Kind::kNormal, options_}, 5);
  cache.reset();
  KillKeeperOf(state_);
  ExpectUpgrade();
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 5), 5);
  EXPECT_GT(KeeperOf(state_), 0);
}

TEST_F(UpgradeTest, WhereTheKeeperDoesNotAnswerTheDaemonServesOn) {
  StartKept();
  NoteBoot();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  Publish(*cache, {1, Kind::kNormal, options_}, 5);
  const pid_t keeper = KeeperOf(state_);
  ASSERT_GT(keeper, 0);
  ASSERT_EQ(kill(keeper, SIGSTOP), 0);
  ExpectRefusal({}, "keeper: no answer within 1000 ms");
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 5), 5);
  cache.reset();
  ASSERT_EQ(kill(keeper, SIGCONT), 0);
  ExpectUpgrade();
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 5), 5);
}

TEST_F(UpgradeTest, WithoutAStateDirMemoryIsNotLostUnasked) {
  flags_ = {"--disk-path", directory_.path() + "/disk", "--disk-bytes", "1GiB"};
  Start();
  NoteBoot();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  Publish(*cache, {1, Kind::kNormal, options_}, 20);
  ExpectRefusal({}, "--state-dir is not given, must be given, so that what is in host memory outlives an upgrade");
  cache.reset();
  ExpectUpgrade({"--cold"});
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  ASSERT_TRUE(Eventually([&] { return Found(*cache, {1, Kind::kNormal, options_}, 20) == 20; }));
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 20), 20) << "it was written to the disk before";
}

// It could be run when it was tried.
TEST_F(UpgradeTest, WhereTheNewProgramGoesMeanwhileTheOldOneGoesOn) {
  const std::string program =
      Script("fickle", absl::StrCat("[ \"$1\" = --check ] && chmod 0644 \"$0\"\nexec '", Real(), "' \"$@\""));
  StartKept();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  Publish(*cache, {1, Kind::kNormal, options_}, 5);
  cache.reset();
  const std::string before = Program();
  ExpectUpgrade({"--program", program});
  EXPECT_EQ(Program(), before);
  EXPECT_TRUE(log_.Says("fickle cannot be run")) << log_.Text();
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 5), 5);
}

// A configuration that was changed since must not end the service.
TEST_F(UpgradeTest, ACheckLooksAtTheFolders) {
  const auto check = [&](const std::string& flag, const std::string& folder) {
    std::vector<std::string> command = {"/bin/sh", "-c", "exec \"$0\" \"$@\" 2>&1", Real(), "--check"};
    command.insert(command.end(), {"--listen", "unix:" + directory_.path() + "/other"});
    command.insert(command.end(), {"--host-pool-bytes", "64MiB", "--disk-bytes", "1GiB"});
    if (flag != "--disk-path") command.insert(command.end(), {"--disk-path", directory_.path() + "/disk"});
    command.insert(command.end(), {flag, folder});
    const auto result = RunCommand(command);
    return result.ok() ? absl::StrCat(result->status, " ", result->output) : std::string(result.status().message());
  };
  const std::string fine = check("--state-dir", directory_.path() + "/new");
  EXPECT_EQ(fine.find("0 kvmanagerd "), 0u) << fine;
  EXPECT_FALSE(std::filesystem::exists(directory_.path() + "/new"));
  for (const std::string flag : {"--disk-path", "--state-dir"}) {
    const std::string file = check(flag, "/dev/null"), deep = check(flag, directory_.path() + "/no/parent");
    EXPECT_EQ(file.find(absl::StrCat("2 ", flag, " is /dev/null, must be a directory")), 0u) << file;
    EXPECT_NE(deep.find("must be a directory that can be made"), std::string::npos) << deep;
  }
  const std::string name = check("--state-dir", directory_.path() + "/" + std::string(200, 'a'));
  EXPECT_NE(name.find("bytes long, for its socket"), std::string::npos) << name;
}

// What kvctl prints then starts the daemon with all of its flags.
TEST_F(UpgradeTest, WhereTheNewProgramEndsKvctlSaysHowToStartTheDaemonAgain) {
  const std::string program =
      Script("ends", absl::StrCat("[ \"$1\" = --check ] && exec '", Real(), "' \"$@\"\nexit 3"));
  StartKept({"--tenant-most-percent", "90"});
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  Publish(*cache, {1, Kind::kNormal, options_}, 5);
  cache.reset();
  const CommandResult result = Upgrade({"--program", program, "--wait-s", "3600"});  // which is not waited for
  daemon_->Kill();                                                                   // it has ended by itself
  EXPECT_EQ(result.status, 1) << result.output;
  for (const std::string& words :
       {std::string("the new program, which has ended"), absl::StrCat("Process ", daemon_->pid(), " has ended."),
        std::string("--state-dir"), std::string("--tenant-most-percent 90")}) {
    EXPECT_NE(result.output.find(words), std::string::npos) << words << " is not in: " << result.output;
  }
  EXPECT_EQ(result.output.find("is the daemon running"), std::string::npos) << result.output;
  const size_t begin = result.output.find("\n  ");
  ASSERT_NE(begin, std::string::npos) << result.output;
  const std::string command = result.output.substr(begin + 3, result.output.find('\n', begin + 1) - begin - 3);
  ASSERT_OK_AND_ASSIGN(const auto again, ChildProcess::Start({"/bin/sh", "-c", absl::StrCat("exec ", command)}));
  ASSERT_OK_AND_ASSIGN(const std::string ready, again->ReadLine());
  EXPECT_EQ(ready.find("kvmanagerd ready"), 0u) << ready;
  ASSERT_OK(client_->Reconnect());
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  EXPECT_EQ(Compare(*cache, {1, Kind::kNormal, options_}, 5), 5);
  cache.reset();
  client_.reset();
}

// A call that does not end is given up after a second, and sequences are lost, as in any restart.
TEST_F(UpgradeTest, DoesNotWaitForSequences) {
  StartKept();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options_));
  ASSERT_OK_AND_ASSIGN(client::CreatedSequence held, cache->CreateSequence());
  const Source source{1, Kind::kNormal, options_};
  ASSERT_OK(testing::Load(*cache, held.sequence->id(), source, 0, 3 * kPageTokens, 1024));
  ASSERT_OK(held.sequence->Publish(Names(*cache, source, 2)));
  const CommandResult result = Upgrade();
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_TRUE(log_.Says("1 sequences are held, and are lost")) << log_.Text();
  EXPECT_FALSE(held.sequence->Publish(Names(*cache, source, 3)).ok());
  held = {};
  cache.reset();
  ASSERT_OK(client_->Reconnect());
  ASSERT_OK_AND_ASSIGN(cache, client_->OpenCache(options_));
  EXPECT_EQ(Compare(*cache, source, 3), 2);
}

}  // namespace
}  // namespace kvmanager::testing
