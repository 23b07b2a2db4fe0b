// What is named is written, while a client appends and crops as it likes.
#include "kvmanager/gpu/written_publish.h"

#include <gtest/gtest.h>
#include <kj/async.h>

#include <utility>
#include <vector>

#include "kvmanager/store/simulated_store.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;
using testing::SimulatedStore;

class WrittenPublishTest : public ::testing::Test {
 public:
  ~WrittenPublishTest() noexcept override {}

 protected:
  using Published = absl::StatusOr<PublishResult>;

  void Extend(uint64_t position, int tokens) {
    ASSERT_TRUE(gpu_.Extend(cache_, sequence_, text_, position, tokens).ok());
  }
  kj::Promise<Published> Publish(size_t blocks) {
    std::vector<BlockName> names = gpu_.test().Names(cache_, text_);
    names.resize(blocks);
    return publish_.Publish(std::move(names), kPage, [this] {
      auto waiting = kj::newPromiseAndFulfiller<absl::Status>();
      waits_.push_back(kj::mv(waiting.fulfiller));
      return kj::mv(waiting.promise);
    });
  }
  // The kernels have come so far, and have found `status`.
  void EndWait(size_t number, absl::Status status = absl::OkStatus()) {
    ASSERT_LT(number, waits_.size());
    waits_[number]->fulfill(std::move(status));
    loop_.run();
  }
  uint64_t published() { return gpu_.store().caches().Describe(cache_)->published_blocks; }

  kj::EventLoop loop_;
  kj::WaitScope scope_{loop_};
  SimulatedStore gpu_;
  const testing::Text text_ = MakeText(8 * kPage);
  const CacheId cache_ = gpu_.Open(MakeConfig("raw", 0));
  const SequenceId sequence_ = gpu_.Create(cache_);
  WrittenPublish publish_{&gpu_.store(), sequence_};
  std::vector<kj::Own<kj::PromiseFulfiller<absl::Status>>> waits_;
};

TEST_F(WrittenPublishTest, WhatIsBookedMeanwhileIsWaitedForToo) {
  ASSERT_NO_FATAL_FAILURE(Extend(0, kPage));
  auto published_two = Publish(2);
  ASSERT_NO_FATAL_FAILURE(Extend(kPage, kPage));  // whose kernels are behind what is waited for
  ASSERT_NO_FATAL_FAILURE(EndWait(0));
  EXPECT_EQ(published(), 0u);
  ASSERT_EQ(waits_.size(), 2u);
  ASSERT_NO_FATAL_FAILURE(EndWait(1));
  const Published result = published_two.wait(scope_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->published, 2);
}

TEST_F(WrittenPublishTest, WhatComesBehindTheNamedBlocksHoldsNothingUp) {
  ASSERT_NO_FATAL_FAILURE(Extend(0, 2 * kPage + 3));
  auto published_two = Publish(2);
  ASSERT_NO_FATAL_FAILURE(Extend(2 * kPage + 3, kPage));
  publish_.OnCrop(2 * kPage);
  ASSERT_NO_FATAL_FAILURE(EndWait(0));
  EXPECT_EQ(published_two.wait(scope_)->published, 2);
  EXPECT_EQ(waits_.size(), 1u);
}

TEST_F(WrittenPublishTest, WhatIsCroppedAndAppendedAnewIsWaitedForAgain) {
  ASSERT_NO_FATAL_FAILURE(Extend(0, 2 * kPage));
  auto published_two = Publish(2);
  std::vector<OpenCopy> copies;
  ASSERT_TRUE(gpu_.store().Crop(sequence_, kPage, &copies).ok());
  publish_.OnCrop(kPage);
  ASSERT_NO_FATAL_FAILURE(Extend(kPage, kPage));
  ASSERT_NO_FATAL_FAILURE(EndWait(0));
  EXPECT_EQ(published(), 0u);
  ASSERT_NO_FATAL_FAILURE(EndWait(1));
  EXPECT_EQ(published_two.wait(scope_)->published, 2);
}

TEST_F(WrittenPublishTest, WhatIsNotThereOrNotFiniteIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Extend(0, kPage));
  auto published_two = Publish(2);
  ASSERT_NO_FATAL_FAILURE(EndWait(0));
  EXPECT_EQ(published_two.wait(scope_).status().code(), absl::StatusCode::kFailedPrecondition);
  auto published_one = Publish(1);
  ASSERT_NO_FATAL_FAILURE(EndWait(1, absl::InvalidArgumentError("NaN")));
  EXPECT_EQ(published_one.wait(scope_).status(), absl::InvalidArgumentError("NaN"));
  EXPECT_EQ(published(), 0u);
}

}  // namespace
}  // namespace kvmanager
