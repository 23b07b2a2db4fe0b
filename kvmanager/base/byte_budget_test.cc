#include "kvmanager/base/byte_budget.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

TEST(ByteBudgetTest, TakesUpToTheBoundAndGivesBack) {
  double shown = 0;
  ByteBudget budget("--bytes", 100, [&shown](double bytes) { shown += bytes; });
  auto most = budget.Take("a", "most", 70);
  ASSERT_TRUE(most.ok());
  EXPECT_EQ(shown, 70);
  const auto refused = budget.Take("b", "more", 31);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(DetailOf(refused.status()).field, "--bytes");
  EXPECT_EQ(DetailOf(refused.status()).value, "70 used, and 31 wanted for more");
  EXPECT_EQ(DetailOf(refused.status()).bound, "at most 100");
  EXPECT_FALSE(budget.Take("b", "an overflow", UINT64_MAX).ok());
  EXPECT_FALSE(budget.Take("a", "an overflow", UINT64_MAX).ok());
  {
    ByteBudget::Charge moved = *std::move(most);
    EXPECT_EQ(budget.used(), 70u);
    auto rest = budget.Take("b", "the rest", 30);
    EXPECT_TRUE(rest.ok());
    EXPECT_EQ(shown, 100);
  }
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(shown, 0);
}

TEST(ByteBudgetTest, OnePayerHasThreeQuarters) {
  ByteBudget budget("--bytes", 100, [](double) {});
  auto first = budget.Take("a", "first", 40);
  ASSERT_TRUE(first.ok());
  const auto refused = budget.Take("a", "second", 36);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(DetailOf(refused.status()).field, "--bytes of this tenant");
  EXPECT_EQ(DetailOf(refused.status()).value, "40 used, and 36 wanted for second");
  EXPECT_EQ(DetailOf(refused.status()).bound, "at most 75, three quarters of --bytes; so others find room");
  auto second = budget.Take("a", "second", 35);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(budget.most_of_payer(), 75u);
  {
    const auto other = budget.Take("b", "another", 25);
    EXPECT_TRUE(other.ok());
    EXPECT_EQ(budget.used(), 100u);
    EXPECT_EQ(budget.most_of_payer(), 75u);
  }
  EXPECT_EQ(budget.used(), 75u);
  // What is given back is the payer's again, whatever was moved into what.
  *first = *std::move(second);
  second = ByteBudget::Charge();
  EXPECT_EQ(budget.used(), 35u);
  EXPECT_TRUE(budget.Take("a", "third", 40).ok());
}

// However threads take and give back, no more than the bounds is taken at any time.
TEST(ByteBudgetTest, ThreadsTogetherStayWithinTheBounds) {
  constexpr uint64_t kMax = 12;
  std::atomic<int64_t> shown{0};
  std::atomic<bool> exceeded{false};
  ByteBudget budget("--bytes", kMax, [&](double bytes) { shown += static_cast<int64_t>(bytes); });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, payer = std::to_string(t % 2)] {
      for (int i = 0; i < 2000; ++i) {
        const auto charge = budget.Take(payer, "a thread", 1 + i % 6);
        if (budget.used() > kMax || budget.most_of_payer() > ByteBudget::OfPayerMax(kMax)) exceeded = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(exceeded);
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(budget.most_of_payer(), 0u);
  EXPECT_EQ(shown, 0);
}

}  // namespace
}  // namespace kvmanager
