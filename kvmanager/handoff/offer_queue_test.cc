#include "kvmanager/handoff/offer_queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

struct Offer {
  std::string payer;
  std::string name;
  absl::Status full;
};

class OfferQueueTest : public ::testing::Test {
 protected:
  // One that waits for what its payer has, or for what all have.
  void Push(const std::string& payer, const std::string& name, bool of_tenant) {
    queue_.Push(std::make_shared<Offer>(Offer{payer, name, Full(of_tenant)}));
  }
  static absl::Status Full(bool of_tenant) {
    return FieldError(absl::StatusCode::kResourceExhausted, absl::StrCat("pool", of_tenant ? kOfTenant : ""), "9",
                      "at most 8");
  }
  // Who is accepted, in their order; the payers that find their share full, and who finds the pool full.
  std::vector<std::string> Retry(const std::set<std::string>& full_payers, const std::set<std::string>& full_pool) {
    std::vector<std::string> accepted;
    queue_.Retry([&](const std::shared_ptr<Offer>& offer) {
      if (full_payers.contains(offer->payer)) return Full(true);
      if (full_pool.contains(offer->name)) return Full(false);
      accepted.push_back(offer->name);
      return absl::OkStatus();
    });
    return accepted;
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& each : queue_.all()) names.push_back(each->name);
    return names;
  }
  using Strings = std::vector<std::string>;

  OfferQueue<Offer> queue_;
};

TEST_F(OfferQueueTest, NobodyWaitsForAnothersShare) {
  EXPECT_TRUE(queue_.CheckTurn("a").ok());
  Push("a", "a1", true);
  EXPECT_TRUE(queue_.CheckTurn("b").ok());
  const absl::Status own = queue_.CheckTurn("a");
  EXPECT_TRUE(absl::IsResourceExhausted(own) && IsOfTenant(own)) << own;
  Push("a", "a2", true);
  Push("b", "b1", true);
  EXPECT_EQ(Retry({"a"}, {}), Strings{"b1"});
  EXPECT_EQ(Names(), (Strings{"a1", "a2"}));
  EXPECT_EQ(Retry({}, {}), (Strings{"a1", "a2"}));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(OfferQueueTest, NobodyPassesOneThatWaitsForThePool) {
  Push("a", "large", false);
  const absl::Status behind = queue_.CheckTurn("b");
  EXPECT_TRUE(absl::IsResourceExhausted(behind) && !IsOfTenant(behind)) << behind;
  Push("b", "small", false);
  EXPECT_EQ(Retry({}, {"large"}), Strings{});
  EXPECT_EQ(Names(), (Strings{"large", "small"}));
  // Its payer's share may be what it waits for the next time.
  EXPECT_EQ(Retry({"a"}, {}), Strings{"small"});
  EXPECT_TRUE(queue_.CheckTurn("b").ok());
  EXPECT_EQ(Retry({}, {}), Strings{"large"});
}

TEST_F(OfferQueueTest, APayerHasHalfOfThePlaces) {
  for (size_t i = 0; i < limits::kTenantOffersWaitingMax; ++i) {
    ASSERT_TRUE(queue_.CheckPlace("a").ok());
    Push("a", std::to_string(i), true);
  }
  EXPECT_TRUE(IsOfTenant(queue_.CheckPlace("a")));
  for (size_t i = 0; queue_.size() < limits::kOffersWaitingMax; ++i) {
    ASSERT_TRUE(queue_.CheckPlace(std::to_string(i)).ok());
    Push(std::to_string(i), "", true);
  }
  const absl::Status full = queue_.CheckPlace("b");
  EXPECT_TRUE(absl::IsResourceExhausted(full) && !IsOfTenant(full)) << full;
}

TEST_F(OfferQueueTest, OneIsTakenOnce) {
  Push("a", "a1", true);
  Push("b", "b1", true);
  const Offer* const second = queue_.all()[1].get();
  EXPECT_EQ(queue_.Take(second)->name, "b1");
  EXPECT_EQ(queue_.Take(second), nullptr);
  EXPECT_EQ(queue_.TakeAll().size(), 1u);
  EXPECT_TRUE(queue_.empty());
}

}  // namespace
}  // namespace kvmanager
