// Two daemons and more, and what goes wrong between them: a peer that stands still, a receiver that is full, many
// senders, a link that breaks or changes bytes. However it ends, no byte is wrong and no slot stays taken.
#include <signal.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "tests/daemon_pair.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::ClaimedSequence;
using client::Client;
using client::CreatedSequence;
using client::HandOff;
using client::HandOffOutcome;
using client::Pending;

const DaemonOptions kByTcp{.more_flags = {"--peer-local-copy", "off"}};

class PeerFaultTest : public DaemonPairTest {
 protected:
  void StartPair(const DaemonOptions& sender = {}, const DaemonOptions& receiver = {}) {
    Start(sender, receiver);
    before_here_ = Held(*sender_);
    before_there_ = Held(*receiver_);
  }
  void TearDown() override {
    hand_off_.reset();
    made_.sequence.reset();
    DaemonPairTest::TearDown();
  }
  /// A sequence of `tokens` tokens at the sender.
  void Make(int tokens) {
    ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
    ASSERT_OK(Load(*cache_, made_.sequence->id(), source_, 0, tokens, 1024));
    tokens_ = tokens;
  }
  /// What was claimed by `ticket` reads as what stayed.
  void ExpectSameBits(const std::string& ticket) {
    ASSERT_OK_AND_ASSIGN(const ClaimedSequence claimed, other_->Claim(ticket));
    EXPECT_EQ(claimed.tokens, uint64_t(tokens_));
    ASSERT_OK_AND_ASSIGN(const auto stayed, Ask(*cache_, made_.sequence->id(), source_, tokens_ - 1));
    ASSERT_OK_AND_ASSIGN(const auto went, Ask(*other_, claimed.sequence->id(), source_, tokens_ - 1));
    EXPECT_EQ(stayed, went);
  }
  /// Both daemons hold what they held at the start, once the test has given back what it holds.
  void ExpectNothingLeaked() {
    hand_off_.reset();
    made_.sequence.reset();
    for (Client* const client : {here_.get(), there_.get()}) ASSERT_OK(client->Purge(Client::kAllCaches));
    EXPECT_TRUE(Eventually([&] { return Held(*sender_) == before_here_; }, kPeerMs));
    EXPECT_TRUE(Eventually([&] { return Held(*receiver_) == before_there_; }, kPeerMs));
    EXPECT_EQ(Held(*sender_), before_here_);
    EXPECT_EQ(Held(*receiver_), before_there_);
  }

  const Source source_{61, Kind::kNormal, options_};
  std::map<std::string, double> before_here_, before_there_;
  CreatedSequence made_;
  std::unique_ptr<HandOff> hand_off_;
  int tokens_ = 0;
};

/// By TCP, and by copies from memory to memory.
class StallTest : public PeerFaultTest, public ::testing::WithParamInterface<bool> {
 protected:
  static constexpr int kTokens = 64 * 60 + 5;
  void SetUp() override {
    StartPair(GetParam() ? DaemonOptions() : kByTcp, GetParam() ? DaemonOptions() : kByTcp);
    tokens_ = kTokens;
  }
  /// A hand-off of which the first layer has come, and the second is not made yet.
  void BeginHalf() {
    ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
    ASSERT_OK_AND_ASSIGN(hand_off_, made_.sequence->BeginHandOff(receiver_->peer(), kTokens));
    ASSERT_OK(LoadLayer(*cache_, made_.sequence->id(), source_, 0, 0, kTokens));
    const std::string by = GetParam() ? "by=\"copy\"" : "by=\"socket\"";
    ASSERT_TRUE(Eventually([&] {
      return Metric(*receiver_, "kvmanager_transport_bytes_total", {"direction=\"received\"", by}) > 0;
    }));
  }
};

TEST_P(StallTest, AStoppedSenderIsGivenUpAndLearnsIt) {
  ASSERT_NO_FATAL_FAILURE(BeginHalf());
  auto claim = other_->ClaimAsync(hand_off_->ticket(), 20000);
  sender_->process().Signal(SIGSTOP);
  const int64_t start = NowMs();
  const absl::Status gone = claim.Wait().status();
  EXPECT_CODE(gone, kUnavailable);
  EXPECT_TRUE(absl::StrContains(absl::string_view(gone.message()), "ms without a sign of sender")) << gone;
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  ExpectNothingAt(*there_);
  sender_->process().Signal(SIGCONT);
  EXPECT_OK(LoadLayer(*cache_, made_.sequence->id(), source_, 1, 0, kTokens));
  EXPECT_FALSE(hand_off_->Finish("late").ok());
  ExpectNothingAt(*there_);
  // The sequence is as it was, and goes at the second try.
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made_.sequence->HandOff(receiver_->peer(), "again"));
  ASSERT_NO_FATAL_FAILURE(ExpectSameBits(sent.ticket));
  ExpectNothingLeaked();
}

TEST_P(StallTest, AStoppedReceiverIsGivenUpAndLearnsIt) {
  ASSERT_NO_FATAL_FAILURE(BeginHalf());
  receiver_->process().Signal(SIGSTOP);
  const int64_t start = NowMs();
  ASSERT_OK(LoadLayer(*cache_, made_.sequence->id(), source_, 1, 0, kTokens));
  const absl::Status gone = hand_off_->Finish("blob").status();
  EXPECT_CODE(gone, kDeadlineExceeded);
  EXPECT_TRUE(absl::StrContains(absl::string_view(gone.message()), "ms without a sign of peer")) << gone;
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  // What the receiver had been told to copy may be other bytes by now.
  made_.sequence.reset();
  const Source others{62, Kind::kNormal, options_};
  ASSERT_OK_AND_ASSIGN(CreatedSequence overwrites, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, overwrites.sequence->id(), others, 0, kTokens, 1024));
  receiver_->process().Signal(SIGCONT);
  ExpectNothingAt(*there_);
  EXPECT_CODE(other_->Claim(hand_off_->ticket()), kUnavailable);
  overwrites.sequence.reset();
  ASSERT_NO_FATAL_FAILURE(Make(kTokens));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made_.sequence->HandOff(receiver_->peer(), "again"));
  ASSERT_NO_FATAL_FAILURE(ExpectSameBits(sent.ticket));
  ExpectNothingLeaked();
}

INSTANTIATE_TEST_SUITE_P(Ways, StallTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "LocalCopy" : "Tcp"; });

TEST_F(PeerFaultTest, AFullReceiverSaysWhyOrLetsWait) {
  StartPair({}, {.host_pool_bytes = 4 << 20});
  ASSERT_OK_AND_ASSIGN(CreatedSequence holder, other_->CreateSequence());
  ASSERT_OK(Load(*other_, holder.sequence->id(), source_, 0, 48 * 64, 1024));
  ASSERT_NO_FATAL_FAILURE(Make(30 * 64));
  const auto here = Held(*sender_), there = Held(*receiver_);
  EXPECT_TRUE(NamesField(made_.sequence->HandOff(receiver_->peer(), "").status(), absl::StatusCode::kResourceExhausted,
                         "host-pool-bytes"));
  EXPECT_EQ(Held(*sender_), here);
  EXPECT_EQ(Held(*receiver_), there);
  auto waiting = made_.sequence->HandOffAsync(receiver_->peer(), "", 20000, 20000);
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_hand_offs_waiting") == 1; }));
  EXPECT_FALSE(waiting.ready());
  holder.sequence.reset();
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, waiting.Wait());
  ASSERT_NO_FATAL_FAILURE(ExpectSameBits(sent.ticket));
  ExpectNothingLeaked();
}

TEST_F(PeerFaultTest, WhatCanNeverFitIsRefusedAtOnce) {
  StartPair({}, {.host_pool_bytes = 4 << 20});
  // Encoded it would fit, but most of it is within the lag, so it is raw besides.
  const client::CacheOptions options = SmallCache("hack", /*lag_pages=*/64);
  const Source source{63, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(const auto cache, here_->OpenCache(options));
  for (const auto& [tokens, code] :
       {std::pair(64 * 70, absl::StatusCode::kResourceExhausted), std::pair(64 * 10, absl::StatusCode::kOk)}) {
    ASSERT_OK_AND_ASSIGN(const CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, tokens, 1024));
    const auto sent = made.sequence->HandOff(receiver_->peer(), "", /*timeout_ms=*/20000, /*room_ms=*/600000);
    EXPECT_EQ(sent.status().code(), code) << sent.status();
  }
}

TEST_F(PeerFaultTest, WhatWaitsForRoomGoesWithItsSender) {
  StartPair({}, {.host_pool_bytes = 4 << 20});
  ASSERT_OK_AND_ASSIGN(CreatedSequence holder, other_->CreateSequence());
  ASSERT_OK(Load(*other_, holder.sequence->id(), source_, 0, 48 * 64, 1024));
  ASSERT_NO_FATAL_FAILURE(Make(30 * 64));
  const auto waiting = [&] { return Metric(*receiver_, "kvmanager_hand_offs_waiting"); };
  constexpr int64_t kRoomMs = 600000;
  {
    const auto given_up = made_.sequence->HandOffAsync(receiver_->peer(), "", kRoomMs, kRoomMs);
    EXPECT_TRUE(Eventually([&] { return waiting() == 1; }));
  }
  EXPECT_TRUE(Eventually([&] { return waiting() == 0; })) << "of a call that was given up";
  const auto killed = made_.sequence->HandOffAsync(receiver_->peer(), "", kRoomMs, kRoomMs);
  EXPECT_TRUE(Eventually([&] { return waiting() == 1; }));
  sender_->Kill();
  EXPECT_TRUE(Eventually([&] { return waiting() == 0; })) << "of a sender that was killed";
}

TEST_F(PeerFaultTest, ALinkThatBreaksAtAnyPoint) {
  // A break costs at most what is on its way: the window.
  DaemonOptions receiver = kByTcp;
  receiver.more_flags.insert(receiver.more_flags.end(), {"--peer-window-bytes", "128KiB"});
  StartPair(kByTcp, receiver);
  Proxy proxy(receiver_->peer());
  ASSERT_NO_FATAL_FAILURE(Make(64 * 64 + 5));
  std::mt19937_64 random(1);
  const auto wire = [&] { return Metric(*sender_, "kvmanager_transport_bytes_total", {"direction=\"sent\""}); };
  const double before = wire();
  uint64_t needed = 0, resent = 0, resumes = 0;
  for (int seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    proxy.Spoil(Proxy::Fault::kCut, 2000 + random() % (4 << 20));
    ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made_.sequence->HandOff(proxy.address(), ""));
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(sent.ticket));
    resent += sent.bytes_resent;
    needed += sent.bytes_sent - sent.bytes_resent;
    resumes += sent.resumes;
  }
  EXPECT_GT(proxy.faults(), 90);
  EXPECT_GT(resumes, 90u);
  EXPECT_LE(resent, needed / 20) << resent << " bytes sent twice of " << needed;
  EXPECT_LE(wire() - before, 1.05 * double(needed));
  ExpectNothingLeaked();
}

TEST_F(PeerFaultTest, AChangedBitIsNeverTaken) {
  StartPair(kByTcp, kByTcp);
  Proxy proxy(receiver_->peer());
  ASSERT_NO_FATAL_FAILURE(Make(64 * 32 + 5));
  std::mt19937_64 random(2);
  int arrived = 0;
  for (int seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    proxy.Spoil(Proxy::Fault::kFlip, random() % (2 << 20));
    const absl::StatusOr<HandOffOutcome> sent = made_.sequence->HandOff(proxy.address(), "");
    // A hello that is changed into another version's, or an offer, may end it.
    if (!sent.ok()) continue;
    ++arrived;
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(sent->ticket));
  }
  EXPECT_GT(proxy.faults(), 45);
  EXPECT_GT(arrived, 40);
  EXPECT_GT(Metric(*receiver_, "kvmanager_transport_checksum_failures_total"), 25);
  ExpectNothingLeaked();
}

/// Daemons that all hand over to one.
class ManySendersTest : public PeerFaultTest, public ::testing::WithParamInterface<bool> {};

TEST_P(ManySendersTest, AllArriveAndNoneIsLeftBehind) {
  constexpr int kSenders = 16;
  DaemonOptions options = GetParam() ? DaemonOptions() : kByTcp;
  DaemonOptions receiver = options;
  receiver.host_pool_bytes = 128 << 20;
  // So that a sender that gets to run before the others has sent little when they come.
  receiver.more_flags.insert(receiver.more_flags.end(), {"--peer-window-bytes", "128KiB"});
  StartPair(options, receiver);
  struct Sender {
    std::unique_ptr<DaemonProcess> daemon;
    std::unique_ptr<Client> client;
    std::unique_ptr<client::Cache> cache;
    CreatedSequence made;
    std::unique_ptr<Pending<absl::StatusOr<HandOffOutcome>>> pending;
  };
  constexpr int kTokens = 64 * 64 + 5;  // 4 MiB
  options.host_pool_bytes = 8 << 20;
  options.more_flags.insert(options.more_flags.end(), {"--threads", "2"});
  std::vector<Sender> senders(kSenders);
  for (Sender& sender : senders) {
    ASSERT_OK_AND_ASSIGN(sender.daemon, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(sender.client, Client::Connect(sender.daemon->listen(), {}));
    ASSERT_OK_AND_ASSIGN(sender.cache, sender.client->OpenCache(options_));
    ASSERT_OK_AND_ASSIGN(sender.made, sender.cache->CreateSequence());
    ASSERT_OK(Load(*sender.cache, sender.made.sequence->id(), source_, 0, kTokens, 4096));
  }
  // They begin together: the receiver stands still until all have called. When it has a quarter of all bytes it stands
  // still once more, and each sender's share can be looked at.
  receiver_->process().Signal(SIGSTOP);
  for (Sender& sender : senders) {
    sender.pending = std::make_unique<Pending<absl::StatusOr<HandOffOutcome>>>(
        sender.made.sequence->HandOffAsync(receiver_->peer(), "", 60000));
    ASSERT_TRUE(Eventually([&] { return Metric(*sender.daemon, "kvmanager_transport_active_transfers") == 1; }));
  }
  receiver_->process().Signal(SIGCONT);
  constexpr double kAllBytes = double{kSenders} * kTokens * 2 * 2 * 2 * 2 * 64;
  ASSERT_TRUE(Eventually([&] {
    return Metric(*receiver_, "kvmanager_transport_bytes_total", {"direction=\"received\""}) > kAllBytes / 4;
  }));
  receiver_->process().Signal(SIGSTOP);
  double sum = 0, squares = 0;
  for (Sender& sender : senders) {
    const double share = Metric(*sender.daemon, "kvmanager_transport_bytes_total", {"direction=\"sent\""});
    sum += share;
    squares += share * share;
  }
  receiver_->process().Signal(SIGCONT);
  EXPECT_LT(sum, kAllBytes) << "nothing was left to be shared";
  // Jain's index: 1 when all have got as much, 1/16 when one took all.
  EXPECT_GT(sum * sum / (kSenders * squares), 0.5);
  for (Sender& sender : senders) {
    ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, sender.pending->Wait());
    ASSERT_OK_AND_ASSIGN(const ClaimedSequence claimed, other_->Claim(sent.ticket));
    ASSERT_OK_AND_ASSIGN(const auto stayed, Ask(*sender.cache, sender.made.sequence->id(), source_, kTokens - 1));
    ASSERT_OK_AND_ASSIGN(const auto went, Ask(*other_, claimed.sequence->id(), source_, kTokens - 1));
    EXPECT_EQ(stayed, went);
    sender.pending.reset();
    sender.made.sequence.reset();
    ExpectNothingAt(*sender.client);
  }
  ExpectNothingLeaked();
}

INSTANTIATE_TEST_SUITE_P(Ways, ManySendersTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "LocalCopy" : "Tcp"; });

}  // namespace
}  // namespace kvmanager::testing
