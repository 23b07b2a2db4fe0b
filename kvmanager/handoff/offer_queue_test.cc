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
};

class OfferQueueTest : public ::testing::Test {
 protected:
  void Push(const std::string& payer, const std::string& name) {
    queue_.Push(std::make_shared<Offer>(Offer{payer, name}));
  }
  // Who is accepted, in their order; `full` are those for which there is no room.
  std::vector<std::string> Retry(const std::set<std::string>& full) {
    std::vector<std::string> accepted, payers;
    while (const std::shared_ptr<Offer> next = queue_.Next(payers)) {
      if (full.contains(next->name)) {
        payers.push_back(next->payer);
      } else {
        accepted.push_back(queue_.Take(next.get())->name);
      }
    }
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

TEST_F(OfferQueueTest, NonePassesAnotherOfItsPayer) {
  EXPECT_TRUE(queue_.CheckTurn("a").ok());
  Push("a", "a-large");
  EXPECT_TRUE(queue_.CheckTurn("b").ok());
  const absl::Status own = queue_.CheckTurn("a");
  EXPECT_TRUE(absl::IsResourceExhausted(own)) << own;
  EXPECT_EQ(DetailOf(own).field, "hand-offs that wait for room of this tenant");
  Push("a", "a-small");
  Push("b", "b-large");
  Push("c", "c");
  Push("b", "b-small");
  EXPECT_EQ(Retry({"a-large", "b-large"}), Strings{"c"});
  EXPECT_EQ(Names(), (Strings{"a-large", "a-small", "b-large", "b-small"}));
  EXPECT_EQ(Retry({"a-small"}), (Strings{"a-large", "b-large", "b-small"}));
  EXPECT_EQ(Retry({}), Strings{"a-small"});
  EXPECT_TRUE(queue_.empty());
}

TEST_F(OfferQueueTest, APayerHasHalfOfThePlaces) {
  for (size_t i = 0; i < limits::kTenantOffersWaitingMax; ++i) {
    ASSERT_TRUE(queue_.CheckPlace("a").ok());
    Push("a", std::to_string(i));
  }
  EXPECT_EQ(DetailOf(queue_.CheckPlace("a")).field, "hand-offs that wait for room of this tenant");
  for (size_t i = 0; queue_.size() < limits::kOffersWaitingMax; ++i) {
    ASSERT_TRUE(queue_.CheckPlace(std::to_string(i)).ok());
    Push(std::to_string(i), "");
  }
  const absl::Status full = queue_.CheckPlace("b");
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_EQ(DetailOf(full).field, "hand-offs that wait for room");
}

TEST_F(OfferQueueTest, OneIsTakenOnce) {
  Push("a", "a1");
  Push("b", "b1");
  const Offer* const second = queue_.all()[1].get();
  EXPECT_EQ(queue_.Take(second)->name, "b1");
  EXPECT_EQ(queue_.Take(second), nullptr);
  EXPECT_EQ(queue_.TakeAll().size(), 1u);
  EXPECT_TRUE(queue_.empty());
}

}  // namespace
}  // namespace kvmanager
