#include "kvmanager/rpc/turn_watch.h"

#include <time.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

void Burn(int64_t ns) {
  const auto used = [] {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  };
  for (const int64_t until = used() + ns; used() < until;) {
  }
}

class TurnWatchTest : public ::testing::Test {
 protected:
  double Long(const char* call) {
    return metrics_
        .Counter("loop_long_turns_total", "Turns of the event loop with more than 5 ms of CPU time, by call",
                 {{"call", call}})
        .Value();
  }
  double Longest() {
    return metrics_
        .Gauge("loop_longest_turn_seconds", "CPU time of the event loop's longest turn above 5 ms; 0: there was none")
        .Value();
  }
  Metrics metrics_;
  TurnWatch watch_{&metrics_};
};

TEST_F(TurnWatchTest, CountsTurnsThatWorkForLong) {
  { const LoopTurn turn(&watch_, "match"); }
  {
    const LoopTurn turn(&watch_, "match");
    Burn(TurnWatch::kTurnMaxNs + 1'000'000);
  }
  {
    const LoopTurn turn(&watch_, "read");
    Burn(TurnWatch::kTurnMaxNs / 2);
  }
  EXPECT_EQ(Long("match"), 1);
  EXPECT_EQ(Long("read"), 0);
  EXPECT_GE(Longest(), 0.006);
}

TEST_F(TurnWatchTest, DoesNotCountTurnsThatWait) {
  {
    const LoopTurn turn(&watch_, "match");
    usleep(20'000);  // stands for a thread that has no core
  }
  EXPECT_EQ(Long("match"), 0);
  EXPECT_EQ(Longest(), 0);
}

TEST_F(TurnWatchTest, DoesNotCountManyShortTurnsAsOne) {
  for (int i = 0; i < 200; ++i) {
    const LoopTurn turn(&watch_, "step");
    Burn(100'000);
  }
  EXPECT_EQ(Long("step"), 0);
}

}  // namespace
}  // namespace kvmanager
