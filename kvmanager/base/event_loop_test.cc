#include "kvmanager/base/event_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace kvmanager {
namespace {

// Every message of every thread runs, in its thread's order, whether the loop blocks or polls.
TEST(EventLoopTest, RunsMessagesInOrder) {
  for (const int64_t busy_poll_us : {0, 200}) {
    constexpr int kThreads = 4, kMessages = 2000;
    MessageQueue queue;
    std::vector<int> next(kThreads, 0);
    int total = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < kMessages; ++i) {
          queue.Post([&, t, i] {
            EXPECT_EQ(next[t]++, i);
            ++total;
          });
          if (i % 64 == 0) std::this_thread::yield();
        }
      });
    }
    EventLoop loop(&queue, busy_poll_us);
    loop.Run([&] { return total == kThreads * kMessages; });
    for (std::thread& thread : threads) thread.join();
    EXPECT_FALSE(queue.RunSome());
  }
}

// A message wakes a loop that blocks with nothing else to wait for, time after time.
TEST(EventLoopTest, PingPongWithABlockedLoop) {
  constexpr int kRounds = 500;
  MessageQueue queue;
  std::atomic<int> answered{0};
  std::thread other([&] {
    for (int i = 0; i < kRounds; ++i) {
      queue.Post([&] { answered.fetch_add(1); });
      while (answered.load() <= i) std::this_thread::yield();
    }
  });
  EventLoop loop(&queue, 0);
  loop.Run([&] { return answered.load() == kRounds; });
  other.join();
}

// Sockets and timers that always have work leave messages their turn.
TEST(EventLoopTest, WorkThatNeverEndsDoesNotKeepMessagesWaiting) {
  MessageQueue queue;
  EventLoop loop(&queue, 0);
  bool ran = false;
  std::function<kj::Promise<void>()> again = [&] {
    return loop.timer().afterDelay(0 * kj::NANOSECONDS).then([&]() -> kj::Promise<void> {
      if (ran) return kj::READY_NOW;
      return again();
    });
  };
  kj::Promise<void> working = again().eagerlyEvaluate(nullptr);
  std::thread other([&] { queue.Post([&] { ran = true; }); });
  loop.Run([&] { return ran; });
  other.join();
}

TEST(EventLoopTest, TimersAndMessagesMix) {
  MessageQueue queue;
  EventLoop loop(&queue, 0);
  bool timer_ran = false, message_ran = false;
  auto promise = loop.timer()
                     .afterDelay(1 * kj::MILLISECONDS)
                     .then([&] {
                       timer_ran = true;
                       queue.Post([&] { message_ran = true; });
                     })
                     .eagerlyEvaluate(nullptr);
  loop.Run([&] { return message_ran; });
  EXPECT_TRUE(timer_ran);
}

// In the order of their times, whatever order they were begun in; what was dropped holds nothing up.
TEST(EventLoopTest, FineWaitsEndInTheirOrder) {
  MessageQueue queue;
  EventLoop loop(&queue, 0);
  const SteadyClock clock;
  std::vector<int> ended;
  std::vector<kj::Promise<void>> waits;
  const int64_t begin_ns = clock.NowNs();
  for (const int us : {3000, 500, 0, 1500, 500}) {
    waits.push_back(loop.fine_timer()
                        .AfterUs(us)
                        .then([&, us] {
                          EXPECT_GE(clock.NowNs() - begin_ns, us * 1000);
                          ended.push_back(us);
                        })
                        .eagerlyEvaluate(nullptr));
  }
  (void)loop.fine_timer().AfterUs(200);
  loop.Run([&] { return ended.size() == waits.size(); });
  EXPECT_EQ(ended, (std::vector<int>{0, 500, 500, 1500, 3000}));
}

// Waits that follow one another, each begun where the last one ended.
TEST(EventLoopTest, FineWaitsGoOn) {
  MessageQueue queue;
  EventLoop loop(&queue, 0);
  int rounds = 0;
  kj::Promise<void> wait = nullptr;
  std::function<kj::Promise<void>()> next = [&]() -> kj::Promise<void> {
    if (++rounds == 100) return kj::READY_NOW;
    return loop.fine_timer().AfterUs(rounds % 3 * 50).then([&] { return next(); });
  };
  wait = next().eagerlyEvaluate(nullptr);
  loop.Run([&] { return rounds == 100; });
}

TEST(MessageQueueTest, MessagesOfARunAreLeftForTheNext) {
  MessageQueue queue;
  int ran = 0;
  queue.Post([&] {
    ++ran;
    queue.Post([&] { ++ran; });
  });
  EXPECT_TRUE(queue.RunSome());
  EXPECT_EQ(ran, 1);
  EXPECT_FALSE(queue.PrepareSleep());
  EXPECT_TRUE(queue.RunSome());
  EXPECT_EQ(ran, 2);
  EXPECT_TRUE(queue.PrepareSleep());
  queue.Awake();
}

TEST(MessageQueueTest, ManyMessagesTakeTurns) {
  MessageQueue queue;
  std::vector<int> ran;
  for (int i = 0; i < 100; ++i) {
    queue.Post([&ran, i] {
      ran.push_back(i);
      const auto until = std::chrono::steady_clock::now() + MessageQueue::kTurn / 10;
      while (std::chrono::steady_clock::now() < until) {
      }
    });
  }
  EXPECT_TRUE(queue.RunSome());
  EXPECT_LE(ran.size(), 10u);
  EXPECT_FALSE(queue.PrepareSleep());
  queue.Post([&] { ran.push_back(100); });
  while (queue.RunSome()) {
  }
  EXPECT_TRUE(queue.PrepareSleep());
  queue.Awake();
  ASSERT_EQ(ran.size(), 101u);
  for (int i = 0; i <= 100; ++i) EXPECT_EQ(ran[i], i);
}

}  // namespace
}  // namespace kvmanager
