#include "kvmanager/base/poll_list.h"

#include <gtest/gtest.h>

namespace kvmanager {
namespace {

TEST(PollListTest, AsksEachUntilItIsDone) {
  MessageQueue queue;
  PollList polls;
  int first = 0, second = 0;
  polls.Add([&] { return ++first == 3; });  // before there is a loop
  EventLoop loop(&queue, 0);
  polls.SetLoop(&loop);
  polls.Add([&] { return ++second == 5; });
  loop.Run([&] { return second == 5; });
  EXPECT_EQ(first, 3);
  polls.Ask();  // nothing is left
  EXPECT_EQ(first, 3);
  EXPECT_EQ(second, 5);
  polls.SetLoop(nullptr);
}

TEST(PollListTest, APollMayAddOthers) {
  MessageQueue queue;
  PollList polls;
  EventLoop loop(&queue, 0);
  polls.SetLoop(&loop);
  bool added_ran = false;
  polls.Add([&] {
    polls.Add([&] { return added_ran = true; });
    return true;
  });
  loop.Run([&] { return added_ran; });
  polls.SetLoop(nullptr);
}

TEST(PollListTest, WithoutALoopWhatWaitsIsForgotten) {
  MessageQueue queue;
  PollList polls;
  EventLoop loop(&queue, 0);
  polls.SetLoop(&loop);
  int asked = 0;
  polls.Add([&] {
    ++asked;
    return false;
  });
  loop.Run([&] { return asked > 0; });
  polls.SetLoop(nullptr);
  const int before = asked;
  polls.Ask();
  EXPECT_EQ(asked, before);
}

}  // namespace
}  // namespace kvmanager
