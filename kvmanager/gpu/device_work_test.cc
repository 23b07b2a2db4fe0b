// What the daemon runs for a connection, but for its kernels: bounds, what is written, and how it ends. Steps that
// launch kernels are tested where there is a GPU.
#include "kvmanager/gpu/device_work.h"

#include <gtest/gtest.h>

#include <string>

#include "kvmanager/gpu/gpu_testing.h"

namespace kvmanager {
namespace {

class DeviceWorkTest : public testing::FakeGpuTest {
 public:
  ~DeviceWorkTest() noexcept override {}

 protected:
  void SetUp() override {
    FakeGpuTest::SetUp();
    stream_ = *gpu_->streams()->Open(/*user=*/0);
    work_ = *DeviceWork::Create({store_.get(), &polls_, nullptr}, gpu_.get(), stream_);
  }
  void TearDown() override {
    if (!stream_->closed()) {
      stream_->Keep(std::move(work_));
      stream_->Close();
    }
    FakeGpuTest::TearDown();
  }
  // Something that the stream has not passed.
  void Submit() {
    ASSERT_TRUE(stream_->Begin(0).ok());
    ASSERT_TRUE(stream_->End().ok());
  }

  std::shared_ptr<DeviceStream> stream_;
  std::shared_ptr<DeviceWork> work_;
};

TEST_F(DeviceWorkTest, StepsHaveBounds) {
  EXPECT_TRUE(DeviceWork::CheckTokens(DeviceWork::kStepTokensMax).ok());
  for (const uint64_t tokens : {uint64_t{DeviceWork::kStepTokensMax} + 1, UINT64_MAX}) {
    const absl::Status refused = DeviceWork::CheckTokens(tokens);
    EXPECT_TRUE(absl::IsInvalidArgument(refused));
    EXPECT_EQ(DetailOf(refused).field, "tokens of all entries");
    EXPECT_EQ(DetailOf(refused).value, std::to_string(tokens));
    EXPECT_EQ(DetailOf(refused).bound, "at most 16384 on a GPU");
  }
  // A step is up to two submissions.
  for (uint64_t i = 0; i + 2 <= DeviceStream::kSubmissionsMax; ++i) {
    EXPECT_TRUE(work_->HasRoom()) << i;
    ASSERT_NO_FATAL_FAILURE(Submit());
  }
  ASSERT_NO_FATAL_FAILURE(Submit());
  EXPECT_FALSE(work_->HasRoom());
  device_->Run();
  EXPECT_TRUE(work_->HasRoom());
}

TEST_F(DeviceWorkTest, WordsOfNonFiniteTablesAreNotBelievedFurtherThanTheyCanBe) {
  EXPECT_TRUE(NonFiniteStatus(3, 0).ok());
  for (const uint64_t word : {uint64_t{1}, uint64_t{0x123456789abcdef}, UINT64_MAX}) {
    const absl::Status status = NonFiniteStatus(3, word);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << word;
    EXPECT_NE(DetailOf(status).field.find("sequence 3: "), std::string::npos) << status;
    EXPECT_EQ(DetailOf(status).value, "NaN or Inf");
  }
}

TEST_F(DeviceWorkTest, TellsOnceTheStreamHasPassedWhatWasSubmitted) {
  int told = 0;
  work_->WhenRun([&] { ++told; });
  EXPECT_EQ(told, 1);  // nothing was
  ASSERT_NO_FATAL_FAILURE(Submit());
  work_->WhenRun([&] { ++told; });
  polls_.Ask();
  EXPECT_EQ(told, 1);
  device_->Run();
  ASSERT_NO_FATAL_FAILURE(Submit());  // what comes later holds nothing up
  polls_.Ask();
  polls_.Ask();
  EXPECT_EQ(told, 2);
  // Never, if the stream closes before.
  work_->WhenRun([&] { ++told; });
  const std::weak_ptr<DeviceWork> alive = work_;
  stream_->Keep(std::move(work_));
  stream_->Close();
  polls_.Ask();
  device_->Run();
  polls_.Ask();
  EXPECT_EQ(told, 2);
  EXPECT_TRUE(gpu_->streams()->Drain(1000));
  EXPECT_TRUE(alive.expired());
}

TEST_F(DeviceWorkTest, ForksAreWrittenWithWhatWasSubmitted) {
  const SequenceId fork = Create();
  EXPECT_TRUE(work_->HasWritten(fork));
  ASSERT_NO_FATAL_FAILURE(Submit());
  work_->NoteFork(fork);
  EXPECT_FALSE(work_->HasWritten(fork));
  EXPECT_TRUE(work_->HasWritten(fork + 1));
  device_->Run();
  EXPECT_TRUE(work_->HasWritten(fork));
  ASSERT_NO_FATAL_FAILURE(Submit());
  work_->NoteFork(fork);
  work_->Forget(fork);  // another sequence may have its name
  EXPECT_TRUE(work_->HasWritten(fork));
  EXPECT_TRUE(work_->CheckSequence(fork, cache_.id).ok());
  store_->Drop(fork);
}

TEST_F(DeviceWorkTest, OneUserLeavesAnotherStreams) {
  std::vector<std::shared_ptr<DeviceStream>> streams;
  while (streams.size() + 1 < DeviceStreams::kUserStreamsMax) {
    streams.push_back(*gpu_->streams()->Open(/*user=*/0));
  }
  const absl::Status refused = gpu_->streams()->Open(/*user=*/0).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(DetailOf(refused).field, absl::StrCat("streams of this user on GPU ", stream_->ordinal()));
  EXPECT_TRUE(gpu_->streams()->Open(/*user=*/1).ok());
  streams.pop_back();
  EXPECT_TRUE(gpu_->streams()->Open(/*user=*/0).ok());
}

// Slots that its plans may name are not given to others while it holds them: it is one holder, until it goes.
TEST_F(DeviceWorkTest, IsAHolderOfPlansUntilItGoes) {
  const auto stream = *gpu_->streams()->Open(/*user=*/0);
  ReleaseCounter counter;
  const auto next = [&] {
    const ReleaseEpochs::HolderId id = *gpu_->epochs()->AddHolder(&counter);
    gpu_->epochs()->RemoveHolder(id);
    return id;
  };
  const ReleaseEpochs::HolderId free = next();
  auto work = *DeviceWork::Create({store_.get(), &polls_, nullptr}, gpu_.get(), stream);
  EXPECT_NE(next(), free);
  work = nullptr;
  EXPECT_EQ(next(), free);
  stream->Close();
}

}  // namespace
}  // namespace kvmanager
