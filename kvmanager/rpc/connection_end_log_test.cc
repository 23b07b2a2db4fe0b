#include "kvmanager/rpc/connection_end_log.h"

#include <kj/async.h>
#include <kj/timer.h>

#include <string>

#include "gtest/gtest.h"
#include "kvmanager/base/captured_log_testing.h"

namespace kvmanager {
namespace {

class ConnectionEndLogTest : public ::testing::Test {
 protected:
  ~ConnectionEndLogTest() noexcept override {}  // those of kj may throw
  void Pass(int64_t ns) {
    timer_.advanceTo(timer_.now() + ns * kj::NANOSECONDS);
    loop_.run();
  }
  void End(int times) {
    for (int i = 0; i < times; ++i)
      log_.Note(++id_, "", "process 12 of user 1000", EndReason::kNoHello, "it is silent");
  }

  kj::EventLoop loop_;
  kj::WaitScope scope_{loop_};
  kj::TimerImpl timer_{kj::origin<kj::TimePoint>()};
  testing::CapturedLog lines_;
  ConnectionEndLog log_{&timer_};
  uint64_t id_ = 0;
};

TEST_F(ConnectionEndLogTest, SaysWhoseConnectionItWas) {
  log_.Note(7, "vllm", "process 12 of user 1000", EndReason::kFraming, "no message");
  EXPECT_EQ(lines_.Lines({"connection 7 of \"vllm\" (process 12 of user 1000) ends: framing: no message"}).size(), 1u);
  log_.Note(7, "a\" (process 1 of user 0)", "process 12 of user 1000", EndReason::kFraming, "");
  EXPECT_EQ(lines_.Lines({"of \"a' (process 1 of user 0)\" (process 12 of user 1000) ends"}).size(), 1u);
  log_.Note(8, "", "10.0.0.1:80", EndReason::kUnread, "");
  EXPECT_EQ(lines_.Lines({"connection 8 of 10.0.0.1:80 ends: unread"}).size(), 1u);
}

TEST_F(ConnectionEndLogTest, CountsThoseThatItLeavesOut) {
  End(320);
  EXPECT_EQ(lines_.Lines({"ends: "}).size(), size_t{LogLimit::kLinesMax});
  EXPECT_TRUE(lines_.Lines({"more connections"}).empty());
  Pass(LogLimit::kNs);
  EXPECT_EQ(lines_.Lines({"310 more connections"}).size(), 1u) << "nobody else connected";
  Pass(LogLimit::kNs);
  EXPECT_EQ(lines_.Lines({"more connections"}).size(), 1u);
}

TEST_F(ConnectionEndLogTest, CountsThoseOfTheNextMinuteToo) {
  End(LogLimit::kLinesMax);
  Pass(LogLimit::kNs / 2);
  End(3);  // left out: looked at in a minute from now
  Pass(LogLimit::kNs / 2);
  End(LogLimit::kLinesMax + 5);
  EXPECT_EQ(lines_.Lines({"3 more connections"}).size(), 1u);
  Pass(LogLimit::kNs / 2);  // looked at, while the second minute goes on
  Pass(LogLimit::kNs);
  EXPECT_EQ(lines_.Lines({"5 more connections"}).size(), 1u);
  EXPECT_EQ(lines_.Lines({"ends: "}).size(), 2u * LogLimit::kLinesMax);
}

}  // namespace
}  // namespace kvmanager
