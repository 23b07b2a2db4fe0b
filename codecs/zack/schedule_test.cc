#include "codecs/zack/schedule.h"

#include "gtest/gtest.h"

namespace kvmanager::zack {
namespace {

TEST(Schedule, ByHeadsIsBlindToCosts) {
  EXPECT_EQ(MakespanByHeads({4, 4, 1, 1}, 2), 8);
  EXPECT_EQ(MakespanByHeads({4, 4, 1, 1, 1}, 1), 11);
  EXPECT_EQ(MakespanByHeads({3}, 4), 3);
}

TEST(Schedule, SortAndAssignBalancesWholeHeads) {
  EXPECT_EQ(MakespanSortAndAssign({4, 4, 1, 1}, 2), 5);
  // 7 tasks on 3 workers, largest first to whoever has least: 5+1, 4+3, 4+2+2.
  EXPECT_EQ(MakespanSortAndAssign({5, 4, 4, 3, 2, 2, 1}, 3), 7);
  EXPECT_EQ(MakespanSortAndAssign({8, 1, 1}, 3), 8);
}

TEST(Schedule, ByBytesDividesHeads) {
  EXPECT_EQ(MakespanByBytes({8}, 4, 4, 0), 2);
  EXPECT_EQ(MakespanByBytes({8}, 4, 4, 0.5), 2.5);
  EXPECT_EQ(MakespanByBytes({8, 1, 1}, 2, 1, 5), MakespanSortAndAssign({8, 1, 1}, 2));
}

}  // namespace
}  // namespace kvmanager::zack
