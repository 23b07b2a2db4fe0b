#include "kvmanager/handoff/tickets.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/handoff/limits.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;

constexpr int64_t kLongMs = 3600000;

class TicketsTest : public testing::PageStoreTest {
 public:
  ~TicketsTest() noexcept override {}

 protected:
  Tickets& Make(int64_t lease_ms) {
    tickets_.emplace(&store(), &metrics_, lease_ms);
    tickets_->SetLoop(&loop_);
    return *tickets_;
  }
  void TearDown() override {
    if (tickets_.has_value()) tickets_->DropAll();
    PageStoreTest::TearDown();
  }
  // What a claim that waits gets once `then` was called.
  absl::Status Await(const std::string& name, CacheId cache, absl::FunctionRef<void()> then) {
    std::optional<absl::Status> got;
    auto waiting = tickets_->WhenShown(name, cache)
                       .then([&](absl::Status status) { got = std::move(status); })
                       .eagerlyEvaluate(nullptr);
    loop_.RunReady();
    EXPECT_FALSE(got.has_value());
    then();
    loop_.Run([&] { return got.has_value(); });
    return *got;
  }
  uint64_t sequences() { return store().report().SequenceIds().size(); }

  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  Metrics registry_;
  HandOffMetrics metrics_{&registry_};
  std::optional<Tickets> tickets_;
};

TEST_F(TicketsTest, BlobsThatWaitAreBoundedTogether) {
  Tickets& tickets = Make(kLongMs);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  std::vector<std::string> names;
  const std::string blob(limits::kBlobBytesMax, 'b');
  // One payer's are half of all, and another's find room.
  for (const char* const payer : {"a", "b"}) {
    for (uint64_t bytes = 0; bytes < limits::kTenantBlobBytesMax; bytes += blob.size()) {
      names.push_back(tickets.Make(cache, payer, kPage));
      ASSERT_TRUE(tickets.SetBlob(names.back(), blob).ok());
    }
    const absl::Status refused = tickets.SetBlob(tickets.Make(cache, payer, kPage), "b");
    EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
    EXPECT_EQ(DetailOf(refused).field, "blob");
  }
  EXPECT_EQ(tickets.blob_bytes().all(), limits::kBlobBytesWaitingMax);
  EXPECT_EQ(tickets.blob_bytes().most(), limits::kTenantBlobBytesMax);
  const std::string one_more = tickets.Make(cache, "c", kPage);
  EXPECT_TRUE(absl::IsResourceExhausted(tickets.SetBlob(one_more, "b")));
  EXPECT_TRUE(tickets.SetBlob(names[0], blob).ok());  // in place of its own
  // One that is claimed, and one whose hand-off ends early, make room.
  tickets.Show(names[0], Filled(cache, MakeText(kPage), kPage));
  const auto claimed = tickets.Claim(names[0], cache);
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  EXPECT_EQ(claimed->blob, blob);
  EXPECT_TRUE(tickets.SetBlob(one_more, blob).ok());
  EXPECT_FALSE(tickets.SetBlob(tickets.Make(cache, "c", kPage), "b").ok());
  tickets.Fail(names[1], absl::UnavailableError("cut off"));
  EXPECT_TRUE(tickets.SetBlob(tickets.Make(cache, "c", kPage), blob).ok());
  store().Drop(claimed->sequence);
}

TEST_F(TicketsTest, APayerHasHalfOfThePlaces) {
  Tickets& tickets = Make(kLongMs);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  std::string last;
  for (const char* const payer : {"a", "b"}) {
    for (size_t i = 0; i < limits::kTenantTicketsMax; ++i) {
      ASSERT_TRUE(tickets.CheckRoom(payer).ok()) << i;
      last = tickets.Make(cache, payer, kPage);
    }
    EXPECT_EQ(DetailOf(tickets.CheckRoom(payer)).field, "received sequences that wait to be claimed of this tenant");
  }
  EXPECT_EQ(tickets.of_payers().most(), limits::kTenantTicketsMax);
  const absl::Status full = tickets.CheckRoom("c");
  EXPECT_EQ(DetailOf(full).field, "received sequences that wait to be claimed") << full;
  tickets.Fail(last, absl::UnavailableError("cut off"));
  EXPECT_TRUE(tickets.CheckRoom("b").ok());
  EXPECT_TRUE(tickets.CheckRoom("c").ok());
  tickets.DropAll();
  EXPECT_EQ(tickets.of_payers().all(), 0u);
}

TEST_F(TicketsTest, AClaimWaitsUntilTheSequenceIsShownAndTakesItOnce) {
  Tickets& tickets = Make(kLongMs);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const SequenceId sequence = Filled(cache, MakeText(kPage), kPage);
  const std::string name = tickets.Make(cache, "", kPage);
  EXPECT_EQ(name.size(), Tickets::kTicketBytes);
  EXPECT_EQ(metrics_.tickets.Value(), 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(tickets.Find(name, cache).status()));  // it still arrives
  EXPECT_TRUE(tickets.SetBlob(name, "blob").ok());
  EXPECT_TRUE(Await(name, cache, [&] { tickets.Show(name, sequence); }).ok());
  EXPECT_EQ(tickets.Find(name, cache).value(), sequence);
  const auto claimed = tickets.Claim(name, cache);
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  EXPECT_EQ(claimed->sequence, sequence);
  EXPECT_EQ(claimed->tokens, uint64_t{kPage});
  EXPECT_EQ(claimed->blob, "blob");
  EXPECT_TRUE(absl::IsNotFound(tickets.Claim(name, cache).status()));
  EXPECT_EQ(tickets.size(), 0u);
  EXPECT_EQ(metrics_.claimed.Value(), 1);
  store().Drop(sequence);
}

TEST_F(TicketsTest, WhatNobodyClaimsIsGivenBackWhenItsLeaseEnds) {
  Tickets& tickets = Make(1);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const std::string name = tickets.Make(cache, "", kPage);
  tickets.Show(name, Filled(cache, MakeText(kPage), kPage));
  EXPECT_EQ(sequences(), 1u);
  loop_.Run([&] { return tickets.size() == 0; });
  EXPECT_EQ(sequences(), 0u);
  EXPECT_EQ(metrics_.expired.Value(), 1);
  EXPECT_TRUE(absl::IsNotFound(tickets.Find(name, cache).status()));
}

TEST_F(TicketsTest, AFailedHandOffTellsWhoeverWaitsAndWhoeverComesLater) {
  Tickets& tickets = Make(kLongMs);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const std::string waited_for = tickets.Make(cache, "", kPage), shown = tickets.Make(cache, "", kPage);
  const absl::Status told =
      Await(waited_for, cache, [&] { tickets.Fail(waited_for, absl::AbortedError("the link broke")); });
  EXPECT_TRUE(absl::IsUnavailable(told));
  EXPECT_NE(told.message().find("the link broke"), std::string::npos);
  EXPECT_EQ(tickets.Find(waited_for, cache).status(), told);
  tickets.Show(shown, Filled(cache, MakeText(kPage), kPage));
  tickets.Fail(shown, absl::AbortedError("the link broke"));
  EXPECT_EQ(sequences(), 0u);
  EXPECT_EQ(tickets.size(), 0u);
}

TEST_F(TicketsTest, ASequenceWhoseTicketIsGoneIsGivenBack) {
  Tickets& tickets = Make(kLongMs);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const std::string name = tickets.Make(cache, "", kPage);
  tickets.Fail(name, absl::AbortedError("the link broke"));
  tickets.Show(name, Filled(cache, MakeText(kPage), kPage));
  EXPECT_EQ(sequences(), 0u);
}

TEST_F(TicketsTest, ATicketIsOfOneCacheAndOneClaimAtATime) {
  Tickets& tickets = Make(kLongMs);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  CacheConfig other_config = MakeConfig("raw", 0);
  other_config.tenant = "another";
  const CacheId other = test().Open(other_config);
  const std::string name = tickets.Make(cache, "", kPage);
  tickets.Show(name, Filled(cache, MakeText(kPage), kPage));
  EXPECT_TRUE(absl::IsFailedPrecondition(tickets.Claim(name, other).status()));
  EXPECT_TRUE(tickets.BeginClaim(name).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(tickets.BeginClaim(name)));
  tickets.EndClaim(name);
  EXPECT_TRUE(tickets.BeginClaim(name).ok());
  EXPECT_TRUE(absl::IsNotFound(tickets.Find("unknown", cache).status()));
}

TEST_F(TicketsTest, APayersFailuresLeaveAnothersTheirReasons) {
  Tickets& tickets = Make(kLongMs);
  const CacheId cache = test().Open(MakeConfig("raw", 0));
  const auto fail = [&](const char* payer) {
    const std::string name = tickets.Make(cache, payer, kPage);
    tickets.Fail(name, absl::UnavailableError("cut off"));
    return tickets.Find(name, cache).status();
  };
  for (size_t i = 0; i < Tickets::kFailedMax / 2; ++i) ASSERT_TRUE(absl::IsUnavailable(fail("a")));
  EXPECT_TRUE(absl::IsNotFound(fail("a")));
  EXPECT_TRUE(absl::IsUnavailable(fail("b")));
}

}  // namespace
}  // namespace kvmanager
