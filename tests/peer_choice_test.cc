// One sender and two receivers: what peers say about themselves, and which of them gets a hand-off.
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::HandOffOutcome;
using client::PeerDescription;

class PeerChoiceTest : public ::testing::Test {
 protected:
  void SetUp() override { Start({}); }
  void Start(const std::vector<std::string>& sender_flags) {
    DaemonOptions options;
    options.more_flags = {"--threads", "2"};
    options.host_pool_bytes = 16 << 20;
    ASSERT_OK_AND_ASSIGN(first_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(second_, DaemonProcess::Start(options));
    both_ = first_->peer() + "," + second_->peer();
    StartSender(sender_flags);
  }
  void StartSender(const std::vector<std::string>& flags, const std::string& hand_off_peers = "any") {
    DaemonOptions options;
    options.hand_off_peers = hand_off_peers;
    options.more_flags = {"--threads", "2"};
    options.more_flags.insert(options.more_flags.end(), flags.begin(), flags.end());
    options.host_pool_bytes = 16 << 20;
    ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(here_, Client::Connect(sender_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, here_->OpenCache(options_));
    ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
    ASSERT_OK(Load(*cache_, made_.sequence->id(), source_, 0, kTokens, 512));
  }
  // Takes most of a receiver's memory, until the client goes.
  absl::Status Fill(const DaemonProcess& daemon) {
    KV_ASSIGN_OR_RETURN(filler_, Client::Connect(daemon.listen(), {}));
    KV_ASSIGN_OR_RETURN(filled_, filler_->OpenCache(options_));
    KV_ASSIGN_OR_RETURN(holder_, filled_->CreateSequence());
    return Load(*filled_, holder_.sequence->id(), source_, 0, 240 * 64, 1024);
  }

  static constexpr int kTokens = 64 * 20 + 5;  // of 32 KiB each page, in two layers
  const CacheOptions options_ = SmallCache("raw", 1);
  const Source source_{31, Kind::kNormal, options_};
  std::unique_ptr<DaemonProcess> first_, second_, sender_;
  std::string both_;
  std::unique_ptr<Client> here_, filler_;
  std::unique_ptr<client::Cache> cache_, filled_;
  CreatedSequence made_, holder_;
};

TEST_F(PeerChoiceTest, PeersSayHowMuchTheyHaveToDo) {
  // Nothing was sent yet: those that are named are asked.
  ASSERT_OK_AND_ASSIGN(std::vector<PeerDescription> peers, here_->Peers());
  EXPECT_TRUE(peers.empty());
  ASSERT_OK_AND_ASSIGN(peers, here_->Peers({second_->peer(), "127.0.0.1:1", first_->peer()}));
  ASSERT_EQ(peers.size(), 3u);
  EXPECT_EQ(peers[0].peer, second_->peer());
  ASSERT_OK(peers[0].load);
  EXPECT_EQ(peers[0].load->capacity_bytes, uint64_t{16} << 20);
  EXPECT_EQ(peers[0].load->free_bytes, uint64_t{16} << 20);
  EXPECT_EQ(peers[0].load->queued_bytes, 0u);
  EXPECT_EQ(peers[0].load->active_transfers, 0u);
  EXPECT_EQ(peers[0].bytes_per_second, 0);
  EXPECT_CODE(peers[1].load, kUnavailable);
  EXPECT_OK(peers[2].load);

  // One that was offered, and some pages of which are still to be made.
  ASSERT_OK_AND_ASSIGN(const auto hand_off, made_.sequence->BeginHandOff(first_->peer(), kTokens + 5 * 64));
  EXPECT_EQ(hand_off->peer(), first_->peer());
  const auto load = [&] {
    const auto asked = here_->Peers({first_->peer()});
    return asked.ok() && asked->at(0).load.ok() ? *asked->at(0).load : client::PeerLoad{};
  };
  EXPECT_TRUE(Eventually([&] { return load().active_transfers == 1; }));
  EXPECT_LT(load().free_bytes, uint64_t{16} << 20);
  EXPECT_GT(load().queued_bytes, 0u);
  ASSERT_OK(Load(*cache_, made_.sequence->id(), source_, kTokens, 5 * 64, 64));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, hand_off->Finish(""));
  EXPECT_EQ(sent.peer, first_->peer());
  EXPECT_EQ(sent.layers.size(), 2u);
  for (const client::LayerTimes& layer : sent.layers) {
    EXPECT_GE(layer.ready_first, 0);
    EXPECT_LE(layer.ready_first, layer.ready_last);
    EXPECT_LE(layer.ready_first, layer.sent_first);
    EXPECT_LE(layer.sent_first, layer.arrived_last);
  }
  EXPECT_GT(sent.sending_seconds, 0);
  EXPECT_LE(sent.sending_seconds, sent.seconds);

  // Now it is known, and what was measured is listed.
  ASSERT_OK_AND_ASSIGN(peers, here_->Peers());
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_EQ(peers[0].peer, first_->peer());
  EXPECT_GT(peers[0].bytes_per_second, 0);
  ASSERT_OK(peers[0].load);
  EXPECT_EQ(peers[0].load->queued_bytes, 0u);
  // The other side cannot be asked: it is known by where it called from.
  ASSERT_OK_AND_ASSIGN(const auto there, Client::Connect(first_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(peers, there->Peers());
  ASSERT_EQ(peers.size(), 1u);
  EXPECT_TRUE(peers[0].incoming);
  EXPECT_FALSE(peers[0].load.ok());

  EXPECT_TRUE(NamesField(here_->Peers(std::vector<std::string>(257, "h:1")).status(),
                         absl::StatusCode::kInvalidArgument, "peers"));
}

TEST_F(PeerChoiceTest, EqualPeersAreTakenInTheirOrder) {
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome one, made_.sequence->HandOff(both_, ""));
  EXPECT_EQ(one.peer, first_->peer());
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome other,
                       made_.sequence->HandOff(second_->peer() + "," + first_->peer() + "," + "127.0.0.1:1", ""));
  // Nothing was measured to the second, so it counts as fast as the first, which now has less room but enough.
  EXPECT_EQ(other.peer, second_->peer());
}

TEST_F(PeerChoiceTest, TheOneWithLessQueuedGetsIt) {
  // A hand-off to the first that is begun keeps its bytes queued there.
  ASSERT_OK_AND_ASSIGN(CreatedSequence slow, cache_->CreateSequence());
  ASSERT_OK_AND_ASSIGN(const auto begun, slow.sequence->BeginHandOff(first_->peer(), 64 * 40));
  EXPECT_TRUE(Eventually([&] {
    const auto asked = here_->Peers({first_->peer()});
    return asked.ok() && asked->at(0).load.ok() && asked->at(0).load->queued_bytes > 0;
  }));
  ASSERT_OK_AND_ASSIGN(const auto chosen, made_.sequence->BeginHandOff(both_, kTokens));
  EXPECT_EQ(chosen->peer(), second_->peer());
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, chosen->Finish("blob"));
  EXPECT_EQ(sent.peer, second_->peer());
  ASSERT_OK_AND_ASSIGN(const auto there, Client::Connect(second_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(const auto cache, there->OpenCache(options_));
  ASSERT_OK_AND_ASSIGN(const client::ClaimedSequence claimed, cache->Claim(chosen->ticket()));
  EXPECT_EQ(claimed.blob, "blob");
}

TEST_F(PeerChoiceTest, OneWithoutRoomIsPassedOver) {
  ASSERT_OK(Fill(*first_));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made_.sequence->HandOff(both_, ""));
  EXPECT_EQ(sent.peer, second_->peer());
}

TEST_F(PeerChoiceTest, WhereAllAreFullTheBestMayLetItWait) {
  ASSERT_OK(Fill(*first_));
  const std::string full = first_->peer() + ",127.0.0.1:1";
  const absl::Status refused = made_.sequence->HandOff(full, "").status();
  EXPECT_CODE(refused, kResourceExhausted);
  EXPECT_NE(refused.message().find("127.0.0.1:1: "), absl::string_view::npos) << refused;
  auto waiting = made_.sequence->HandOffAsync(full, "", 20000, 20000);
  EXPECT_TRUE(Eventually([&] {
    const auto page = Scrape(*first_);
    return page.ok() && page->Sum("kvmanager_hand_offs_waiting") == 1;
  }));
  EXPECT_FALSE(waiting.ready());
  holder_.sequence.reset();
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, waiting.Wait());
  EXPECT_EQ(sent.peer, first_->peer());
}

TEST_F(PeerChoiceTest, OneThatRefusesIsFollowedByTheNext) {
  // It answers that it has room, and takes nothing.
  ASSERT_OK_AND_ASSIGN(const auto there, Client::Connect(first_->listen(), {}));
  ASSERT_OK(there->Drain(true));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made_.sequence->HandOff(both_, ""));
  EXPECT_EQ(sent.peer, second_->peer());
  ASSERT_OK_AND_ASSIGN(const auto begun, made_.sequence->BeginHandOff(both_, kTokens));
  EXPECT_EQ(begun->peer(), second_->peer());
  ASSERT_OK(begun->Finish(""));
}

TEST_F(PeerChoiceTest, OneThatIsSilentOrGoneIsPassedOver) {
  first_->process().Signal(SIGSTOP);
  ASSERT_OK_AND_ASSIGN(HandOffOutcome sent, made_.sequence->HandOff(both_, ""));
  EXPECT_EQ(sent.peer, second_->peer());
  first_->process().Signal(SIGCONT);
  first_->Kill();
  ASSERT_OK_AND_ASSIGN(sent, made_.sequence->HandOff(both_, ""));
  EXPECT_EQ(sent.peer, second_->peer());
  second_->Kill();
  const absl::Status none = made_.sequence->HandOff(both_, "").status();
  EXPECT_CODE(none, kUnavailable);
  for (const auto* daemon : {&first_, &second_}) {
    EXPECT_NE(none.message().find((*daemon)->peer()), absl::string_view::npos) << none;
  }
  // The sequence is still here.
  EXPECT_OK(Load(*cache_, made_.sequence->id(), source_, kTokens, 1, 1));
}

TEST_F(PeerChoiceTest, BadListsAreNamed) {
  for (const std::string& bad : {both_ + ",", "," + both_, both_ + ",nowhere"}) {
    EXPECT_TRUE(NamesField(made_.sequence->HandOff(bad, "").status(), absl::StatusCode::kInvalidArgument, "peer"))
        << bad;
  }
}

TEST_F(PeerChoiceTest, WhereMayBeHandedToIsTheOperators) {
  const std::string first = first_->peer();
  StartSender({}, first);
  const auto denied = [](const absl::Status& status, absl::string_view field) {
    return NamesField(status, absl::StatusCode::kPermissionDenied, field);
  };
  EXPECT_TRUE(denied(made_.sequence->HandOff(second_->peer(), "").status(), "peer"));
  EXPECT_TRUE(denied(made_.sequence->HandOff(first + "," + second_->peer(), "").status(), "peer"));
  EXPECT_TRUE(denied(made_.sequence->BeginHandOff(second_->peer(), kTokens).status(), "peer"));
  EXPECT_TRUE(denied(here_->Peers({first, second_->peer()}).status(), "peers[1]"));
  ASSERT_OK_AND_ASSIGN(const std::vector<PeerDescription> peers, here_->Peers({first}));
  EXPECT_OK(peers[0].load);
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made_.sequence->HandOff(first, ""));
  EXPECT_EQ(sent.peer, first);
}

TEST_F(PeerChoiceTest, WithoutAWordOfTheOperatorItConnectsToNobody) {
  const std::string first = first_->peer();
  StartSender({}, "");
  const absl::Status refused = made_.sequence->HandOff(first, "").status();
  EXPECT_TRUE(NamesField(refused, absl::StatusCode::kPermissionDenied, "peer"));
  EXPECT_NE(refused.message().find("--hand-off-peers " + first), absl::string_view::npos) << refused;
  EXPECT_TRUE(
      NamesField(made_.sequence->BeginHandOff(first, kTokens).status(), absl::StatusCode::kPermissionDenied, "peer"));
  EXPECT_TRUE(NamesField(here_->Peers({first}).status(), absl::StatusCode::kPermissionDenied, "peers[0]"));
  EXPECT_OK(here_->Peers({}));
}

}  // namespace
}  // namespace kvmanager::testing
