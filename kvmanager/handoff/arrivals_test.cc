#include "kvmanager/handoff/arrivals.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::TestDevice;

class ArrivalsTest : public testing::PageStoreTest {
 public:
  ~ArrivalsTest() noexcept override {}

 protected:
  ArrivalsTest() {
    device_bytes_ = 4 << 20;
    moves_ = true;
  }
  // A sequence in host memory on its way to the GPU.
  kj::Promise<void> Begin() {
    const CacheId cache = test().Open(MakeConfig("raw", 0));
    const SequenceId sequence = Filled(cache, MakeText(3 * kPage), 3 * kPage);
    return arrivals()
        .Await(store().Copy(sequence, TestDevice::kOrdinal))
        .then([this](absl::StatusOr<Arrived> arrived) { got_.emplace(std::move(arrived)); })
        .eagerlyEvaluate(nullptr);
  }
  void Land() {
    test().executor.FinishAll();
    test().device.mover.FinishAll();
    test().executor.FinishAll();
    loop_.RunReady();
  }
  const Arrivals& arrivals() {
    if (!arrivals_.has_value()) arrivals_.emplace(&store(), &clock_, &loop_);
    return *arrivals_;
  }
  uint64_t sequences() { return store().report().SequenceIds().size(); }

  const SteadyClock clock_;
  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  std::optional<Arrivals> arrivals_;
  std::optional<absl::StatusOr<Arrived>> got_;
};

TEST_F(ArrivalsTest, ASequenceIsTheReceiversOnceItsPagesAreThere) {
  auto arriving = Begin();
  loop_.RunReady();
  EXPECT_FALSE(got_.has_value());
  Land();
  ASSERT_TRUE(got_.has_value());
  ASSERT_TRUE(got_->ok()) << got_->status();
  const SequenceId there = (*got_)->sequence();
  EXPECT_EQ(store().Describe(there)->tokens, 3u * kPage);
  EXPECT_EQ((*got_)->Take().sequence, there);
  got_.reset();
  EXPECT_EQ(sequences(), 2u);
  store().Drop(there);
}

TEST_F(ArrivalsTest, WhatNobodyTakesIsDropped) {
  auto arriving = Begin();
  Land();
  ASSERT_TRUE(got_.has_value() && got_->ok());
  EXPECT_EQ(sequences(), 2u);
  got_.reset();
  EXPECT_EQ(sequences(), 1u);
}

TEST_F(ArrivalsTest, DroppingThePromiseGivesEverythingBack) {
  {
    auto arriving = Begin();
    loop_.RunReady();
  }
  Land();
  EXPECT_FALSE(got_.has_value());
  EXPECT_EQ(sequences(), 1u);
}

TEST_F(ArrivalsTest, AnErrorOfTheStartIsTheAnswer) {
  auto failed = arrivals()
                    .Await(absl::NotFoundError("no such sequence"))
                    .then([this](absl::StatusOr<Arrived> arrived) { got_.emplace(std::move(arrived)); })
                    .eagerlyEvaluate(nullptr);
  loop_.RunReady();
  ASSERT_TRUE(got_.has_value());
  EXPECT_TRUE(absl::IsNotFound(got_->status()));
}

}  // namespace
}  // namespace kvmanager
