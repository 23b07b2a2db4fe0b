#include "kvmanager/base/byte_budget.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

TEST(ByteBudgetTest, TakesUpToTheBoundAndGivesBack) {
  double shown = 0;
  ByteBudget budget("--bytes", 100, [&shown](double bytes) { shown += bytes; });
  auto most = budget.Take("most", 90);
  ASSERT_TRUE(most.ok());
  EXPECT_EQ(shown, 90);
  const auto refused = budget.Take("more", 11);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(DetailOf(refused.status()).field, "--bytes");
  EXPECT_EQ(DetailOf(refused.status()).value, "90 used, and 11 wanted for more");
  EXPECT_EQ(DetailOf(refused.status()).bound, "at most 100");
  EXPECT_FALSE(budget.Take("an overflow", UINT64_MAX).ok());
  {
    ByteBudget::Charge moved = *std::move(most);
    EXPECT_EQ(budget.used(), 90u);
  }
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(shown, 0);
  EXPECT_TRUE(budget.Take("all", 100).ok());
}

// However threads take and give back, no more than the bound is taken at any time.
TEST(ByteBudgetTest, ThreadsTogetherStayWithinTheBound) {
  constexpr uint64_t kMax = 10;
  std::atomic<int64_t> shown{0};
  std::atomic<bool> exceeded{false};
  ByteBudget budget("--bytes", kMax, [&](double bytes) { shown += static_cast<int64_t>(bytes); });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const auto charge = budget.Take("a thread", 1 + i % 6);
        if (budget.used() > kMax) exceeded = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(exceeded);
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(shown, 0);
}

}  // namespace
}  // namespace kvmanager
