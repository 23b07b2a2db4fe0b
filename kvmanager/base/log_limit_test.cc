#include "kvmanager/base/log_limit.h"

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

TEST(LogLimitTest, SomeLinesInAMinuteAndThenHowManyMore) {
  LogLimit limit;
  for (int64_t begun : {int64_t{0}, 3 * LogLimit::kNs, 4 * LogLimit::kNs}) {
    int written = 0;
    for (int i = 0; i < 47; ++i) written += limit.Take(begun + i) ? 1 : 0;
    EXPECT_EQ(written, LogLimit::kLinesMax);
    EXPECT_EQ(limit.TakeLeftOut(begun + LogLimit::kNs - 1), 0u);
    EXPECT_EQ(limit.TakeLeftOut(begun + LogLimit::kNs), 47u - LogLimit::kLinesMax);
    EXPECT_EQ(limit.TakeLeftOut(begun + LogLimit::kNs), 0u);
  }
}

TEST(LogLimitTest, FewLinesLeaveNothingOut) {
  LogLimit limit;
  for (int i = 0; i < LogLimit::kLinesMax; ++i) EXPECT_TRUE(limit.Take(i));
  EXPECT_EQ(limit.TakeLeftOut(2 * LogLimit::kNs), 0u);
}

// The next minute begins before anybody has asked.
TEST(LogLimitTest, WhatWasLeftOutIsKeptUntilItIsSaid) {
  LogLimit limit;
  for (int i = 0; i < LogLimit::kLinesMax + 3; ++i) (void)limit.Take(0);
  EXPECT_TRUE(limit.Take(LogLimit::kNs));
  EXPECT_EQ(limit.TakeLeftOut(LogLimit::kNs), 0u);
  EXPECT_EQ(limit.TakeLeftOut(2 * LogLimit::kNs), 3u);
}

}  // namespace
}  // namespace kvmanager
