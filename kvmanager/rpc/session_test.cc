#include "kvmanager/rpc/session.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/rpc/limits.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;

constexpr uint64_t kArenaBytesOfAll = 2 * limits::kArenaBytesMax;

class SessionTest : public testing::PageStoreTest {
 protected:
  std::unique_ptr<Session> MakeSession(uid_t user = 1000) {
    parts_.store = &store();
    parts_.drain = &drain_;
    parts_.held = &held_;
    parts_.arenas = &arenas_;
    parts_.calls = &calls_;
    parts_.requests = parts_.replies = &messages_;
    parts_.uses = &uses_;
    return std::make_unique<Session>(parts_, Proof{.uid = user, .unix_socket = true}, /*pid=*/7,
                                     [this](EndReason reason, const std::string&) { cut_off_.push_back(reason); });
  }

  Metrics metrics_;
  RecentErrors errors_;
  const SteadyClock clock_;
  DrainSwitch drain_{&metrics_};
  HeldSequences held_{&metrics_};
  ArenaBytes arenas_{&metrics_, kArenaBytesOfAll};
  CallRecords calls_{&metrics_, &errors_, &clock_};
  SessionUses uses_;
  MessageRoom messages_{{.whole = 64 << 20, .share = 64 << 20}, &clock_};
  Session::Parts parts_;
  std::vector<EndReason> cut_off_;
};

TEST_F(SessionTest, HoldsSequencesUntilItReleasesThem) {
  const auto session = MakeSession();
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const SequenceId sequence = Filled(cache, MakeText(kPage), kPage);
  EXPECT_EQ(held_.HolderOf(sequence), nullptr);
  session->Hold(sequence, cache);
  EXPECT_TRUE(session->Holds(sequence, cache));
  EXPECT_FALSE(session->Holds(sequence, cache + 1));
  EXPECT_EQ(held_.HolderOf(sequence), session.get());
  EXPECT_EQ(held_.count(), 1u);
  session->Release(sequence);
  EXPECT_FALSE(session->Holds(sequence, cache));
  EXPECT_EQ(held_.HolderOf(sequence), nullptr);
  EXPECT_EQ(held_.count(), 0u);
  EXPECT_TRUE(store().report().SequenceIds().empty());
}

TEST_F(SessionTest, ASequenceThatIsReleasedSoonTakesNoRoom) {
  const auto session = MakeSession();
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  std::vector<SequenceId> all;
  for (size_t i = 0; i < limits::kSequencesMax; ++i) {
    ASSERT_TRUE(session->CheckRoomForSequence(Session::Begins::kBefore).ok());
    all.push_back(Create(cache));
    session->Hold(all.back(), cache);
  }
  EXPECT_EQ(DetailOf(session->CheckRoomForSequence(Session::Begins::kBefore)).field, "sequences of this connection");
  session->LetGo();
  EXPECT_TRUE(session->CheckRoomForSequence(Session::Begins::kBefore).ok());
  EXPECT_EQ(held_.count(), limits::kSequencesMax);
  session->Release(all.back());
  session->Hold(all.back() = Create(cache), cache);
  EXPECT_TRUE(absl::IsResourceExhausted(session->CheckRoomForSequence(Session::Begins::kBefore)));
  for (const SequenceId sequence : all) session->Release(sequence);
}

TEST_F(SessionTest, BindsACacheAnewOnceNobodyUsesIt) {
  const auto session = MakeSession();
  const auto make = [](CacheId id) {
    auto bound = std::make_shared<BoundCache>();
    bound->cache.id = id;
    return bound;
  };
  const auto first = session->Bind(make(1));
  EXPECT_EQ(session->Bind(make(1)), first);
  for (CacheId id = 2; id < 1000; ++id) session->Bind(make(id));  // are gone at once
  EXPECT_EQ(session->BoundOf(1), first);
  EXPECT_EQ(session->BoundOf(2), nullptr);
  const auto again = session->Bind(make(2));
  EXPECT_EQ(session->BoundOf(2), again);
}

TEST_F(SessionTest, AcceptsNoNewSequenceWhileTheDaemonDrains) {
  const auto session = MakeSession();
  EXPECT_TRUE(session->CheckRoomForSequence(Session::Begins::kNow).ok());
  drain_.Set(true);
  EXPECT_TRUE(absl::IsUnavailable(session->CheckRoomForSequence(Session::Begins::kNow)));
  EXPECT_TRUE(session->CheckRoomForSequence(Session::Begins::kBefore).ok());  // a claim takes over what is here
  drain_.Set(false);
  EXPECT_TRUE(session->CheckRoomForSequence(Session::Begins::kNow).ok());
}

TEST_F(SessionTest, ArenasHaveBoundsOfTheirOwnOfAConnectionAndOfTheDaemon) {
  const auto session = MakeSession(), other = MakeSession(), of_another_user = MakeSession(1001);
  for (const uint64_t bad :
       {uint64_t{0}, limits::kArenaBytesStep + 1, limits::kArenaBytesMax + limits::kArenaBytesStep}) {
    EXPECT_TRUE(absl::IsInvalidArgument(session->ReserveArena(bad))) << bad;
  }
  ASSERT_TRUE(session->ReserveArena(limits::kArenaBytesMax).ok());
  const absl::Status most = other->ReserveArena(limits::kArenaBytesMax);
  EXPECT_TRUE(absl::IsResourceExhausted(most));
  EXPECT_EQ(DetailOf(most).field, "arena bytes of this user");
  ASSERT_TRUE(of_another_user->ReserveArena(limits::kArenaBytesMax).ok());
  const absl::Status full = of_another_user->ReserveArena(limits::kArenaBytesStep);
  EXPECT_TRUE(absl::IsResourceExhausted(full));
  EXPECT_EQ(DetailOf(full).field, "arena bytes of all connections");
  EXPECT_EQ(arenas_.most_of_user(), limits::kArenaBytesMax);
  of_another_user->UnreserveArena(limits::kArenaBytesMax);
  session->UnreserveArena(limits::kArenaBytesMax);
  ASSERT_TRUE(other->ReserveArena(limits::kArenaBytesMax).ok());
  other->UnreserveArena(limits::kArenaBytesMax);
  for (size_t i = 0; i < limits::kArenasMax; ++i) ASSERT_TRUE(session->ReserveArena(limits::kArenaBytesStep).ok()) << i;
  EXPECT_EQ(DetailOf(session->ReserveArena(limits::kArenaBytesStep)).field, "arenas of this connection");
  ASSERT_TRUE(other->ReserveArena(limits::kArenaBytesStep).ok());
}

TEST_F(SessionTest, CapabilitiesOfCachesAreBounded) {
  const std::shared_ptr<Session> session = MakeSession();
  std::vector<std::shared_ptr<const void>> held;
  for (size_t i = 0; i < limits::kCachesHeldMax; ++i) held.push_back(ReserveCache(session).value());
  EXPECT_EQ(uses_.Most().caches, limits::kCachesHeldMax);
  const absl::Status refused = ReserveCache(session).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(DetailOf(refused).field, "caches that this connection holds");
  held.pop_back();
  EXPECT_TRUE(ReserveCache(session).ok());
  held.clear();
  EXPECT_EQ(uses_.Most().caches, 0u);
}

TEST_F(SessionTest, TheMostOfAnyConnectionIsKnown) {
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const auto session = MakeSession();
  {
    const auto other = MakeSession();
    for (uint32_t i = 0; i < 3; ++i) session->Hold(Filled(cache, MakeText(kPage, i), kPage), cache);
    const SequenceId sequence = Filled(cache, MakeText(kPage, 9), kPage);
    other->Hold(sequence, cache);
    ASSERT_TRUE(other->ReserveArena(2 * limits::kArenaBytesStep).ok());
    EXPECT_EQ(uses_.Most().sequences, 3u);
    EXPECT_EQ(uses_.Most().arenas, 1u);
    EXPECT_EQ(uses_.Most().arena_bytes, 2 * limits::kArenaBytesStep);
    other->Release(sequence);
    other->UnreserveArena(2 * limits::kArenaBytesStep);
    EXPECT_EQ(uses_.Most().arena_bytes, 0u);
  }
  for (const SequenceId sequence : store().report().SequenceIds()) {
    if (session->Holds(sequence, cache)) session->Release(sequence);
  }
  EXPECT_EQ(uses_.Most().sequences, 0u) << "the other is gone";
}

TEST_F(SessionTest, CutsOffWhileTheConnectionIsThere) {
  const auto session = MakeSession();
  session->CutOff(EndReason::kFraming);
  session->Detach();
  session->CutOff(EndReason::kUnread);
  EXPECT_EQ(cut_off_, std::vector<EndReason>{EndReason::kFraming});
}

TEST_F(SessionTest, CallsAndErrorsAreRecorded) {
  const auto session = MakeSession();
  session->calls().NoteCall(Method::kCrop);
  session->calls().NoteError(Method::kCrop, InvalidField("tokens", 5, "at most 4"));
  session->calls().NoteMalformed();
  const std::string text = metrics_.Text();
  EXPECT_NE(text.find("kvmanager_rpc_calls_total{method=\"crop\"} 1"), std::string::npos);
  EXPECT_NE(text.find("code=\"INVALID_ARGUMENT\",method=\"crop\"} 1"), std::string::npos);
  EXPECT_NE(text.find("code=\"FRAMING\",method=\"none\"} 1"), std::string::npos);
  const std::vector<RecentError> errors = errors_.List();
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_EQ(errors[0].method, "crop");
  EXPECT_EQ(errors[0].field, "tokens");
}

TEST_F(SessionTest, PagesUnderItsLeasesAreBounded) {
  const std::shared_ptr<Session> session = MakeSession(), other = MakeSession();
  auto most = ReserveMappedPages(session, limits::kMappedPagesHeldMax);
  ASSERT_TRUE(most.ok()) << most.status();
  EXPECT_EQ(uses_.Most().mapped_pages, limits::kMappedPagesHeldMax);
  EXPECT_EQ(DetailOf(ReserveMappedPages(session, 2).status()).bound,
            absl::StrCat("at most ", limits::kMappedPagesHeldMax));
  EXPECT_TRUE(ReserveMappedPages(session, 0).ok());
  EXPECT_TRUE(ReserveMappedPages(other, 2).ok());
  most->reset();
  EXPECT_EQ(uses_.Most().mapped_pages, 0u);
  EXPECT_TRUE(ReserveMappedPages(session, 2).ok());
}

}  // namespace
}  // namespace kvmanager
