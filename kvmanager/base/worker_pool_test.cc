#include "kvmanager/base/worker_pool.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

TEST(WorkerPoolTest, EveryTaskRunsOnceWhoeverPosts) {
  constexpr int kPosters = 4, kTasks = 5000;
  std::vector<std::atomic<int>> runs(kPosters * kTasks);
  {
    WorkerPool pool(3);
    std::vector<std::thread> posters;
    for (int poster = 0; poster < kPosters; ++poster) {
      posters.emplace_back([&, poster] {
        std::mt19937 random(poster);
        for (int i = 0; i < kTasks; ++i) {
          const auto priority = random() % 2 == 0 ? WorkerPool::Priority::kAttend : WorkerPool::Priority::kEncode;
          if (random() % 4 == 0) {  // several at once
            std::vector<WorkerPool::Task> tasks;
            const int count = std::min(kTasks - i, static_cast<int>(random() % 9));
            for (int t = 0; t < count; ++t) tasks.emplace_back([&runs, at = poster * kTasks + i + t] { ++runs[at]; });
            pool.Post(priority, absl::MakeSpan(tasks));
            i += count - 1;
            continue;
          }
          pool.Post(priority, [&runs, at = poster * kTasks + i] { ++runs[at]; });
          // Workers become idle and are woken all the time.
          if (random() % 64 == 0) std::this_thread::yield();
        }
      });
    }
    for (std::thread& poster : posters) poster.join();
  }  // what is queued still runs
  for (const auto& count : runs) ASSERT_EQ(count, 1);
}

TEST(WorkerPoolTest, AsManyTasksAtOnceAsThreads) {
  constexpr int kThreads = 5;
  WorkerPool pool(kThreads);
  EXPECT_EQ(pool.threads(), kThreads);
  for (int round = 0; round < 200; ++round) {
    // Each ends only when all have begun.
    std::atomic<int> begun{0};
    std::promise<void> all;
    const std::shared_future<void> meet = all.get_future().share();
    std::vector<std::future<void>> ended;
    for (int i = 0; i < kThreads; ++i) {
      auto end = std::make_shared<std::promise<void>>();
      ended.push_back(end->get_future());
      pool.Post(WorkerPool::Priority::kEncode, [&, meet, end] {
        if (++begun == kThreads) all.set_value();
        meet.wait();
        end->set_value();
      });
    }
    for (auto& end : ended) end.get();
  }
}

TEST(WorkerPoolTest, WhatIsPostedToAStoppedPoolIsDestroyed) {
  WorkerPool pool(2);
  std::atomic<int> runs{0};
  for (int i = 0; i < 100; ++i) {
    pool.Post(WorkerPool::Priority::kEncode, [&] {
      ++runs;
      pool.Post(WorkerPool::Priority::kAttend, [&] { ++runs; });
    });
  }
  pool.Stop();
  EXPECT_EQ(runs, 200);
  const auto held = std::make_shared<int>();
  pool.Post(
      WorkerPool::Priority::kEncode, [&, held] { ++runs; }, 7);
  EXPECT_EQ(held.use_count(), 1);
  EXPECT_EQ(runs, 200);
  pool.Stop();
}

// What comes while the threads end is run or destroyed, and nothing is lost of what came before.
TEST(WorkerPoolTest, OthersMayPostWhileItStops) {
  for (int round = 0; round < 50; ++round) {
    const auto held = std::make_shared<int>();
    std::atomic<int> before{0};
    WorkerPool pool(3);
    for (int i = 0; i < 10; ++i) pool.Post(WorkerPool::Priority::kAttend, [&, held] { ++before; });
    std::thread poster([&] {
      for (int i = 0; i < 300; ++i)
        pool.Post(
            WorkerPool::Priority::kEncode, [held] {}, i % 5);
    });
    pool.Stop();
    EXPECT_EQ(before, 10);
    poster.join();
    EXPECT_EQ(held.use_count(), 1);
  }
}

TEST(WorkerPoolTest, NiceIsOfItsThreadsAlone) {
  const int own = getpriority(PRIO_PROCESS, 0);
  WorkerPool pool(1, Turn::kLength, 19);
  std::promise<int> nice;
  pool.Post(WorkerPool::Priority::kEncode, [&] { nice.set_value(getpriority(PRIO_PROCESS, 0)); });
  EXPECT_EQ(nice.get_future().get(), 19);
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), own);
}

TEST(WorkerPoolTest, AttentionGoesFirstAndEncodingNowAndThen) {
  WorkerPool pool(1);
  std::promise<void> go;
  pool.Post(WorkerPool::Priority::kAttend, [&] { go.get_future().get(); });
  std::vector<char> order;
  for (int i = 0; i < 3; ++i) pool.Post(WorkerPool::Priority::kEncode, [&] { order.push_back('e'); });
  std::promise<void> done;
  for (int i = 0; i < 2 * WorkerPool::kAttendRunMax; ++i) {
    pool.Post(WorkerPool::Priority::kAttend, [&] { order.push_back('a'); });
  }
  pool.Post(WorkerPool::Priority::kEncode, [&] { done.set_value(); });
  go.set_value();
  done.get_future().get();
  const std::string ran(order.begin(), order.end());
  const size_t first = ran.find('e'), second = ran.find('e', first + 1);
  EXPECT_LE(first, size_t{WorkerPool::kAttendRunMax}) << ran;
  EXPECT_EQ(second - first - 1, size_t{WorkerPool::kAttendRunMax}) << ran;
}

void Spin(std::chrono::microseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < until) continue;
}

// One thread, held until everything is posted. Who ran, in order.
class WorkerPoolOwnersTest : public ::testing::Test {
 protected:
  void Hold() {
    go_ = std::promise<void>();
    done_ = std::promise<void>();
    ran_.clear();
    pool_.Post(WorkerPool::Priority::kAttend, [go = go_.get_future().share()] { go.wait(); });
  }
  void Post(char who, int tasks, WorkerPool::Priority priority = WorkerPool::Priority::kAttend) {
    left_ += tasks;
    for (int i = 0; i < tasks; ++i) {
      const auto task = [this, who] {
        Spin(std::chrono::microseconds(500));
        ran_.push_back(who);
        if (--left_ == 0) done_.set_value();
      };
      pool_.Post(priority, task, WorkerPool::OwnerOf(std::string(1, who)));
    }
  }
  const std::string& Run() {
    go_.set_value();
    done_.get_future().get();
    return ran_;
  }

  std::promise<void> go_, done_;
  std::atomic<int> left_{0};
  std::string ran_;
  WorkerPool pool_{1};
};

TEST_F(WorkerPoolOwnersTest, TakeTurnsHoweverManyTasksEachHas) {
  Hold();
  Post('a', 60);
  Post('b', 6);
  const std::string ran = Run();
  ASSERT_EQ(ran.size(), 66u);
  // b has had as much time as a when its last one ends; the clock of a machine with other work may err by some tasks.
  EXPECT_LE(ran.rfind('b'), 20u) << ran;
}

TEST_F(WorkerPoolOwnersTest, TakeTurnsInEncodingToo) {
  Hold();
  Post('a', 60, WorkerPool::Priority::kEncode);
  Post('b', 6, WorkerPool::Priority::kEncode);
  EXPECT_LE(Run().rfind('b'), 20u) << ran_;
}

TEST_F(WorkerPoolOwnersTest, WhoWasIdleHasSavedNothingUp) {
  Hold();
  Post('a', 40);
  Run();
  Hold();
  Post('b', 40);
  Post('a', 4);
  Run();
  // a is not kept waiting until b has had the 20 ms that a had alone.
  EXPECT_LE(ran_.find('a'), 12u) << ran_;
}

TEST_F(WorkerPoolOwnersTest, AttentionGoesFirstWhoseverItIs) {
  Hold();
  Post('b', 4, WorkerPool::Priority::kEncode);
  Post('a', 4);
  EXPECT_EQ(Run(), "aaaabbbb");
}

TEST(TurnTest, IsOverAfterItsLengthAndAnEndlessOneNever) {
  const Turn turn(Turn::kLength), endless = Turn::Endless();
  EXPECT_FALSE(endless.over());
  Spin(Turn::kLength);
  EXPECT_TRUE(turn.over());
  EXPECT_FALSE(endless.over());
}

}  // namespace
}  // namespace kvmanager
