#include "kvmanager/gpu/stream_progress.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kvmanager {
namespace {

/// Of no GPU: what it has passed is said by the test.
class FakeStream final : public NumberedStream {
 public:
  absl::Status Enqueue(absl::FunctionRef<absl::Status(CUstream_st*)> enqueue, uint64_t number) override {
    absl::Status status = enqueue(nullptr);
    if (status.ok()) numbers.push_back(number);
    return status;
  }
  uint64_t passed() const override { return passed_number; }
  absl::StatusOr<bool> IsIdle() const override { return idle; }

  std::vector<uint64_t> numbers;  // to be stored
  uint64_t passed_number = 0;
  absl::StatusOr<bool> idle = false;
};

class StreamProgressTest : public ::testing::Test {
 protected:
  ~StreamProgressTest() noexcept override {}

  /// Whoever is told adds a line of its name to `told_`.
  void Post(const std::string& name, absl::Status enqueued = absl::OkStatus()) {
    progress_.Post(
        [&](CUstream_st*) {
          ++enqueues_;
          return enqueued;
        },
        [this, name](bool passed) { told_.push_back(absl::StrCat(name, passed ? " passed" : " did not")); });
  }
  std::vector<std::string> Poll() {
    polls_.Ask();
    return std::exchange(told_, {});
  }

  using Lines = std::vector<std::string>;
  FakeStream* const stream_ = new FakeStream;  // progress_'s
  PollList polls_;
  StreamProgress progress_{std::unique_ptr<NumberedStream>(stream_), &polls_, "GPU 0 is a test's"};
  int enqueues_ = 0;
  Lines told_;
};

TEST_F(StreamProgressTest, TellsInOrderOfWhatTheStreamHasPassed) {
  for (const char* const name : {"a", "b", "c"}) Post(name);
  EXPECT_EQ(stream_->numbers, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(told_, Lines());
  EXPECT_EQ(Poll(), Lines());
  stream_->passed_number = 2;
  EXPECT_EQ(Poll(), (Lines{"a passed", "b passed"}));
  EXPECT_EQ(Poll(), Lines());
  stream_->passed_number = 3;
  EXPECT_EQ(Poll(), Lines{"c passed"});
  // It is asked again for what comes later.
  Post("d");
  EXPECT_EQ(Poll(), Lines());
  stream_->passed_number = 4;
  EXPECT_EQ(Poll(), Lines{"d passed"});
  EXPECT_FALSE(progress_.failed());
}

TEST_F(StreamProgressTest, WhoIsToldMayPostMore) {
  progress_.Post([](CUstream_st*) { return absl::OkStatus(); },
                 [this](bool passed) {
                   EXPECT_TRUE(passed);
                   Post("second");
                   Post("third", absl::UnavailableError("made up"));
                 });
  stream_->passed_number = 1;
  EXPECT_EQ(Poll(), Lines());
  EXPECT_EQ(stream_->numbers, (std::vector<uint64_t>{1, 2}));
  stream_->passed_number = 2;
  stream_->idle = true;
  EXPECT_EQ(Poll(), (Lines{"second passed", "third did not"}));
}

TEST_F(StreamProgressTest, NothingIsEnqueuedAfterAnError) {
  Post("before");
  Post("failed", absl::UnavailableError("made up"));
  EXPECT_TRUE(progress_.failed());
  Post("after");
  EXPECT_EQ(enqueues_, 2);
  EXPECT_EQ(stream_->numbers, std::vector<uint64_t>{1});
  // What failed may have begun.
  EXPECT_EQ(Poll(), Lines());
  stream_->passed_number = 1;
  EXPECT_EQ(Poll(), Lines{"before passed"});
  EXPECT_EQ(Poll(), Lines());
  stream_->idle = true;
  EXPECT_EQ(Poll(), (Lines{"failed did not", "after did not"}));
}

TEST_F(StreamProgressTest, AGpuThatFailsEndsWhatWaitsForIt) {
  for (const char* const name : {"a", "b"}) Post(name);
  stream_->passed_number = 1;
  stream_->idle = absl::UnavailableError("made up");
  EXPECT_EQ(Poll(), (Lines{"a passed", "b did not"}));
  EXPECT_TRUE(progress_.failed());
  Post("c");
  EXPECT_EQ(enqueues_, 2);
  EXPECT_EQ(Poll(), Lines{"c did not"});
}

TEST_F(StreamProgressTest, NobodyAsksAGpuThatIsNotWaitedFor) {
  Post("a");
  stream_->passed_number = 1;
  stream_->idle = absl::UnavailableError("made up");
  EXPECT_EQ(Poll(), Lines{"a passed"});
  EXPECT_FALSE(progress_.failed());
}

TEST_F(StreamProgressTest, DrainsUntilTheStreamTouchesNothing) {
  Post("a");
  EXPECT_FALSE(progress_.Drain(0));
  stream_->idle = true;
  EXPECT_TRUE(progress_.Drain(0));
  stream_->idle = absl::UnavailableError("made up");
  EXPECT_TRUE(progress_.Drain(0));
  EXPECT_EQ(told_, Lines());
}

}  // namespace
}  // namespace kvmanager
