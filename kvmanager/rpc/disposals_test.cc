// Disposals, and the turns that they take.
#include "kvmanager/rpc/disposals.h"

#include <kj/async.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/message_queue.h"
#include "monitoring/metrics.h"

namespace kvmanager {
namespace {

using std::chrono::steady_clock;

class DisposalsTest : public ::testing::Test {
 protected:
  ~DisposalsTest() noexcept override {}

  // Destroyed in a tenth of a turn.
  struct Slow {
    explicit Slow(DisposalsTest* t) : test(t) {}
    ~Slow() noexcept {
      const auto until = steady_clock::now() + TakingTurns::kLength / 10;
      while (steady_clock::now() < until) {
      }
      ++test->destroyed_;
    }
    void LetGo() { ++test->let_go_; }
    DisposalsTest* const test;
  };
  kj::Promise<void> Note(kj::Promise<void> turn, const std::string& what) {
    return turn.then([this, what] { order_.push_back(what); }).eagerlyEvaluate(nullptr);
  }

  int destroyed_ = 0, let_go_ = 0;
  std::vector<std::string> order_;
  Metrics metrics_;
  TurnWatch watch_{&metrics_};
  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  TakingTurns turns_{&queue_};
  std::optional<Disposals> disposals_{std::in_place, &turns_, &watch_};
};

TEST_F(DisposalsTest, OneIsDestroyedAtOnce) {
  for (int i = 1; i <= 3; ++i) {
    disposals_->Make<Slow>(this) = nullptr;
    EXPECT_EQ(destroyed_, i);
    loop_.RunReady();
  }
  EXPECT_EQ(let_go_, 3);
}

TEST_F(DisposalsTest, ManyAreDestroyedInTurnsBetweenWhichOthersAreServed) {
  constexpr int kMany = 1000;
  std::vector<kj::Own<Slow>> many;
  for (int i = 0; i < kMany; ++i) many.push_back(disposals_->Make<Slow>(this));
  many.clear();
  EXPECT_EQ(let_go_, kMany);
  EXPECT_LE(destroyed_, 11);
  int others = 0;
  loop_.Run([&] {
    ++others;
    return destroyed_ == kMany;
  });
  EXPECT_GE(others, kMany / 11);
}

TEST_F(DisposalsTest, WhatIsLetGoOfInTurnIsDestroyedBehindIt) {
  constexpr int kChain = 100000;  // as calls in one another they would overflow the stack
  struct Link {
    explicit Link(int* d) : destroyed(d) {}
    ~Link() noexcept { ++*destroyed; }
    int* const destroyed;
    kj::Own<Link> next;
  };
  kj::Own<Link> first;
  for (int i = 0; i < kChain; ++i) {
    auto link = disposals_->Make<Link>(&destroyed_);
    link->next = kj::mv(first);
    first = kj::mv(link);
  }
  first = nullptr;
  loop_.RunReady();
  EXPECT_EQ(destroyed_, kChain);
}

TEST_F(DisposalsTest, NothingIsLeftWhenItGoes) {
  std::vector<kj::Own<Slow>> many;
  for (int i = 0; i < 50; ++i) many.push_back(disposals_->Make<Slow>(this));
  many.clear();
  EXPECT_LT(destroyed_, 50);
  disposals_.reset();
  EXPECT_EQ(destroyed_, 50);
}

TEST_F(DisposalsTest, TurnsAreTakenInOrderButForWhatGivesBack) {
  auto first = Note(turns_.Next(), "first"), second = Note(turns_.Next(), "second");
  { const auto given_up = Note(turns_.Next(), "given up"); }
  auto third = Note(turns_.Next(), "third"), gives_back = Note(turns_.NextToGiveBack(), "gives back");
  loop_.RunReady();
  EXPECT_EQ(order_, (std::vector<std::string>{"gives back", "first", "second", "third"}));
}

TEST_F(DisposalsTest, ATurnComesBehindWhatIsReadyAndWhatThatSends) {
  auto turn = Note(turns_.Next(), "turn");
  auto worker = kj::newPromiseAndFulfiller<void>();
  queue_.Post([&] { worker.fulfiller->fulfill(); });
  kj::Promise<void> sent = nullptr;
  auto done = worker.promise
                  .then([&] {
                    order_.push_back("done");
                    sent = Note(kj::evalLast([] {}), "sent");
                  })
                  .eagerlyEvaluate(nullptr);
  loop_.RunReady();
  EXPECT_EQ(order_, (std::vector<std::string>{"done", "sent", "turn"}));
}

}  // namespace
}  // namespace kvmanager
