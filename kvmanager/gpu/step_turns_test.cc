#include "kvmanager/gpu/step_turns.h"

#include <gtest/gtest.h>

namespace kvmanager {
namespace {

TEST(StepTurnsTest, StepsHaveTheirTurnInTheOrderOfTheirCalls) {
  StepTurns turns;
  EXPECT_TRUE(turns.none());
  StepTurns::Turn a = turns.Take(), b = turns.Take(), c = turns.Take();
  EXPECT_TRUE(a.first());
  EXPECT_FALSE(b.first());
  b.End();  // its call was given up
  EXPECT_FALSE(b.taken());
  EXPECT_FALSE(c.first());
  a.End();
  a.End();
  EXPECT_TRUE(c.first());
  StepTurns::Turn d = turns.TakeFirst();
  EXPECT_TRUE(d.first());
  EXPECT_FALSE(c.first());
  StepTurns::Turn e = std::move(d);
  EXPECT_FALSE(d.taken());
  EXPECT_TRUE(e.first());
  e = turns.Take();
  EXPECT_TRUE(c.first());
  c = StepTurns::Turn();
  EXPECT_TRUE(e.first());
}

TEST(StepTurnsTest, ATurnThatGoesIsGivenBack) {
  StepTurns turns;
  {
    const StepTurns::Turn gone = turns.Take();
    EXPECT_TRUE(gone.first());
  }
  EXPECT_TRUE(turns.none());
  EXPECT_TRUE(turns.Take().first());
}

}  // namespace
}  // namespace kvmanager
