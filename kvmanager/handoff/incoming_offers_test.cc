// Offers of peers: which are refused, and which wait for room, until when.
#include <gtest/gtest.h>

#include "kvmanager/handoff/incoming_testing.h"
#include "kvmanager/handoff/limits.h"

namespace kvmanager {
namespace {

using testing::kTokens;
using testing::MakeConfig;
using testing::Peer;

using IncomingOffersTest = testing::IncomingHandOffsTest;

TEST_F(IncomingOffersTest, HostileOffersAreRefusedAndLeaveNothing) {
  const auto refused = [&](absl::FunctionRef<void(HandOffPart&)> change) {
    Peer& peer = Offer("fake", 1000, change);
    EXPECT_TRUE(peer.waited.empty());
    EXPECT_FALSE(peer.answer->ok());
    const absl::Status status = peer.answer->status();
    ExpectNothingLeft(peer);
    return status;
  };
  size_t bytes = 0;
  refused([&](HandOffPart& first) {
    bytes = first.manifest.size();
    first.manifest.clear();
  }).IgnoreError();
  for (size_t cut = 1; cut < bytes; cut += 37) {
    refused([&](HandOffPart& first) { first.manifest.resize(cut); }).IgnoreError();
  }
  refused([](HandOffPart& first) { first.manifest.assign(1000, '\xff'); }).IgnoreError();
  EXPECT_FALSE(DetailOf(refused([](HandOffPart& first) { first.page_bytes.push_back(64); })).field.empty());
  EXPECT_FALSE(DetailOf(refused([](HandOffPart& first) { first.page_bytes = {}; })).field.empty());
  EXPECT_EQ(hand_off_metrics_.refused.Value(), double(peers_.size()));
  EXPECT_EQ(incoming().tickets().size(), 0u);
}

TEST_F(IncomingOffersTest, OfAnotherTenantIsRefusedBeforeItTakesMemory) {
  peer_tenants_ = {"a", "b c"};
  const auto offer = [&](const std::string& tenant) -> Peer& {
    config_tenant_ = tenant;
    return Offer("fake", 1000);
  };
  for (const std::string tenant : {"", "A", "any", "b", "a "}) {
    Peer& peer = offer(tenant);
    ASSERT_FALSE(peer.answer->ok()) << tenant;
    const absl::Status status = peer.answer->status();
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    EXPECT_EQ(DetailOf(status).field, "tenant");
    EXPECT_EQ(DetailOf(status).value, tenant.empty() ? "none" : tenant);
    EXPECT_EQ(DetailOf(status).bound, "of the receiver's --peer-tenants");  // which says no other tenant's name
    EXPECT_TRUE(peer.waited.empty());
    ExpectNothingLeft(peer);
  }
  EXPECT_EQ(incoming().tickets().size(), 0u);
  for (const std::string tenant : {"a", "b c"}) EXPECT_TRUE(offer(tenant).answer->ok()) << tenant;
}

TEST_F(IncomingOffersTest, WaitsForRoomInTheOrderOfComing) {
  pool_bytes_ = 4 << 20;  // two slabs; a sequence of "fake" needs one of each size
  Fill();
  const uint64_t full = used_bytes();
  EXPECT_TRUE(absl::IsResourceExhausted(Offer("fake", 0).answer->status()));
  EXPECT_EQ(hand_off_metrics_.refused.Value(), 1);
  Peer& first = Offer("fake", 1000000);
  Peer& second = Offer("raw", 1000000);  // to which one slab would be enough
  for (Peer* const peer : {&first, &second}) {
    ASSERT_EQ(peer->waited.size(), 1u);
    EXPECT_TRUE(absl::IsResourceExhausted(peer->waited[0]));
    EXPECT_FALSE(peer->answer.has_value());
  }
  EXPECT_EQ(DetailOf(second.waited[0]).field, "hand-offs that wait for room of this tenant");
  EXPECT_EQ(hand_off_metrics_.waiting.Value(), 2);
  EXPECT_EQ(incoming().Load().waiting_offers, 2u);
  EXPECT_EQ(incoming().Load().capacity_bytes, pool_bytes_);
  EXPECT_EQ(used_bytes(), full);
  GiveBackOne();
  incoming().OfferGone();  // looks again, soon
  bool looked = false;
  const auto later = loop_.timer()
                         .afterDelay(4 * IncomingHandOffs::kRoomRetryMs * kj::MILLISECONDS)
                         .then([&] { looked = true; })
                         .eagerlyEvaluate(nullptr);
  loop_.Run([&] { return looked; });
  EXPECT_FALSE(first.answer.has_value() || second.answer.has_value());
  *first.gone = true;
  incoming().OfferGone();
  loop_.Run([&] { return second.answer.has_value(); });
  EXPECT_TRUE(absl::IsCancelled(first.answer->status()));
  EXPECT_TRUE(second.answer->ok()) << second.answer->status();
  // The timer looks by itself when room is given back.
  Peer& third = Offer("fake", 1000000);
  ASSERT_FALSE(third.answer.has_value());
  second.answer.reset();
  GiveBackOne();
  loop_.Run([&] { return third.answer.has_value(); });
  EXPECT_TRUE(third.answer->ok()) << third.answer->status();
}

TEST_F(IncomingOffersTest, WaitsNoLongerThanItMay) {
  pool_bytes_ = 4 << 20;
  Fill();
  Peer& late = Offer("fake", 1);
  ASSERT_EQ(late.waited.size(), 1u);
  loop_.Run([&] { return late.answer.has_value(); });
  EXPECT_TRUE(absl::IsResourceExhausted(late.answer->status()));
  // Nor than the daemon lives.
  Peer& last = Offer("fake", 1000000);
  ASSERT_FALSE(last.answer.has_value());
  incoming().DropAll();
  EXPECT_TRUE(absl::IsUnavailable(last.answer->status()));
  // One whose sender left before it was looked at takes nothing.
  const double refused = hand_off_metrics_.refused.Value();
  GiveBackOne();
  GiveBackOne();
  Peer& gone = Offer("fake", 0, [&](HandOffPart&) { *peers_.back()->gone = true; });
  EXPECT_TRUE(absl::IsCancelled(gone.answer->status()));
  EXPECT_EQ(hand_off_metrics_.refused.Value(), refused + 1);
  EXPECT_EQ(used_bytes(), 0u);
}

TEST_F(IncomingOffersTest, WhatNeverFitsDoesNotWait) {
  pool_bytes_ = 4 << 20;
  Fill();
  host_pool_bytes_ = 2 * kTokens / testing::kPage * 4160;  // padding of slots not counted, and no open page
  Peer& peer = Offer("fake", 1000000);
  EXPECT_TRUE(peer.waited.empty());
  EXPECT_TRUE(absl::IsResourceExhausted(peer.answer->status()));
}

TEST_F(IncomingOffersTest, NoMoreThanItsBoundsWait) {
  pool_bytes_ = 4 << 20;
  Fill();
  for (size_t i = 0; i < limits::kOffersWaitingMax; ++i) {
    config_tenant_ = i % 2 == 0 ? "a" : "b";
    ASSERT_FALSE(Offer("raw", 1000000).answer.has_value());
  }
  EXPECT_EQ(DetailOf(Offer("raw", 1000000).answer->status()).field, "hand-offs that wait for room of this tenant");
  config_tenant_ = "c";
  const absl::Status refused = Offer("raw", 1000000).answer->status();
  EXPECT_EQ(DetailOf(refused).field, "hand-offs that wait for room");
  EXPECT_EQ(DetailOf(refused).value, "128");
  EXPECT_EQ(DetailOf(refused).bound, "below 128");
  // What began to wait before the daemon drained is refused when its turn comes.
  drain_.Set(true);
  GiveBackOne();
  loop_.Run([&] { return peers_[limits::kOffersWaitingMax - 1]->answer.has_value(); });
  for (size_t i = 0; i < limits::kOffersWaitingMax; ++i) {
    ASSERT_TRUE(peers_[i]->answer.has_value());
    EXPECT_TRUE(absl::IsUnavailable(peers_[i]->answer->status()));
  }
  EXPECT_TRUE(absl::IsUnavailable(Offer("raw", 1000000).answer->status()));
  drain_.Set(false);
  const CacheId cache = test().Open(MakeConfig("raw", 1));
  Tickets& tickets = incoming().tickets();
  while (tickets.size() < limits::kTicketsMax) tickets.Make(cache, tickets.size() % 2 == 0 ? "a" : "b", 1);
  const ErrorDetail full = DetailOf(Offer("raw", 1000000).answer->status());
  EXPECT_EQ(full.field, "received sequences that wait to be claimed");
  EXPECT_EQ(full.bound, "below 4096");
}

TEST_F(IncomingOffersTest, PagesOfAGpuAreToComeByTheHost) {
  Peer& peer = Offer("fake", 1000000, [](HandOffPart& first) { first.gpu[0] = 1; });
  ASSERT_TRUE(peer.answer.has_value());
  EXPECT_TRUE(WantsHostPages(peer.answer->status())) << peer.answer->status();
  EXPECT_EQ(hand_off_metrics_.refused.Value(), 0);
  ExpectNothingLeft(peer);
}

}  // namespace
}  // namespace kvmanager
