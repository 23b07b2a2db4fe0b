// Two daemons that have the same key: pages of a hand-off go through UCX, over its TCP and its shared memory, whatever
// happens to its processes.
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/daemon_pair.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "transport/ucx/ucx_process.h"

namespace kvmanager::testing {
namespace {

using client::ClaimedSequence;
using client::CreatedSequence;
using client::HandOffOutcome;

constexpr int kTokens = 64 * 40 + 13;

class UcxHandOffTest : public DaemonPairTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    if (!IsUcxBuilt()) GTEST_SKIP() << UcxBuild();
    ::setenv("UCX_TLS", GetParam(), 1);
    ::setenv("UCX_NET_DEVICES", "lo", 1);
  }
  std::string KeyFile(const std::string& name, const std::string& key) {
    const std::string path = absl::StrCat(directory_.path(), "/", name);
    std::ofstream(path) << key;
    EXPECT_EQ(chmod(path.c_str(), 0600), 0);
    return path;
  }
  DaemonOptions With(const std::string& key_file) {
    return {.more_flags = {"--peer-local-copy", "off", "--peer-ucx-key", key_file}};
  }
  void StartBoth() {
    const DaemonOptions options = With(KeyFile("key", "the key of two daemons"));
    ASSERT_NO_FATAL_FAILURE(Start(options, options));
  }
  static double Received(const DaemonProcess& daemon, const std::string& by) {
    return Metric(daemon, "kvmanager_transport_bytes_total",
                  {"direction=\"received\"", absl::StrCat("by=\"", by, "\"")});
  }
  /// Of a daemon's UCX process; 0 if it has none now.
  static pid_t ProcessOf(client::Client& client) {
    const absl::StatusOr<client::DaemonDescription> status = client.Status();
    int major = 0, minor = 0, pid = 0;
    if (!status.ok() || std::sscanf(status->ucx.c_str(), "UCX %d.%d, process %d", &major, &minor, &pid) != 3) return 0;
    return pid;
  }
  /// A hand-off whose sequence reads the same at both ends. Afterwards neither holds anything.
  void HandOver(HandOffOutcome* sent) {
    const Source source{7, Kind::kOutliers, options_};
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
    ASSERT_OK(Load(*cache_, made.sequence->id(), source, 0, kTokens, 500));
    ASSERT_OK_AND_ASSIGN(*sent, made.sequence->HandOff(receiver_->peer(), "blob"));
    ExpectSameBits(made, source, sent->ticket);
  }
  void ExpectSameBits(const CreatedSequence& made, const Source& source, const std::string& ticket) {
    ASSERT_OK_AND_ASSIGN(const ClaimedSequence claimed, other_->Claim(ticket));
    for (const int chunk : {1, 70}) {
      const uint64_t at = kTokens + (chunk == 1 ? 0 : 1);
      ASSERT_OK_AND_ASSIGN(const auto stayed, Feed(*cache_, made.sequence->id(), source, at, chunk, chunk));
      ASSERT_OK_AND_ASSIGN(const auto went, Feed(*other_, claimed.sequence->id(), source, at, chunk, chunk));
      EXPECT_EQ(stayed, went);
    }
  }

  TempDir directory_;
};

TEST_P(UcxHandOffTest, SequencesReadTheSame) {
  ASSERT_NO_FATAL_FAILURE(StartBoth());
  double bytes = 0;
  for (int i = 0; i < 3; ++i) {
    HandOffOutcome sent;
    ASSERT_NO_FATAL_FAILURE(HandOver(&sent));
    bytes += double(sent.bytes_sent);
    ExpectNothingAt(*here_);
    ExpectNothingAt(*there_);
  }
  EXPECT_EQ(Received(*receiver_, "ucx"), bytes);
  EXPECT_EQ(Received(*receiver_, "socket"), 0);
  EXPECT_GT(ProcessOf(*here_), 0);
}

TEST_P(UcxHandOffTest, OtherKeysMeanTcp) {
  ASSERT_NO_FATAL_FAILURE(
      Start(With(KeyFile("one", "the key of one daemon")), With(KeyFile("two", "another one's key"))));
  HandOffOutcome sent;
  ASSERT_NO_FATAL_FAILURE(HandOver(&sent));
  EXPECT_EQ(Received(*receiver_, "socket"), double(sent.bytes_sent));
  ASSERT_NO_FATAL_FAILURE(TearDown());
  ASSERT_NO_FATAL_FAILURE(
      Start(With(KeyFile("one", "the key of one daemon")), {.more_flags = {"--peer-local-copy", "off"}}));
  ASSERT_NO_FATAL_FAILURE(HandOver(&sent));
  EXPECT_EQ(Received(*receiver_, "socket"), double(sent.bytes_sent));
  ASSERT_OK_AND_ASSIGN(const client::DaemonDescription status, there_->Status());
  EXPECT_TRUE(absl::StrContains(status.ucx, "off")) << status.ucx;
}

TEST_P(UcxHandOffTest, AProcessThatIsKilledMidwayCostsNothing) {
  ASSERT_NO_FATAL_FAILURE(StartBoth());
  const Source source{8, Kind::kNormal, options_};
  for (client::Client* const side : {here_.get(), there_.get()}) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
    ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(receiver_->peer(), kTokens));
    const double before = Received(*receiver_, "ucx");
    ASSERT_OK(LoadLayer(*cache_, made.sequence->id(), source, 0, 0, kTokens));
    ASSERT_TRUE(Eventually([&] { return Received(*receiver_, "ucx") > before; }));
    const pid_t process = ProcessOf(*side);
    ASSERT_GT(process, 0);
    ASSERT_EQ(::kill(process, SIGKILL), 0);
    for (int layer = 1; layer < options_.layers; ++layer) {
      ASSERT_OK(LoadLayer(*cache_, made.sequence->id(), source, layer, 0, kTokens));
    }
    ASSERT_OK(hand_off->Finish("blob").status());
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(made, source, hand_off->ticket()));
    EXPECT_TRUE(Eventually([&] { return ProcessOf(*side) > 0 && ProcessOf(*side) != process; }));
  }
  const double before = Received(*receiver_, "ucx");
  HandOffOutcome sent;
  ASSERT_NO_FATAL_FAILURE(HandOver(&sent));
  EXPECT_EQ(Received(*receiver_, "ucx") - before, double(sent.bytes_sent));
}

TEST_P(UcxHandOffTest, ASenderKilledMidwayLeavesNothing) {
  ASSERT_NO_FATAL_FAILURE(StartBoth());
  const Source source{8, Kind::kNormal, options_};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(receiver_->peer(), kTokens));
  auto claim = other_->ClaimAsync(hand_off->ticket(), 20000);
  ASSERT_OK(LoadLayer(*cache_, made.sequence->id(), source, 0, 0, kTokens));
  ASSERT_TRUE(Eventually([&] { return Received(*receiver_, "ucx") > 0; }));
  const pid_t process = ProcessOf(*here_);
  sender_->Kill();
  const int64_t start = NowMs();
  EXPECT_CODE(claim.Wait(), kUnavailable);
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  ExpectNothingAt(*there_);
  EXPECT_TRUE(Eventually([&] { return ::kill(process, 0) != 0; })) << "UCX's process outlives its daemon";
  // The receiver serves others.
  ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start(With(absl::StrCat(directory_.path(), "/key"))));
  ASSERT_OK_AND_ASSIGN(here_, client::Client::Connect(sender_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(cache_, here_->OpenCache(options_));
  HandOffOutcome sent;
  ASSERT_NO_FATAL_FAILURE(HandOver(&sent));
  EXPECT_EQ(Received(*receiver_, "socket"), 0);
}

TEST_P(UcxHandOffTest, ALinkThatBreaksOrLies) {
  ASSERT_NO_FATAL_FAILURE(StartBoth());
  Proxy proxy(receiver_->peer());
  const Source source{10, Kind::kNormal, options_};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, made.sequence->id(), source, 0, kTokens, 500));
  std::mt19937_64 random(3);
  int arrived = 0;
  for (int seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    const bool cut = seed % 2 == 0;
    // What is said about pages passes the proxy; after a break the pages do, too.
    proxy.Spoil(cut ? Proxy::Fault::kCut : Proxy::Fault::kFlip, random() % 8000);
    const absl::StatusOr<HandOffOutcome> sent = made.sequence->HandOff(proxy.address(), "");
    // A hello or an offer that is changed, or cut before it is there, may end it.
    if (!sent.ok()) continue;
    ++arrived;
    ASSERT_OK_AND_ASSIGN(const ClaimedSequence claimed, other_->Claim(sent->ticket));
    ASSERT_OK_AND_ASSIGN(const auto stayed, Ask(*cache_, made.sequence->id(), source, kTokens - 1));
    ASSERT_OK_AND_ASSIGN(const auto went, Ask(*other_, claimed.sequence->id(), source, kTokens - 1));
    EXPECT_EQ(stayed, went);
  }
  EXPECT_GT(arrived, 10);
  EXPECT_GT(Received(*receiver_, "ucx"), 0);
  ExpectNothingAt(*there_);
}

TEST_P(UcxHandOffTest, AFullReceiverLetsWait) {
  const std::string key = KeyFile("key", "the key of two daemons");
  DaemonOptions small = With(key);
  small.host_pool_bytes = 4 << 20;
  ASSERT_NO_FATAL_FAILURE(Start(With(key), small));
  const Source source{9, Kind::kNormal, options_};
  ASSERT_OK_AND_ASSIGN(CreatedSequence holder, other_->CreateSequence());
  ASSERT_OK(Load(*other_, holder.sequence->id(), source, 0, 48 * 64, 1024));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, made.sequence->id(), source, 0, 30 * 64, 1024));
  EXPECT_CODE(made.sequence->HandOff(receiver_->peer(), ""), kResourceExhausted);
  auto waiting = made.sequence->HandOffAsync(receiver_->peer(), "", 20000, 20000);
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_hand_offs_waiting") == 1; }));
  holder.sequence.reset();
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, waiting.Wait());
  EXPECT_EQ(Received(*receiver_, "ucx"), double(sent.bytes_sent));
  ASSERT_OK_AND_ASSIGN(const ClaimedSequence claimed, other_->Claim(sent.ticket));
  EXPECT_EQ(claimed.tokens, uint64_t{30 * 64});
}

TEST_P(UcxHandOffTest, KeysThatAreTooShortOrForOthersToReadAreNamed) {
  const std::string path = KeyFile("short", "15 bytes or so.");
  const std::string readable = KeyFile("readable", std::string(32, 'k'));
  ASSERT_EQ(chmod(readable.c_str(), 0640), 0);
  for (const std::string& key : {path, readable}) {
    ASSERT_OK_AND_ASSIGN(const CommandResult result, RunCommand({DataPath("kvmanager/daemon/kvmanagerd"), "--listen",
                                                                 absl::StrCat("unix:", directory_.path(), "/s"),
                                                                 "--host-pool-bytes", "64MiB", "--peer-ucx-key", key}));
    EXPECT_EQ(result.status, 2) << key;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, UcxHandOffTest, ::testing::Values("tcp", "posix,cma"),
                         [](const auto& info) { return info.index == 0 ? "Tcp" : "SharedMemory"; });

}  // namespace
}  // namespace kvmanager::testing
