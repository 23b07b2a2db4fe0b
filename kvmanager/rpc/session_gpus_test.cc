// What a connection holds of GPUs: one stream on each, and what it runs there until the stream is closed.
#include "kvmanager/rpc/session_gpus.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "kvmanager/gpu/gpu_testing.h"

namespace kvmanager {
namespace {

class SessionGpusTest : public testing::FakeGpuTest {
 public:
  ~SessionGpusTest() noexcept override {}

 protected:
  void SetUp() override {
    FakeGpuTest::SetUp();
    parts_.work = {store_.get(), &polls_, nullptr};
    parts_.process = {store_.get(), &polls_, &departed_};
    gpus_ = std::make_unique<SessionGpus>(parts_, static_cast<uint32_t>(getpid()));
  }
  void TearDown() override {
    if (stream_ != nullptr) gpus_->CloseStream(stream_.get());
    gpus_ = nullptr;
    departed_.Clear();
    FakeGpuTest::TearDown();
  }
  void OpenStream() {
    stream_ = *gpu_->streams()->Open(/*user=*/0);
    gpus_->SetStream(gpu_.get(), stream_);
  }
  // Neither kind of work may be asked for.
  void ExpectRefused(int ordinal) {
    for (const absl::Status& refused : {gpus_->WorkOf(ordinal).status(), gpus_->ProcessStepsOf(ordinal).status()}) {
      EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
      EXPECT_EQ(DetailOf(refused).field, "device");
      EXPECT_EQ(DetailOf(refused).value, std::to_string(ordinal));
      EXPECT_NE(DetailOf(refused).bound.find("openDevice"), std::string::npos);
    }
    EXPECT_EQ(gpus_->StreamOf(ordinal), nullptr);
    EXPECT_EQ(gpus_->FindProcessSteps(ordinal), nullptr);
  }

  DepartedProcesses departed_{&loop_};
  SessionGpus::Parts parts_;
  std::unique_ptr<SessionGpus> gpus_;
  std::shared_ptr<DeviceStream> stream_;
};

TEST_F(SessionGpusTest, WithoutAStreamThereIsNothing) {
  for (const int ordinal : {0, 1, -1, 1 << 30}) ExpectRefused(ordinal);
  OpenStream();
  EXPECT_EQ(gpus_->StreamOf(0), stream_);
  ExpectRefused(1);
  EXPECT_EQ(gpus_->ArenaOf(1), nullptr);
  gpus_->RemoveArena(1);  // of the host, or of nobody
}

TEST_F(SessionGpusTest, WorkIsMadeWhenItIsFirstAskedFor) {
  OpenStream();
  EXPECT_EQ(gpus_->FindProcessSteps(0), nullptr);
  const auto work = gpus_->WorkOf(0);
  ASSERT_TRUE(work.ok()) << work.status();
  EXPECT_EQ(*gpus_->WorkOf(0), *work);
  EXPECT_EQ((*work)->stream(), stream_);
  EXPECT_EQ(gpus_->FindProcessSteps(0), nullptr);
  const auto process = gpus_->ProcessStepsOf(0);
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(*gpus_->ProcessStepsOf(0), *process);
  EXPECT_EQ(gpus_->FindProcessSteps(0), *process);
}

// Its capability owns the stream.
TEST_F(SessionGpusTest, AStreamThatIsGoneIsNotOpen) {
  OpenStream();
  stream_ = nullptr;
  ExpectRefused(0);
  OpenStream();
  EXPECT_TRUE(gpus_->WorkOf(0).ok());
}

TEST_F(SessionGpusTest, AClosedStreamKeepsWhatItRunsUntilItHasDrained) {
  OpenStream();
  const std::weak_ptr<DeviceWork> work = *gpus_->WorkOf(0);
  const std::shared_ptr<ProcessSteps> process = *gpus_->ProcessStepsOf(0);
  ASSERT_TRUE(stream_->Begin(0).ok());
  ASSERT_TRUE(stream_->End().ok());
  gpus_->CloseStream(stream_.get());
  EXPECT_TRUE(stream_->closed());
  EXPECT_TRUE(process->closed());
  ExpectRefused(0);
  gpus_->CloseStream(stream_.get());  // once more
  EXPECT_FALSE(work.expired());
  EXPECT_FALSE(gpu_->streams()->Drain(0));
  EXPECT_FALSE(work.expired());
  device_->Run();
  EXPECT_TRUE(gpu_->streams()->Drain(1000));
  EXPECT_TRUE(work.expired());
  // Another may be opened there, with work of its own.
  OpenStream();
  EXPECT_TRUE(gpus_->WorkOf(0).ok());
  EXPECT_NE(*gpus_->ProcessStepsOf(0), process);
}

TEST_F(SessionGpusTest, SequencesAreForgottenByAllThatRuns) {
  OpenStream();
  gpus_->Forget(7);  // by nobody
  const std::shared_ptr<DeviceWork> work = *gpus_->WorkOf(0);
  const std::shared_ptr<ProcessSteps> process = *gpus_->ProcessStepsOf(0);
  ASSERT_TRUE(stream_->Begin(0).ok());
  ASSERT_TRUE(stream_->End().ok());
  const AttendEntry entry{7, 0, 1};
  work->NoteFork(7);
  process->Break({&entry, 1}, {}, absl::UnavailableError("made up"));
  EXPECT_FALSE(work->HasWritten(7) || process->CheckSequence(7).ok());
  gpus_->Forget(7);
  EXPECT_TRUE(work->HasWritten(7) && process->CheckSequence(7).ok());
}

}  // namespace
}  // namespace kvmanager
