// Sequences that arrive: when they are seen, when they are whole, and how they end early.
#include "kvmanager/handoff/incoming_hand_offs.h"

#include <gtest/gtest.h>

#include <functional>

#include "absl/strings/str_cat.h"
#include "kvmanager/handoff/incoming_testing.h"

namespace kvmanager {
namespace {

using testing::kTokens;
using testing::Peer;

using IncomingHandOffsTest = testing::IncomingHandOffsTest;

TEST_F(IncomingHandOffsTest, ReceivesWhatAPeerSends) {
  for (const char* const codec : {"fake", "declining", "raw"}) {
    SCOPED_TRACE(codec);
    Peer& peer = Accepted(codec);
    EXPECT_EQ((*peer.answer)->device, -1);
    EXPECT_EQ(peer.ticket().size(), Tickets::kTicketBytes);
    EXPECT_TRUE(absl::IsFailedPrecondition(Find(peer).status()));  // before it is shown
    Arrive(peer, 0, in_first(peer));
    Extend(peer, peer.Last());
    ASSERT_EQ(*peer.extended, absl::OkStatus());
    Arrive(peer, in_first(peer), peer.pages.size());
    Complete(peer);
    EXPECT_FALSE(peer.completed.has_value());  // workers and the loop have not looked yet
    loop_.Run([&] { return peer.completed.has_value(); });
    ASSERT_EQ(*peer.completed, absl::OkStatus());
    const auto claimed = incoming().tickets().Claim(peer.ticket(), cache(peer));
    ASSERT_TRUE(claimed.ok()) << claimed.status();
    EXPECT_EQ(claimed->tokens, uint64_t{kTokens});
    EXPECT_EQ(claimed->blob, "blob");
    EXPECT_FALSE(incoming().arriving(claimed->sequence));
    // Byte for byte what the peer has.
    const auto copy = store().exports().Whole(claimed->sequence);
    ASSERT_TRUE(copy.ok()) << copy.status();
    test().executor.FinishAll();
    const std::vector<testing::SentPage> here = testing::TakeAll(**copy);
    ASSERT_EQ(here.size(), peer.pages.size());
    for (size_t i = 0; i < here.size(); ++i) EXPECT_TRUE(here[i].bytes.bytes == peer.pages[i].bytes.bytes) << i;
    store().Drop(claimed->sequence);
  }
  EXPECT_EQ(hand_off_metrics_.received.Value(), 3);
  EXPECT_EQ(hand_off_metrics_.refused.Value() + hand_off_metrics_.aborted.Value(), 0);
}

TEST_F(IncomingHandOffsTest, IsShownBeforeItsEncodedPagesAreHere) {
  Peer& peer = Accepted("fake");
  bool shown = false, settled = false;
  const auto showing = incoming()
                           .tickets()
                           .WhenShown(peer.ticket(), cache(peer))
                           .then([&](absl::Status status) { shown = status.ok(); })
                           .eagerlyEvaluate(nullptr);
  Extend(peer, peer.Last());
  EndWork();
  EXPECT_FALSE(shown);
  Arrive(peer, in_first(peer), peer.pages.size());
  EndWork();
  EXPECT_TRUE(shown);
  const absl::StatusOr<SequenceId> sequence = Find(peer);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_TRUE(incoming().arriving(*sequence));
  { const auto dropped = incoming().WhenSettled(*sequence); }
  const auto settling = incoming().WhenSettled(*sequence).then([&] { settled = true; }).eagerlyEvaluate(nullptr);
  Complete(peer);
  Arrive(peer, 0, in_first(peer) - 1);
  EndWork();
  EXPECT_FALSE(settled || peer.completed.has_value());
  Arrive(peer, in_first(peer) - 1, in_first(peer));
  EndWork();
  EXPECT_TRUE(settled && peer.completed == absl::OkStatus());
  EXPECT_FALSE(incoming().arriving(*sequence));
  settled = false;
  const auto again = incoming().WhenSettled(*sequence).then([&] { settled = true; }).eagerlyEvaluate(nullptr);
  loop_.RunReady();
  EXPECT_TRUE(settled);
}

TEST_F(IncomingHandOffsTest, WhatASpoiltHandOffBroughtIsGivenBack) {
  using Spoil = std::function<void(Peer&)>;
  const std::vector<Spoil> ways = {[&](Peer& peer) {
                                     HandOffPart last = peer.Last();
                                     last.manifest.resize(last.manifest.size() / 2);
                                     Extend(peer, std::move(last));
                                     EXPECT_FALSE(peer.extended->ok());
                                   },
                                   [&](Peer& peer) {  // withdraws what it does not know
                                     HandOffPart last = peer.Last();
                                     last.withdrawn = {1000};
                                     Extend(peer, std::move(last));
                                     EXPECT_FALSE(peer.extended->ok());
                                   },
                                   [&](Peer& peer) {  // an encoded page that its codec cannot read
                                     Extend(peer, peer.Last());
                                     Arrive(peer, 0, in_first(peer), 2);
                                   },
                                   [&](Peer& peer) {  // a raw page with NaN, after the sequence could be seen
                                     Extend(peer, peer.Last());
                                     Arrive(peer, in_first(peer), peer.pages.size(), in_first(peer));
                                   },
                                   [&](Peer& peer) {  // a page twice
                                     Arrive(peer, 0, 2);
                                     EndWork();
                                     Arrive(peer, 1, 2);
                                   }};
  for (size_t i = 0; i < ways.size(); ++i) {
    SCOPED_TRACE(i);
    Peer& peer = Accepted("fake");
    const std::string ticket = peer.ticket();
    ways[i](peer);
    EndWork();
    Complete(peer);
    EndWork();
    ASSERT_TRUE(peer.completed.has_value());
    EXPECT_FALSE(peer.completed->ok());
    // The ticket says so. What comes late is left alone, and so is an end that comes twice.
    EXPECT_TRUE(absl::IsUnavailable(Find(peer).status())) << Find(peer).status();
    peer.hand_off().Arrived(std::vector<uint32_t>{0});
    peer.hand_off().Abort(absl::CancelledError("late"));
    EndWork();
    EXPECT_EQ(hand_off_metrics_.refused.Value(), double(i + 1));
    ExpectNothingLeft(peer);
  }
  EXPECT_EQ(hand_off_metrics_.aborted.Value(), 0);
}

TEST_F(IncomingHandOffsTest, EndsEarlyAtEveryPoint) {
  for (int point = 0; point < 6; ++point) {
    for (const bool aborts : {true, false}) {
      SCOPED_TRACE(absl::StrCat(point, aborts ? " aborts" : " is let go"));
      const double aborted = hand_off_metrics_.aborted.Value();
      Peer& peer = Accepted("fake");
      const std::string ticket = peer.ticket();
      const CacheId of = cache(peer);
      if (point >= 1) Arrive(peer, 0, 3);
      if (point >= 2) Extend(peer, peer.Last());
      if (point >= 3) Arrive(peer, in_first(peer), peer.pages.size());
      if (point >= 4) EndWork();  // else workers are still at it
      bool settled = false;
      kj::Promise<void> settling = nullptr;
      if (point >= 4) {
        ASSERT_TRUE(Find(peer).ok());
        settling = incoming().WhenSettled(*Find(peer)).then([&] { settled = true; }).eagerlyEvaluate(nullptr);
      }
      if (point == 5) Complete(peer);
      if (aborts) {
        peer.hand_off().Abort(absl::CancelledError("made up"));
        EndWork();
        EXPECT_EQ(hand_off_metrics_.aborted.Value(), aborted + 1);
        EXPECT_EQ(settled, point >= 4);
        EXPECT_EQ(peer.completed.has_value(), point == 5);
        EXPECT_EQ(peer.completed.value_or(absl::CancelledError("made up")), absl::CancelledError("made up"));
        const absl::Status why = incoming().tickets().Find(ticket, of).status();
        EXPECT_TRUE(absl::IsUnavailable(why)) << why;
        EXPECT_NE(why.message().find("made up"), absl::string_view::npos) << why;
        ExpectNothingLeft(peer);
      } else {
        peer.answer.reset();  // as when the transport ends
        EndWork();
        incoming().DropAll();
        ExpectNothingLeft(peer);
      }
    }
  }
}

TEST_F(IncomingHandOffsTest, WhoClaimedItIsToldWhyItEndedEarly) {
  Peer& peer = Accepted("fake");
  Extend(peer, peer.Last());
  Arrive(peer, in_first(peer), peer.pages.size());
  EndWork();
  const auto claimed = incoming().tickets().Claim(peer.ticket(), cache(peer));
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  const auto waiting = Attend(cache(peer), claimed->sequence, kTokens - 1, 1);
  EXPECT_FALSE(waiting->ready());
  peer.hand_off().Abort(absl::CancelledError("made up"));
  EndWork();
  ASSERT_TRUE(waiting->ready());
  EXPECT_TRUE(absl::IsUnavailable(waiting->status()));
  EXPECT_NE(waiting->status().message().find("made up"), absl::string_view::npos) << waiting->status();
  EXPECT_FALSE(incoming().arriving(claimed->sequence));
  store().Drop(claimed->sequence);
}

}  // namespace
}  // namespace kvmanager
