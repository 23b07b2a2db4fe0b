#include "kvmanager/handoff/hand_off_turns.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvmanager {
namespace {

class HandOffTurnsTest : public ::testing::Test {
 protected:
  // A hand-off of `pieces` pieces, each of which posts the next.
  void Begin(const std::string& payer, int pieces) {
    turns_.Post(payer, [this, payer, pieces] {
      done_ += payer;
      if (pieces > 1) Begin(payer, pieces - 1);
    });
  }
  MessageQueue queue_;
  HandOffTurns turns_{&queue_};
  std::string done_;
};

TEST_F(HandOffTurnsTest, PayersTakeTurnsHoweverManyHandOffsOneHas) {
  for (int i = 0; i < 20; ++i) Begin("a", 10);
  Begin("b", 3);
  while (queue_.RunSome()) {
  }
  EXPECT_EQ(done_.size(), 203u);
  EXPECT_LE(done_.rfind('b'), 6u) << done_;
}

TEST_F(HandOffTurnsTest, WhatElseIsPostedWaitsForOnePiece) {
  for (int i = 0; i < 20; ++i) Begin("a", 10);
  queue_.Post([this] { done_ += "other"; });
  while (queue_.RunSome()) {
  }
  EXPECT_LE(done_.find("other"), 1u) << done_;
  // And once nothing waited any more.
  Begin("c", 2);
  while (queue_.RunSome()) {
  }
  EXPECT_TRUE(done_.ends_with("cc"));
}

}  // namespace
}  // namespace kvmanager
