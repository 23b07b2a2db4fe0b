#include "kvmanager/rpc/taking_turns.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kvmanager/base/event_loop.h"

namespace kvmanager {
namespace {

class TakingTurnsTest : public ::testing::Test {
 public:
  ~TakingTurnsTest() noexcept override {}

 protected:
  kj::Promise<void> Wait(WorkerPool::Owner owner, char name) {
    return turns_.Next(owner).then([this, name] { ran_ += name; }).eagerlyEvaluate(nullptr);
  }
  std::string Run() {
    loop_.RunReady();
    return std::exchange(ran_, "");
  }

  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  TakingTurns turns_{&queue_};
  std::string ran_;
  std::vector<kj::Promise<void>> waiting_;
};

TEST_F(TakingTurnsTest, OwnersGoRoundAndEachKeepsItsOrder) {
  for (const char name : {'a', 'b', 'c', 'd'}) waiting_.push_back(Wait(1, name));
  waiting_.push_back(Wait(2, 'x'));
  waiting_.push_back(Wait(3, 'y'));
  waiting_.push_back(Wait(2, 'z'));
  for (int i = 0; i < 3; ++i) {
    waiting_.push_back(turns_.NextToGiveBack().then([this] { ran_ += '!'; }).eagerlyEvaluate(nullptr));
  }
  EXPECT_EQ(Run(), "!a!x!ybzcd");
}

TEST_F(TakingTurnsTest, WhoComesWaitsForATurnOfEachOther) {
  for (int i = 0; i < 1000; ++i) waiting_.push_back(Wait(1, 'a'));
  kj::Promise<void> late = nullptr;
  // In the second turn.
  waiting_.push_back(Wait(2, 'b').then([&] { late = Wait(3, 'c'); }).eagerlyEvaluate(nullptr));
  EXPECT_LE(Run().find('c'), 4u);
}

TEST_F(TakingTurnsTest, WhoGaveUpHasNoTurn) {
  for (WorkerPool::Owner owner = 0; owner < 3; ++owner) {
    waiting_.push_back(Wait(owner, 'a'));
    waiting_.push_back(Wait(owner, 'b'));
  }
  waiting_.erase(waiting_.begin());                            // 0's first
  waiting_.erase(waiting_.begin() + 1, waiting_.begin() + 3);  // both of 1
  EXPECT_EQ(Run(), "bab");
  waiting_.clear();
  EXPECT_EQ(Run(), "");
  waiting_.push_back(Wait(1, 'x'));
  waiting_.clear();
  waiting_.push_back(Wait(1, 'y'));
  EXPECT_EQ(Run(), "y");
}

}  // namespace
}  // namespace kvmanager
