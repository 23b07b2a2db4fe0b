#include "kvmanager/rpc/message_room.h"

#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/event_loop.h"

namespace kvmanager {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class TestClock final : public Clock {
 public:
  int64_t NowNs() const override { return ms * 1000000; }
  int64_t ms = 1;
};

class MessageRoomTest : public ::testing::Test {
 protected:
  ~MessageRoomTest() noexcept override {}
  std::shared_ptr<MessageShare> Share() {
    const size_t at = cut_off_.size();
    cut_off_.push_back(0);
    return std::make_shared<MessageShare>(&room_, [this, at] { ++cut_off_[at]; });
  }
  /// What was reserved by one call of Reserve, once it is.
  struct Reserving {
    std::optional<MessageShare::Charge> charge;
    kj::Promise<void> waiting = nullptr;
  };
  std::unique_ptr<Reserving> Reserve(MessageShare& share, uint64_t bytes) {
    auto reserving = std::make_unique<Reserving>();
    reserving->waiting =
        share.Reserve(bytes)
            .then([to = reserving.get()](MessageShare::Charge charge) { to->charge = std::move(charge); })
            .eagerlyEvaluate(nullptr);
    loop_.RunReady();
    return reserving;
  }
  /// A message with one segment of memory that is lent, or not.
  class Reply {
   public:
    explicit Reply(const uint8_t* data = nullptr)
        : segment_(reinterpret_cast<const capnp::word*>(data), data == nullptr ? 0 : 1) {}
    kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments() const { return kj::arrayPtr(&segment_, 1); }

   private:
    kj::ArrayPtr<const capnp::word> segment_;
  };
  static Reply Send(MessageShare& share, MessageShare::Charge charge) {
    MessageShare::Lent lent;
    lent.push_back(ReplyBuffer(AlignedBuffer(64)));
    const Reply reply(lent.front().data());
    share.SendWith(std::move(charge), std::move(lent));
    return reply;
  }
  void GiveBack(Reserving& reserving) {
    reserving.charge.reset();
    loop_.RunReady();
  }

  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  TestClock clock_;
  MessageRoom room_{{.whole = 8 * kMiB, .share = 4 * kMiB}, &clock_};
  std::vector<int> cut_off_;
};

TEST_F(MessageRoomTest, AShareHasItsBoundOrASingleMessage) {
  const auto share = Share();
  const auto first = Reserve(*share, 3 * kMiB), second = Reserve(*share, 2 * kMiB), third = Reserve(*share, kMiB);
  EXPECT_TRUE(first->charge.has_value());
  EXPECT_FALSE(second->charge.has_value());
  EXPECT_FALSE(third->charge.has_value());  // it fits, but came later
  EXPECT_EQ(room_.waiting(), 2);
  GiveBack(*first);
  EXPECT_TRUE(second->charge.has_value());
  EXPECT_TRUE(third->charge.has_value());
  GiveBack(*second);
  GiveBack(*third);
  EXPECT_TRUE(Reserve(*share, 6 * kMiB)->charge.has_value());
  EXPECT_EQ(room_.used_bytes(), 0);
}

TEST_F(MessageRoomTest, AShareAtItsBoundKeepsNoOtherWaiting) {
  const auto greedy = Share(), other = Share();
  const auto first = Reserve(*greedy, 4 * kMiB), second = Reserve(*greedy, 4 * kMiB);
  EXPECT_FALSE(second->charge.has_value());
  EXPECT_TRUE(Reserve(*other, 4 * kMiB)->charge.has_value());
}

TEST_F(MessageRoomTest, TheFirstThatWaitsIsServedFirst) {
  const auto a = Share(), b = Share(), c = Share();
  const auto of_a = Reserve(*a, 4 * kMiB), of_b = Reserve(*b, 3 * kMiB);
  const auto large = Reserve(*c, 3 * kMiB);
  EXPECT_FALSE(large->charge.has_value());
  const auto small = Reserve(*b, kMiB);
  EXPECT_FALSE(small->charge.has_value()) << "a small one that fits has overtaken";
  EXPECT_FALSE(b->TryTake(kMiB));
  EXPECT_TRUE(c->TryTake(MessageRoom::kOwnBytes)) << "a share's own bytes are there whatever others use";
  c->GiveBack(MessageRoom::kOwnBytes);
  GiveBack(*of_a);
  EXPECT_TRUE(large->charge.has_value());
  EXPECT_TRUE(small->charge.has_value());
}

TEST_F(MessageRoomTest, WhoIsNotInterestedAnyMoreDoesNotWait) {
  const auto a = Share(), b = Share();
  const auto first = Reserve(*a, 4 * kMiB), second = Reserve(*b, 4 * kMiB);
  auto dropped = Reserve(*a, 2 * kMiB);
  EXPECT_EQ(room_.waiting(), 1);
  dropped.reset();
  EXPECT_EQ(room_.waiting(), 0);
  // One that is granted, and dropped before it is told.
  auto granted = a->Reserve(kMiB);
  first->charge->Shrink(0);
  { const auto gone = kj::mv(granted); }
  EXPECT_EQ(room_.used_bytes(), 4 * kMiB);
}

TEST_F(MessageRoomTest, AReplyIsBookedUntilItIsWritten) {
  const auto share = Share();
  auto reserving = Reserve(*share, 4 * kMiB);
  reserving->charge->Shrink(2 * kMiB);
  const Reply reply = Send(*share, *std::move(reserving->charge));
  EXPECT_EQ(room_.used_bytes(), 2 * kMiB);
  share->NoteUnsent(2 * kMiB + MessageRoom::kOwnBytes);
  EXPECT_FALSE(share->counts_unsent());
  EXPECT_EQ(room_.used_bytes(), 2 * kMiB);
  share->NoteUnsent(3 * kMiB);
  EXPECT_TRUE(share->counts_unsent());
  EXPECT_EQ(room_.used_bytes(), 3 * kMiB);
  const Reply other;  // which the network still counts
  share->NoteSent(other.segments(), 3 * kMiB);
  EXPECT_EQ(room_.used_bytes(), 3 * kMiB);
  share->NoteSent(other.segments(), 2 * kMiB);
  EXPECT_EQ(room_.used_bytes(), 2 * kMiB);
  EXPECT_TRUE(share->lends());
  share->NoteSent(reply.segments(), 0);
  EXPECT_FALSE(share->lends());
  EXPECT_EQ(room_.used_bytes(), 0);
}

TEST_F(MessageRoomTest, WhatARepliesCancelledCallHasLentGoes) {
  const auto share = Share();
  Send(*share, *std::move(Reserve(*share, 2 * kMiB)->charge));
  share->NoteUnsent(0);
  EXPECT_EQ(room_.used_bytes(), 2 * kMiB) << "the reply may not be in the network yet";
  share->DropUnsent();
  EXPECT_EQ(room_.used_bytes(), 0);
  EXPECT_FALSE(share->lends());
}

TEST_F(MessageRoomTest, WhatIsLentStaysUntilTheConnectionIsTakenApart) {
  auto share = Share();
  Send(*share, *std::move(Reserve(*share, 2 * kMiB)->charge));
  share->Detach();
  EXPECT_EQ(room_.used_bytes(), 2 * kMiB) << "the network still refers to it";
  share = nullptr;
  EXPECT_EQ(room_.used_bytes(), 0);
}

TEST_F(MessageRoomTest, CutsOffWhoTakesNoReplyWhileOthersWait) {
  auto stalled = Share();
  const auto alive = Share(), other = Share();
  Send(*stalled, *std::move(Reserve(*stalled, 4 * kMiB)->charge));
  clock_.ms += MessageRoom::kSlowMs - 1;
  const Reply taken = Send(*alive, *std::move(Reserve(*alive, 3 * kMiB)->charge));
  clock_.ms += 1;
  room_.Look(room_.keeps_waiting());
  EXPECT_EQ(cut_off_, (std::vector<int>{0, 0, 0})) << "nobody waits";
  const auto waits = Reserve(*other, 2 * kMiB);
  room_.Look(room_.keeps_waiting());
  EXPECT_EQ(cut_off_, (std::vector<int>{1, 0, 0}));
  room_.Look(room_.keeps_waiting());
  EXPECT_EQ(cut_off_, (std::vector<int>{1, 0, 0}));
  stalled->Detach();
  stalled = nullptr;
  loop_.RunReady();
  EXPECT_TRUE(waits->charge.has_value());
}

// Who takes no replies keeps the memory of requests, too, which wait for room for theirs.
TEST_F(MessageRoomTest, CutsOffWhoTakesNoReplyWhileOthersWaitForTheOtherRoom) {
  auto stalled = Share();
  Send(*stalled, *std::move(Reserve(*stalled, 4 * kMiB)->charge));
  clock_.ms += MessageRoom::kSlowMs;
  EXPECT_FALSE(room_.keeps_waiting());
  room_.Look(false);
  EXPECT_EQ(cut_off_, std::vector<int>{0});
  room_.Look(true);
  EXPECT_EQ(cut_off_, std::vector<int>{1});
  stalled->Detach();
}

TEST_F(MessageRoomTest, CutsOffWhoDoesNotEndARequestWhileOthersWait) {
  const auto silent = Share(), slow = Share(), done = Share(), other = Share();
  for (const auto& share : {silent, slow, done}) {
    EXPECT_TRUE(share->TryTake(2 * kMiB));
    share->NoteReceived(/*whole=*/false);
  }
  done->NoteReceived(/*whole=*/true);
  const auto waits = Reserve(*other, 3 * kMiB);
  for (int64_t ms = 1; ms < MessageRoom::kSlowMs; ++ms) {
    ++clock_.ms;
    if (ms % 1000 == 0) slow->NoteReceived(/*whole=*/false);
    room_.Look(room_.keeps_waiting());
    ASSERT_EQ(cut_off_, (std::vector<int>{ms >= MessageRoom::kStalledMs, 0, 0, 0})) << ms;
  }
  ++clock_.ms;
  room_.Look(room_.keeps_waiting());
  EXPECT_EQ(cut_off_, (std::vector<int>{1, 1, 0, 0}));
  for (const auto& share : {silent, slow, done}) share->GiveBack(2 * kMiB);
}

TEST_F(MessageRoomTest, CutsOffTheLargestPartThatNobodyBooked) {
  const auto a = Share(), b = Share();
  const auto reserved = Reserve(*a, 4 * kMiB);
  b->NoteUnsent(3 * kMiB);
  EXPECT_EQ(cut_off_, (std::vector<int>{0, 0}));
  a->NoteUnsent(2 * kMiB);  // 9 MiB
  EXPECT_EQ(cut_off_, (std::vector<int>{0, 1}));
  EXPECT_EQ(room_.used_bytes(), 6 * kMiB);
  b->NoteUnsent(6 * kMiB);  // it is about to go
  EXPECT_EQ(room_.used_bytes(), 6 * kMiB);
}

// Of random operations: books balance, bounds hold, and whoever waits is served in the end.
TEST_F(MessageRoomTest, RandomOperations) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto upto = [&](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n)(random); };
    std::vector<std::shared_ptr<MessageShare>> shares;
    for (int i = 0; i < 5; ++i) shares.push_back(Share());
    struct Live {
      size_t share;
      uint64_t bytes;
      std::unique_ptr<Reserving> reserving;
    };
    std::vector<Live> live;
    std::vector<std::pair<size_t, uint64_t>> taken;
    for (int step = 0; step < 2000; ++step) {
      const size_t at = upto(4);
      switch (upto(4)) {
        case 0: {
          const uint64_t bytes = 1 + upto(5 * kMiB);
          live.push_back({at, bytes, Reserve(*shares[at], bytes)});
          break;
        }
        case 1:
        case 2:
          if (live.empty()) break;
          std::swap(live[upto(live.size() - 1)], live.back());
          live.pop_back();
          loop_.RunReady();
          break;
        case 3: {
          const uint64_t bytes = 1 + upto(2 * MessageRoom::kOwnBytes);
          if (shares[at]->TryTake(bytes)) taken.emplace_back(at, bytes);
          break;
        }
        case 4:
          if (taken.empty()) break;
          std::swap(taken[upto(taken.size() - 1)], taken.back());
          shares[taken.back().first]->GiveBack(taken.back().second);
          taken.pop_back();
          loop_.RunReady();
      }
      uint64_t used = 0, largest = 0;
      std::map<size_t, uint64_t> of_share;
      size_t waiting = 0;
      for (const Live& each : live) {
        if (!each.reserving->charge.has_value()) {
          ++waiting;
          continue;
        }
        used += each.bytes;
        of_share[each.share] += each.bytes;
        largest = std::max(largest, each.bytes);
      }
      for (const auto& [share, bytes] : taken) {
        used += bytes;
        of_share[share] += bytes;
      }
      ASSERT_EQ(room_.used_bytes(), used);
      ASSERT_EQ(room_.waiting(), waiting);
      ASSERT_LE(used, std::max(room_.bounds().whole, largest) + 5 * MessageRoom::kOwnBytes);
      for (const auto& [share, bytes] : of_share) {
        ASSERT_EQ(shares[share]->used_bytes(), bytes);
        ASSERT_LE(bytes, std::max(room_.bounds().share, largest));
      }
    }
    for (const auto& [share, bytes] : taken) shares[share]->GiveBack(bytes);
    loop_.RunReady();
    while (!live.empty()) {
      const size_t before = live.size();
      std::erase_if(live, [](const Live& each) { return each.reserving->charge.has_value(); });
      ASSERT_LT(live.size(), before) << "those that wait are not served though nothing is used";
      loop_.RunReady();
    }
    ASSERT_EQ(room_.used_bytes(), 0);
  }
}

// Memory of large replies goes from one to the next.
TEST_F(MessageRoomTest, KeepsMemoryForFurtherReplies) {
  const auto share = Share();
  const auto make = [&](uint64_t bytes) {
    const auto reserving = Reserve(*share, ReplyMemory::BytesFor(bytes));
    KV_CHECK(reserving->charge.has_value());
    MessageShare::Lent lent;
    lent.push_back(*reserving->charge->Make("a reply", bytes));
    EXPECT_EQ(lent.front().size(), bytes);
    const Reply reply(lent.front().data());
    const uint8_t* const data = lent.front().data();
    share->SendWith(*std::move(reserving->charge), std::move(lent));
    return std::pair(data, reply);
  };
  const auto [first, sent] = make(2 * kMiB);
  EXPECT_EQ(room_.kept_bytes(), 0u);
  share->NoteSent(sent.segments(), 0);
  EXPECT_EQ(room_.used_bytes(), 0u);
  EXPECT_EQ(room_.kept_bytes(), 2 * kMiB);
  const auto [again, sent_again] = make(2 * kMiB - 5);
  EXPECT_EQ(again, first);
  EXPECT_EQ(room_.kept_bytes(), 0u);
  share->DropUnsent();
  EXPECT_EQ(room_.kept_bytes(), 2 * kMiB);
  // Small ones, and those of another size, are new.
  const auto [small, sent_small] = make(4096);
  share->NoteSent(sent_small.segments(), 0);
  EXPECT_EQ(room_.kept_bytes(), 2 * kMiB);
  // Together with what is used it stays within the bound.
  const auto other = Share();
  const auto most = Reserve(*other, 4 * kMiB), rest = Reserve(*share, 2 * kMiB + kMiB / 2);
  ASSERT_TRUE(rest->charge.has_value());
  const auto made = rest->charge->Make("a reply", 2 * kMiB + kMiB / 2);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(room_.kept_bytes(), 0u);
}

TEST_F(MessageRoomTest, GivesBackMemoryThatNobodyWants) {
  const auto share = Share();
  auto reserving = Reserve(*share, 3 * kMiB);
  reserving->charge->Keep(*reserving->charge->Make("a reply", 3 * kMiB));
  reserving->charge->Keep(ReplyBuffer(AlignedBuffer(6 * kMiB)));
  EXPECT_EQ(room_.kept_bytes(), 9 * kMiB);
  room_.Look(room_.keeps_waiting());
  EXPECT_EQ(room_.kept_bytes(), 9 * kMiB) << "some was wanted since the last look";
  room_.Look(room_.keeps_waiting());
  EXPECT_EQ(room_.kept_bytes(), 0u) << "the oldest goes first, in whole buffers";
  GiveBack(*reserving);
}

}  // namespace
}  // namespace kvmanager
