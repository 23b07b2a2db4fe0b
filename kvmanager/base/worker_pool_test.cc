#include "kvmanager/base/worker_pool.h"

#include <atomic>
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

}  // namespace
}  // namespace kvmanager
