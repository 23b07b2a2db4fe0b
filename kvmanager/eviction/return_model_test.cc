#include "kvmanager/eviction/return_model.h"

#include <algorithm>
#include <queue>
#include <random>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

constexpr int kReturning = 3, kOnce = 5;

// One use a tick: of kReturning, each is used again some 1,000 uses later, and of kOnce none.
void Teach(ReturnModel& model, uint64_t uses) {
  std::mt19937_64 random(7);
  std::queue<std::pair<uint64_t, uint32_t>> waiting;
  for (uint64_t now = 1; now <= uses; ++now) {
    if (!waiting.empty() && waiting.front().first <= now) {
      model.Return(waiting.front().second, now);
      waiting.pop();
    }
    if (random() % 2 == 0) {
      waiting.emplace(now + 1000, model.Use(kReturning, now));
    } else {
      model.Use(kOnce, now);
    }
    if (now % ReturnModel::kAdvanceEvery == 0) model.Advance(now);
    if (now % ReturnModel::kEvaluateEvery == 0) model.Evaluate();
  }
}

TEST(ReturnModelTest, AgesAreBucketsWithoutGaps) {
  EXPECT_EQ(ReturnModel::AgeOf(0), 0);
  for (int age = 1; age < ReturnModel::kAges; ++age) {
    EXPECT_EQ(ReturnModel::AgeOf(ReturnModel::LeastOf(age)), age);
    EXPECT_EQ(ReturnModel::AgeOf(ReturnModel::LeastOf(age) - 1), age - 1);
  }
  EXPECT_EQ(ReturnModel::AgeOf(UINT64_MAX), ReturnModel::kAges - 1);
}

TEST(ReturnModelTest, AtFirstTheOldestIsWorthLeast) {
  const ReturnModel model;
  for (int age = 1; age + 1 < ReturnModel::kAges; ++age) {
    EXPECT_LT(model.worth(kOnce, age), model.worth(kOnce, age - 1)) << age;
    EXPECT_EQ(model.worth(kOnce, age), model.worth(kReturning, age));
  }
}

// What nobody has waited for yet is no better than what was waited for in vain: the order stays LRU's.
TEST(ReturnModelTest, WhereNothingReturnsTheOldestIsWorthLeast) {
  for (const uint64_t uses : {3000, 30000, 300000}) {
    ReturnModel model;
    for (uint64_t now = 1; now <= uses; ++now) {
      model.Use(now % 50 == 0 ? kReturning : kOnce, now);
      if (now % ReturnModel::kAdvanceEvery == 0) model.Advance(now);
      if (now % ReturnModel::kEvaluateEvery == 0) model.Evaluate();
    }
    for (int age = 1; age + 1 < ReturnModel::kAges; ++age) {
      EXPECT_LE(model.worth(kOnce, age), model.worth(kOnce, age - 1)) << age << " of " << uses;
    }
  }
}

// A kind of many blocks has more that did not return, which says nothing while none has.
TEST(ReturnModelTest, WhereNothingReturnsAllKindsAreWorthTheSame) {
  ReturnModel model;
  for (uint64_t now = 1; now <= 60000; ++now) {
    model.Use(now % 50 == 0 ? kReturning : kOnce, now);
    if (now % ReturnModel::kAdvanceEvery == 0) model.Advance(now);
    if (now % ReturnModel::kEvaluateEvery == 0) model.Evaluate();
  }
  for (int age = 0; age + 1 < ReturnModel::kAges; ++age) {
    EXPECT_EQ(model.worth(kOnce, age), model.worth(kReturning, age)) << age;
  }
}

TEST(ReturnModelTest, LearnsWhoReturnsAndWhen) {
  ReturnModel model;
  Teach(model, 100000);
  const int soon = ReturnModel::AgeOf(900), late = ReturnModel::AgeOf(4000);
  EXPECT_GT(model.hazard(kReturning, ReturnModel::AgeOf(1000)), 0.5);
  EXPECT_LT(model.hazard(kOnce, ReturnModel::AgeOf(1000)), 0.1);
  // Just before they return they are worth more than when they were new, and more than when they did not come.
  EXPECT_GT(model.worth(kReturning, soon), 2 * model.worth(kReturning, 0));
  EXPECT_GT(model.worth(kReturning, soon), 5 * model.worth(kReturning, late));
  EXPECT_GT(model.worth(kReturning, 0), 5 * model.worth(kOnce, 0));
}

// The worth against its definition, spelled out over every horizon.
TEST(ReturnModelTest, TheWorthIsTheBestRateOverHorizons) {
  ReturnModel model;
  Teach(model, 30000);
  for (const int kind : {kReturning, kOnce, 0}) {
    for (int age = 0; age + 1 < ReturnModel::kAges; ++age) {
      double best = 0;
      for (int last = age; last + 1 < ReturnModel::kAges; ++last) {
        double returns = 0, time = 0;
        for (int at = age; at <= last; ++at) {
          double stays = 1;
          for (int before = age; before < at; ++before) stays *= 1 - model.hazard(kind, before);
          const double width = static_cast<double>(ReturnModel::LeastOf(at + 1) - ReturnModel::LeastOf(at));
          returns += stays * model.hazard(kind, at);
          time += stays * (1 - model.hazard(kind, at) / 2) * width;
        }
        best = std::max(best, returns / time);
      }
      EXPECT_NEAR(model.worth(kind, age), best, 1e-9 + best * 1e-9) << kind << " " << age;
    }
  }
}

TEST(ReturnModelTest, EntriesThatFellOutAreIgnored) {
  ReturnModel model;
  const uint32_t first = model.Use(kOnce, 1);
  uint64_t now = 1;
  for (uint32_t i = 0; i <= ReturnModel::kEntriesMax; ++i) model.Use(kOnce, now += ReturnModel::kAdvanceEvery);
  model.Return(first, now);
  model.Drop(first);
  model.Return(ReturnModel::kNoEntry, now);
  model.Advance(now);
  model.Evaluate();
  EXPECT_EQ(model.worth(kOnce, 0) > 0, true);
}

}  // namespace
}  // namespace kvmanager
