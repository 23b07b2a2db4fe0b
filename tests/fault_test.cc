// What dies, and what everyone else sees then (docs/design.md, section 6).
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::HandOffOutcome;

constexpr int64_t kLeaseMs = 1000;
constexpr int64_t kPeerMs = 5000;

class FaultTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start({}));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  }
  void TearDown() override { client_.reset(); }

  static client::DaemonDescription Status(Client& client) {
    absl::StatusOr<client::DaemonDescription> status = client.Status();
    EXPECT_OK(status);
    return status.ok() ? *status : client::DaemonDescription{};
  }
  /// Nothing of a dead client is left: no lease, no connection but ours, no page.
  static bool Clean(Client& client) {
    const client::DaemonDescription status = Status(client);
    return status.leases == 0 && status.connections == 1 && status.pools.at(0).used_bytes == 0;
  }
  std::unique_ptr<ChildProcess> StartVictim(const std::string& mode, pid_t* child = nullptr) {
    absl::StatusOr<std::unique_ptr<ChildProcess>> victim =
        ChildProcess::Start({DataPath("tests/fault_client"), daemon_->listen(), mode});
    EXPECT_OK(victim);
    absl::StatusOr<std::string> line = (*victim)->ReadLine();
    EXPECT_OK(line);
    if (!line.ok()) return nullptr;
    absl::string_view rest = *line;
    EXPECT_TRUE(absl::ConsumePrefix(&rest, "ready")) << *line;
    int pid = 0;
    if (child != nullptr) {
      EXPECT_TRUE(absl::SimpleAtoi(rest, &pid)) << *line;
      *child = pid;
    }
    return std::move(*victim);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(FaultTest, AKilledClientsLeasesAreFreeWithinASecond) {
  std::unique_ptr<ChildProcess> victim = StartVictim("hold");
  ASSERT_NE(victim, nullptr);
  EXPECT_EQ(Status(*client_).leases, 2u);
  EXPECT_GT(Status(*client_).pools.at(0).used_bytes, 0u);
  victim->Signal(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return Clean(*client_); }, kLeaseMs));
}

TEST_F(FaultTest, AForkedChildDoesNotKeepItsParentsLeases) {
  for (const char* const mode : {"fork", "raw-fork"}) {
    pid_t child = 0;
    std::unique_ptr<ChildProcess> victim = StartVictim(mode, &child);
    ASSERT_NE(victim, nullptr);
    ASSERT_GT(child, 0);
    EXPECT_EQ(Status(*client_).leases, 2u) << mode;
    victim->Signal(SIGKILL);
    EXPECT_TRUE(Eventually([&] { return Clean(*client_); }, kLeaseMs)) << mode;
    EXPECT_EQ(kill(child, 0), 0) << "the child lives on: " << mode;
    kill(child, SIGKILL);
  }
}

TEST_F(FaultTest, ClientsKilledAtWorkLeaveNothingBehind) {
  const CacheOptions options = SmallCache("hack:k_bits=3,v_bits=2", 1);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{5, Kind::kNormal, options};
  for (int round = 0; round < 6; ++round) {
    std::unique_ptr<ChildProcess> a = StartVictim("work"), b = StartVictim("work");
    ASSERT_NE(a, nullptr);
    ASSERT_NE(b, nullptr);
    // Another client works meanwhile, and as many of its calls as the round's number go by.
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    for (int i = 0; i < round; ++i) ASSERT_OK(Feed(*cache, made.sequence->id(), source, i * 20, 20, 20));
    a->Signal(SIGKILL);
    b->Signal(SIGKILL);
    ASSERT_OK(Feed(*cache, made.sequence->id(), source, round * 20, 20, 20));
    made.sequence.reset();
    EXPECT_TRUE(Eventually([&] { return Clean(*client_); }, kLeaseMs)) << "round " << round;
  }
}

TEST_F(FaultTest, AGivenUpCallDoesNotKeepALease) {
  // A peer that accepts and says nothing.
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  ASSERT_EQ(listen(listener, 4), 0);
  socklen_t size = sizeof at;
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size), 0);
  const std::string peer = absl::StrCat("127.0.0.1:", ntohs(at.sin_port));

  const CacheOptions options = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), Source{1, Kind::kNormal, options}, 0, 100, 100));
  {
    auto pending = made.sequence->HandOffAsync(peer, "", 60000);
    ASSERT_OK(client_->Ping());
    EXPECT_FALSE(pending.ready());
  }
  made.sequence.reset();
  EXPECT_TRUE(Eventually([&] { return Clean(*client_); }, kLeaseMs));
  // And one that waits gets its answer in time.
  ASSERT_OK_AND_ASSIGN(CreatedSequence again, cache->CreateSequence());
  ASSERT_OK(Load(*cache, again.sequence->id(), Source{1, Kind::kNormal, options}, 0, 100, 100));
  const int64_t start = NowMs();
  const absl::StatusOr<HandOffOutcome> answer = again.sequence->HandOff(peer, "");
  EXPECT_FALSE(answer.ok());
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  close(listener);
}

TEST_F(FaultTest, ADeadDaemonIsUnavailableAtOnceAndItsHandlesStayVoid) {
  TempDir directory;
  DaemonOptions options;
  options.listen = absl::StrCat("unix:", directory.path(), "/kv.sock");
  ASSERT_OK_AND_ASSIGN(auto mortal, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(options.listen, {}));
  const CacheOptions shape = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(shape));
  ASSERT_OK_AND_ASSIGN(auto arena, client->CreateArena(1 << 20));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  const Source source{2, Kind::kNormal, shape};
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 10, 10));
  const uint64_t epoch = client->boot_epoch();

  mortal->Kill();
  const int64_t start = NowMs();
  EXPECT_CODE(Load(*cache, made.sequence->id(), source, 10, 1, 1), kUnavailable);
  EXPECT_CODE(client->Ping(), kUnavailable);
  EXPECT_CODE(made.sequence->Info(), kUnavailable);
  EXPECT_CODE(cache->CreateSequence(), kUnavailable);
  EXPECT_LT(NowMs() - start, 1000 * kSlowdown);
  EXPECT_FALSE(client->connected());
  arena->data()[0] = 1;  // still mapped: an engine that writes its next token does not crash

  // The dead daemon's socket is in the way of nobody.
  ASSERT_OK_AND_ASSIGN(auto reborn, DaemonProcess::Start(options));
  ASSERT_OK(client->Reconnect());
  EXPECT_TRUE(client->connected());
  EXPECT_NE(client->boot_epoch(), epoch);
  EXPECT_CODE(Load(*cache, made.sequence->id(), source, 10, 1, 1), kFailedPrecondition);
  EXPECT_CODE(made.sequence->Info(), kFailedPrecondition);
  ASSERT_OK_AND_ASSIGN(auto new_cache, client->OpenCache(shape));
  ASSERT_OK_AND_ASSIGN(CreatedSequence fresh, new_cache->CreateSequence());
  EXPECT_OK(Load(*new_cache, fresh.sequence->id(), source, 0, 10, 10));
  // Destroying the void handles says nothing to the new daemon.
  made.sequence.reset();
  cache.reset();
  EXPECT_OK(fresh.sequence->Info());
  EXPECT_EQ(Status(*client).leases, 1u);
  fresh.sequence.reset();
  new_cache.reset();
  client.reset();
}

TEST_F(FaultTest, ACallToAStoppedDaemonEndsAtItsDeadline) {
  Client::Options options;
  options.deadline_ms = 300;
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon_->listen(), options));
  daemon_->process().Signal(SIGSTOP);
  EXPECT_CODE(client->Ping(), kDeadlineExceeded);
  daemon_->process().Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&] { return client->Ping().ok(); }));
}

/// Two daemons with a proxy between them that stands still in the middle of a hand-off.
class MidTransferTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const DaemonOptions options{.more_flags = {"--peer-local-copy", "off"}};  // so that pages pass the proxy
    ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(receiver_, DaemonProcess::Start(options));
    proxy_ = std::make_unique<Proxy>(receiver_->peer());
    proxy_->StallAfter(1 << 20);
    ASSERT_OK_AND_ASSIGN(here_, Client::Connect(sender_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(there_, Client::Connect(receiver_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, here_->OpenCache(options_));
    ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
    ASSERT_OK(Load(*cache_, made_.sequence->id(), source_, 0, kTokens, 1024));
    ASSERT_OK(made_.sequence->Publish(Names(*cache_, source_, kTokens / 64)));
  }
  void TearDown() override {
    made_.sequence.reset();
    cache_.reset();
    here_.reset();
    there_.reset();
    proxy_.reset();
  }
  static uint64_t UsedBytes(Client& client) {
    absl::StatusOr<client::DaemonDescription> status = client.Status();
    EXPECT_OK(status);
    return status.ok() ? status->pools.at(0).used_bytes : UINT64_MAX;
  }
  void ExpectNothingAtTheReceiver() {
    EXPECT_TRUE(Eventually([&] { return UsedBytes(*there_) == 0; }, kPeerMs)) << UsedBytes(*there_);
    ASSERT_OK_AND_ASSIGN(const client::DaemonDescription status, there_->Status());
    EXPECT_EQ(status.published_blocks, 0u);
    EXPECT_EQ(status.leases, 0u);
    ASSERT_OK_AND_ASSIGN(const std::vector<client::SequenceDescription> sequences, there_->Sequences());
    EXPECT_TRUE(sequences.empty());
    ASSERT_OK_AND_ASSIGN(auto cache, there_->OpenCache(options_));
    ASSERT_OK_AND_ASSIGN(CreatedSequence probe, cache->CreateSequence(Names(*cache, source_, kTokens / 64)));
    EXPECT_EQ(probe.match.hit_blocks, 0);
    ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*receiver_));
    EXPECT_EQ(page.Sum("kvmanager_page_bytes"), 0);
    EXPECT_EQ(page.Sum("kvmanager_pool_used_bytes"), 0);
    EXPECT_EQ(page.Sum("kvmanager_published_blocks"), 0);
  }

  static constexpr int kTokens = 4096;  // 4 MiB raw
  const CacheOptions options_ = SmallCache("raw");
  const Source source_{91, Kind::kNormal, options_};
  std::unique_ptr<DaemonProcess> sender_, receiver_;
  std::unique_ptr<Proxy> proxy_;
  std::unique_ptr<Client> here_, there_;
  std::unique_ptr<Cache> cache_;
  CreatedSequence made_;
};

TEST_F(MidTransferTest, AKilledSenderLeavesNothingAtTheReceiver) {
  auto pending = made_.sequence->HandOffAsync(proxy_->address(), "blob", 30000);
  ASSERT_TRUE(proxy_->WaitStalled());
  EXPECT_TRUE(Eventually([&] { return UsedBytes(*there_) > 0; })) << "slots are reserved meanwhile";
  EXPECT_FALSE(pending.ready());
  sender_->Kill();
  const int64_t start = NowMs();
  EXPECT_CODE(pending.Wait(), kUnavailable);
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  ExpectNothingAtTheReceiver();
}

TEST_F(MidTransferTest, ATransferThatStandsStillIsGivenUpOnBothSides) {
  const int64_t start = NowMs();
  const absl::StatusOr<HandOffOutcome> outcome = made_.sequence->HandOff(proxy_->address(), "blob", 30000);
  EXPECT_FALSE(outcome.ok());
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  ExpectNothingAtTheReceiver();
  // The sender's sequence is as it was, and may be sent again.
  proxy_->StallAfter(UINT64_MAX);
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made_.sequence->HandOff(proxy_->address(), "blob"));
  EXPECT_EQ(sent.pages_sent, uint64_t{2} * kTokens / 64);
}

TEST_F(MidTransferTest, AKilledReceiverIsReportedAndTheSenderGoesOn) {
  ASSERT_OK_AND_ASSIGN(const std::vector<float> before, Ask(*cache_, made_.sequence->id(), source_, kTokens - 1));
  auto pending = made_.sequence->HandOffAsync(proxy_->address(), "blob", 30000);
  ASSERT_TRUE(proxy_->WaitStalled());
  receiver_->Kill();
  const int64_t start = NowMs();
  EXPECT_CODE(pending.Wait(), kUnavailable);
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  ASSERT_OK_AND_ASSIGN(const std::vector<float> after, Ask(*cache_, made_.sequence->id(), source_, kTokens - 1));
  EXPECT_EQ(before, after);
  EXPECT_OK(Feed(*cache_, made_.sequence->id(), source_, kTokens, 10, 1));
  ASSERT_OK_AND_ASSIGN(const std::vector<client::PeerDescription> peers, here_->Peers());
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_EQ(peers[0].failures, 1u);
  EXPECT_FALSE(peers[0].last_error.empty());
  EXPECT_EQ(peers[0].active, 0u);
}

TEST_F(MidTransferTest, AStoppedReceiverIsGivenUp) {
  ASSERT_OK_AND_ASSIGN(const std::vector<float> before, Ask(*cache_, made_.sequence->id(), source_, kTokens - 1));
  auto pending = made_.sequence->HandOffAsync(proxy_->address(), "blob", 30000);
  ASSERT_TRUE(proxy_->WaitStalled());
  receiver_->process().Signal(SIGSTOP);
  const int64_t start = NowMs();
  EXPECT_FALSE(pending.Wait().ok());
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  receiver_->process().Signal(SIGCONT);
  ASSERT_OK_AND_ASSIGN(const std::vector<float> after, Ask(*cache_, made_.sequence->id(), source_, kTokens - 1));
  EXPECT_EQ(before, after);
  ExpectNothingAtTheReceiver();
}

TEST_F(MidTransferTest, AReceivingHostThatLosesItsConnectionDropsWhatItHad) {
  auto pending = made_.sequence->HandOffAsync(proxy_->address(), "blob", 30000);
  ASSERT_TRUE(proxy_->WaitStalled());
  proxy_->Refuse(true);
  proxy_->Cut();
  const int64_t start = NowMs();
  EXPECT_CODE(pending.Wait(), kUnavailable);
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  ExpectNothingAtTheReceiver();
}

TEST_F(MidTransferTest, ASendersClientThatDiesEndsTheTransfer) {
  auto pending = std::make_unique<client::Pending<absl::StatusOr<HandOffOutcome>>>(
      made_.sequence->HandOffAsync(proxy_->address(), "blob", 30000));
  ASSERT_TRUE(proxy_->WaitStalled());
  pending.reset();
  made_.sequence.reset();
  ExpectNothingAtTheReceiver();
  ASSERT_OK(here_->Purge(Client::kAllCaches));
  EXPECT_TRUE(Eventually([&] { return UsedBytes(*here_) == 0; }));
}

}  // namespace
}  // namespace kvmanager::testing
