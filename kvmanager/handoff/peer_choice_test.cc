#include "kvmanager/handoff/peer_choice.h"

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {
namespace {

PeerCandidate Peer(uint64_t free_bytes, uint64_t queued_bytes, double bytes_per_s) {
  ReceiverLoad load;
  load.free_bytes = free_bytes;
  load.queued_bytes = queued_bytes;
  return {"h:1", load, bytes_per_s};
}

using Order = std::vector<size_t>;

TEST(RankPeers, WhoWouldBeDoneFirst) {
  EXPECT_EQ(RankPeers({}, 10), Order());
  EXPECT_EQ(RankPeers({Peer(100, 50, 0), Peer(100, 0, 0), Peer(100, 20, 0)}, 10), Order({1, 2, 0}));
  // 60 bytes at 10/s against 110 at 100/s.
  EXPECT_EQ(RankPeers({Peer(100, 50, 10), Peer(100, 100, 100)}, 10), Order({1, 0}));
  // What is sent counts too: 50 and 10 at 10/s, 1000 and 10 at 100/s; then 50 and 200, 1000 and 200.
  EXPECT_EQ(RankPeers({Peer(1000, 50, 10), Peer(1000, 1000, 100)}, 10), Order({0, 1}));
  EXPECT_EQ(RankPeers({Peer(1000, 50, 10), Peer(1000, 1000, 100)}, 200), Order({1, 0}));
}

TEST(RankPeers, TiesKeepTheirOrder) {
  EXPECT_EQ(RankPeers({Peer(100, 5, 3), Peer(100, 5, 3), Peer(100, 5, 3)}, 10), Order({0, 1, 2}));
}

TEST(RankPeers, WhoHasNoRoomComesLast) {
  EXPECT_EQ(RankPeers({Peer(9, 0, 100), Peer(10, 1000, 1), Peer(0, 0, 200)}, 10), Order({1, 2, 0}));
}

TEST(RankPeers, WhoDidNotAnswerIsLeftOut) {
  PeerCandidate silent = Peer(100, 0, 100);
  silent.load = absl::DeadlineExceededError("silent");
  EXPECT_EQ(RankPeers({silent, Peer(100, 50, 10), silent}, 10), Order({1}));
}

TEST(RankPeers, OneToWhichNothingWasSentYetIsTriedAsTheFastest) {
  EXPECT_EQ(RankPeers({Peer(100, 1, 100), Peer(100, 0, 0), Peer(100, 0, 50)}, 10), Order({1, 0, 2}));
}

TEST(ParsePeers, OneOrSeveral) {
  const auto peers = ParsePeers("a:1,[::1]:2");
  ASSERT_TRUE(peers.ok()) << peers.status();
  EXPECT_EQ(*peers, std::vector<std::string>({"a:1", "[::1]:2"}));
  EXPECT_EQ(ParsePeers("nowhere")->size(), 1u);
  std::string many = "a:1";
  for (size_t i = 1; i < limits::kPeersChoiceMax; ++i) many += absl::StrCat(",a:", i + 1);
  EXPECT_EQ(ParsePeers(many)->size(), limits::kPeersChoiceMax);
  EXPECT_EQ(*ParsePeers("a:1,b:2,a:1,b:2,c:3"), std::vector<std::string>({"a:1", "b:2", "c:3"}));  // none twice
  for (const std::string& bad :
       {std::string(), std::string("a:1,"), std::string(",a:1"), std::string("a:1,nowhere"), many + ",a:1",
        std::string(limits::kPeerTextBytesMax + 1, 'a'), "a:1," + std::string(limits::kPeerTextBytesMax, 'a') + ":1"}) {
    const auto refused = ParsePeers(bad);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << bad;
    EXPECT_EQ(DetailOf(refused.status()).field, "peer") << bad;
  }
}

TEST(CheckPeersAllowed, NamesWhoMay) {
  EXPECT_TRUE(CheckPeersAllowed("peer", {"a:1", "anything"}, {"any"}).ok());
  EXPECT_TRUE(CheckPeersAllowed("peers", {}, {}).ok());
  const absl::Status none = CheckPeersAllowed("peer", {"a:1"}, {});
  EXPECT_TRUE(absl::IsPermissionDenied(none)) << none;
  EXPECT_EQ(DetailOf(none).field, "peer");
  EXPECT_EQ(DetailOf(none).value, "a:1");
  EXPECT_EQ(DetailOf(none).bound,
            "of --hand-off-peers, which is not set: start this daemon with --hand-off-peers a:1, or with "
            "--hand-off-peers any");
  EXPECT_TRUE(CheckPeersAllowed("peer", {"b:1", "a:1"}, {"a:1", "b:1", "c:1"}).ok());
  for (const std::string bad : {"a:10", "a:1 ", "A:1", "", "a:1,b:1"}) {
    const absl::Status refused = CheckPeersAllowed("peers[3]", {"b:1", bad}, {"a:1", "b:1"});
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << bad;
    EXPECT_EQ(DetailOf(refused).field, "peers[3]");
    EXPECT_EQ(DetailOf(refused).value, bad);
    EXPECT_EQ(DetailOf(refused).bound, "of --hand-off-peers, a:1, b:1");
  }
  const std::vector<std::string> many(1024, "a:1");  // as many as --hand-off-peers takes
  EXPECT_LT(CheckPeersAllowed("peer", {"b:1"}, many).message().size(), 200u);
}

}  // namespace
}  // namespace kvmanager
