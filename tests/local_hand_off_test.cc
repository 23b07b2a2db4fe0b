// Two daemons of one host: pages of a hand-off are copied from one's memory into the other's, unless one of them does
// not want that or cannot.
#include <sys/resource.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/keep/keeper_testing.h"
#include "tests/daemon_pair.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::ClaimedSequence;
using client::CreatedSequence;
using client::HandOffOutcome;

constexpr int kTokens = 64 * 40 + 13;

/// Mappings of other processes' pools in a process's memory.
int ForeignPools(pid_t pid) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += absl::StrContains(line, "memfd:kvmanager-pool") && absl::StrContains(line, " r--s ");
  }
  return count;
}

class LocalHandOffTest : public DaemonPairTest {
 protected:
  struct Moved {
    double sockets = 0, copies = 0;  // bytes of pages
  };
  static Moved MovedBytes(const DaemonProcess& daemon, const std::string& direction) {
    const std::string label = absl::StrCat("direction=\"", direction, "\"");
    return {Metric(daemon, "kvmanager_transport_bytes_total", {label, "by=\"socket\""}),
            Metric(daemon, "kvmanager_transport_bytes_total", {label, "by=\"copy\""})};
  }
  /// A hand-off whose sequence reads the same at both ends. Afterwards neither holds anything.
  void HandOver(const std::string& codec, HandOffOutcome* sent) {
    const CacheOptions options = SmallCache(codec, 1);
    const Source source{7, Kind::kOutliers, options};
    ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
    ASSERT_OK_AND_ASSIGN(auto other, there_->OpenCache(options));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, kTokens, 500));
    ASSERT_OK_AND_ASSIGN(*sent, made.sequence->HandOff(receiver_->peer(), "blob"));
    ASSERT_OK_AND_ASSIGN(const ClaimedSequence claimed, other->Claim(sent->ticket));
    EXPECT_EQ(claimed.blob, "blob");
    for (const int chunk : {1, 70}) {
      const uint64_t at = kTokens + (chunk == 1 ? 0 : 1);
      ASSERT_OK_AND_ASSIGN(const auto stayed, Feed(*cache, made.sequence->id(), source, at, chunk, chunk));
      ASSERT_OK_AND_ASSIGN(const auto went, Feed(*other, claimed.sequence->id(), source, at, chunk, chunk));
      EXPECT_EQ(stayed, went);
    }
  }
  void ExpectNothingAnywhere() {
    ExpectNothingAt(*here_);
    ExpectNothingAt(*there_);
  }
};

TEST_F(LocalHandOffTest, PagesAreCopiedBetweenMemories) {
  Start();
  double bytes = 0;
  for (const char* const codec : {"raw", "hack:k_bits=3,v_bits=2", "hack:k_bits=3,v_bits=2;0=raw;sinks=100"}) {
    HandOffOutcome sent;
    ASSERT_NO_FATAL_FAILURE(HandOver(codec, &sent));
    bytes += double(sent.bytes_sent);
    ExpectNothingAnywhere();
  }
  for (const auto& [daemon, direction] : {std::pair(sender_.get(), "sent"), std::pair(receiver_.get(), "received")}) {
    const Moved moved = MovedBytes(*daemon, direction);
    EXPECT_EQ(moved.copies, bytes);
    EXPECT_EQ(moved.sockets, 0);
  }
  for (client::Client* const client : {here_.get(), there_.get()}) {
    ASSERT_OK_AND_ASSIGN(const std::vector<client::PeerDescription> peers, client->Peers());
    ASSERT_EQ(peers.size(), 1u);
    EXPECT_EQ(peers[0].bytes, uint64_t(bytes));
    EXPECT_EQ(peers[0].copied_bytes, uint64_t(bytes));
  }
}

TEST_F(LocalHandOffTest, ThreeWaysToSayNo) {
  const DaemonOptions off{.more_flags = {"--peer-local-copy", "off"}};
  const DaemonOptions limited{.more_flags = {"--peer-rate-bytes", "1GiB"}};
  for (const auto& [sender, receiver] : {std::pair(off, DaemonOptions()), {DaemonOptions(), off}, {limited, {}}}) {
    ASSERT_NO_FATAL_FAILURE(Start(sender, receiver));
    HandOffOutcome sent;
    ASSERT_NO_FATAL_FAILURE(HandOver("raw", &sent));
    ExpectNothingAnywhere();
    const Moved moved = MovedBytes(*receiver_, "received");
    EXPECT_EQ(moved.sockets, double(sent.bytes_sent));
    EXPECT_EQ(moved.copies, 0);
    EXPECT_EQ(ForeignPools(receiver_->pid()), 0);
    TearDown();
  }
}

// Its pages are not sealed: others get a descriptor that reads.
TEST_F(LocalHandOffTest, AlsoOfMemoryThatOutlivesItsDaemon) {
  const TempDir folder;
  const auto kept = [&](const char* name) {
    return DaemonOptions{.more_flags = {"--state-dir", absl::StrCat(folder.path(), "/", name)}};
  };
  for (int i = 0; i < 2; ++i) {  // the second time it is taken over
    ASSERT_NO_FATAL_FAILURE(Start(kept("sender"), kept("receiver")));
    HandOffOutcome sent;
    ASSERT_NO_FATAL_FAILURE(HandOver("hack:k_bits=3,v_bits=2", &sent));
    ExpectNothingAnywhere();
    const Moved moved = MovedBytes(*receiver_, "received");
    EXPECT_EQ(moved.copies, double(sent.bytes_sent));
    EXPECT_EQ(moved.sockets, 0);
    TearDown();
    for (auto* const daemon : {&sender_, &receiver_}) daemon->reset();  // a folder is of one daemon alone
  }
  for (const char* const name : {"/sender", "/receiver"}) KillKeeperOf(folder.path() + name);
}

TEST_F(LocalHandOffTest, ASenderKilledMidwayLeavesNothing) {
  Start();
  const Source source{8, Kind::kNormal, options_};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(receiver_->peer(), kTokens));
  auto claim = other_->ClaimAsync(hand_off->ticket(), 20000);
  ASSERT_OK(LoadLayer(*cache_, made.sequence->id(), source, 0, 0, kTokens));
  ASSERT_TRUE(Eventually([&] { return MovedBytes(*receiver_, "received").copies > 0; }));
  EXPECT_GT(ForeignPools(receiver_->pid()), 0);
  EXPECT_FALSE(claim.ready());
  sender_->Kill();
  const int64_t start = NowMs();
  EXPECT_CODE(claim.Wait(), kUnavailable);
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  ExpectNothingAt(*there_);
  EXPECT_TRUE(Eventually([&] { return ForeignPools(receiver_->pid()) == 0; })) << "a dead daemon's memory is kept";
  // The receiver serves others.
  ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start({}));
  ASSERT_OK_AND_ASSIGN(here_, client::Client::Connect(sender_->listen(), {}));
  HandOffOutcome sent;
  ASSERT_NO_FATAL_FAILURE(HandOver("raw", &sent));
  EXPECT_GE(MovedBytes(*receiver_, "received").copies, double(sent.bytes_sent));
  EXPECT_EQ(MovedBytes(*receiver_, "received").sockets, 0);
}

TEST_F(LocalHandOffTest, AReceiverThatCannotMapIsReachedByTcp) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer needs address space of its own";
  Start({.host_pool_bytes = uint64_t{2} << 30});
  uint64_t pages = 0;
  std::ifstream(absl::StrCat("/proc/", receiver_->pid(), "/statm")) >> pages;
  ASSERT_GT(pages, 0u);
  // Room for all that a daemon allocates, and none for 32 MiB of another's pool.
  const rlim_t limit = pages * 4096 + (16 << 20);
  const rlimit few = {limit, limit};
  ASSERT_EQ(prlimit(receiver_->pid(), RLIMIT_AS, &few, nullptr), 0);
  HandOffOutcome sent;
  ASSERT_NO_FATAL_FAILURE(HandOver("raw", &sent));
  ExpectNothingAnywhere();
  const Moved moved = MovedBytes(*receiver_, "received");
  EXPECT_EQ(moved.sockets, double(sent.bytes_sent));
  EXPECT_EQ(moved.copies, 0);
}

}  // namespace
}  // namespace kvmanager::testing
