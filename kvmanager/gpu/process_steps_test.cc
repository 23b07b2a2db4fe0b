// Steps of an engine's own kernels: what a plan tells it, what its words are believed for, and how its process ends.
#include "kvmanager/gpu/process_steps.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <functional>

#include "kvmanager/gpu/gpu_testing.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::NoDeviceCodec;

using Word = SharedSemaphores::Word;

class ProcessStepsTest : public testing::FakeGpuTest {
 public:
  ~ProcessStepsTest() noexcept override {}

 protected:
  void SetUp() override {
    FakeGpuTest::SetUp();
    child_ = fork();
    if (child_ == 0) {
      for (;;) pause();
    }
    ASSERT_GT(child_, 0);
    words_ = *SharedSemaphores::Create();
    steps_ = *ProcessSteps::Create(parts(), gpu_.get(), words_, static_cast<uint32_t>(child_));
  }
  void TearDown() override {
    EndProcess();
    steps_ = nullptr;
    departed_.Clear();
    FakeGpuTest::TearDown();
  }
  ProcessSteps::Parts parts() { return {store_.get(), &polls_, &departed_}; }
  void EndProcess() {
    if (child_ <= 0) return;
    kill(child_, SIGKILL);
    ASSERT_EQ(waitpid(child_, nullptr, 0), child_);
    child_ = 0;
  }
  // What was appended last, by one entry whose word in the non-finite table is `word`.
  ProcessSteps::Plan Plan(const AttendEntry& entry, uint32_t word = 0, bool encode_here = true) {
    std::vector<DeviceEncodeJob> jobs = steps_->TakeJobs();
    auto plan = steps_->MakePlan(cache_, {&entry, 1}, {&word, 1}, encode_here, &jobs);
    EXPECT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(jobs.empty());
    return *std::move(plan);
  }
  // Some pages to be encoded; who is told adds whether each was declined.
  std::vector<DeviceEncodeJob> Job(uint64_t first_token, size_t pages) {
    DeviceEncodeJob job;
    for (size_t i = 0; i < pages; ++i) {
      EncodeItem item;
      item.raw = gpu_->pool()->data() + i * 8192;
      item.encoded = gpu_->pool()->data() + 4096 + i * 8192;
      item.first_token = first_token + i * kPage;
      job.items.push_back(item);
    }
    job.done = [this](absl::Span<const EncodeItem> items) {
      for (const EncodeItem& item : items) declined_.push_back(item.declined);
    };
    std::vector<DeviceEncodeJob> jobs;
    jobs.push_back(std::move(job));
    return jobs;
  }
  ProcessSteps::Plan PlanJob(uint64_t first_token, size_t pages) {
    std::vector<DeviceEncodeJob> jobs = Job(first_token, pages);
    return *steps_->MakePlan(cache_, {}, {}, true, &jobs);
  }

  pid_t child_ = 0;
  std::shared_ptr<SharedSemaphores> words_;
  DepartedProcesses departed_{&loop_};
  std::shared_ptr<ProcessSteps> steps_;
  std::vector<bool> declined_;
};

TEST_F(ProcessStepsTest, AProcessThatCannotBeWatchedHasNone) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  for (const uint32_t pid : {uint32_t{0}, static_cast<uint32_t>(gone)}) {
    const auto made = ProcessSteps::Create(parts(), gpu_.get(), *SharedSemaphores::Create(), pid);
    EXPECT_TRUE(absl::IsFailedPrecondition(made.status())) << made.status();
    EXPECT_NE(made.status().message().find("step"), absl::string_view::npos);  // what to do instead
  }
}

TEST_F(ProcessStepsTest, PlansTellTheSlotsThatChanged) {
  const SequenceId sequence = Create();
  const ProcessSteps::Plan first = Plan(Append(sequence, 0, 2 * kPage + 3));
  EXPECT_EQ(first.epoch, steps_->epoch());
  size_t pages = 0;
  for (size_t at = 0; at < first.changes.size(); ++pages) {
    EXPECT_EQ(first.changes[at], 0u);         // the entry
    EXPECT_EQ(first.changes[at + 1], pages);  // the page
    EXPECT_EQ(first.changes[at + 2], 0u);     // both layers, in one run
    ASSERT_EQ(first.changes[at + 3], 2u);
    for (const size_t layer : {size_t{0}, size_t{1}}) {
      EXPECT_LT(first.changes[at + 4 + 2 * layer], gpu_->pool()->capacity_bytes() / DevicePool::kSlotUnitBytes);
    }
    at += 8;
  }
  EXPECT_EQ(pages, 3u);
  const ProcessSteps::Plan second = Plan(Append(sequence, 2 * kPage + 3, 1));
  EXPECT_GT(second.epoch, first.epoch);
  EXPECT_TRUE(second.changes.empty());
  EXPECT_FALSE(steps_->HasReleased(first.epoch) || steps_->HasWritten(sequence));
  words_->Store(Word::kReleased, first.epoch);
  EXPECT_TRUE(steps_->HasReleased(first.epoch));
  EXPECT_FALSE(steps_->HasReleased(second.epoch) || steps_->HasWritten(sequence));
  words_->Store(Word::kReleased, second.epoch);
  EXPECT_TRUE(steps_->HasReleased(second.epoch) && steps_->HasWritten(sequence));
  words_->Store(Word::kEncoded, UINT64_MAX);
  polls_.Ask();
  store_->Drop(sequence);
}

TEST_F(ProcessStepsTest, PagesAreEncodedAsTheWordAndTheFlagsSay) {
  const ProcessSteps::Plan first = PlanJob(0, 3), second = PlanJob(160, 2);
  EXPECT_EQ(first.encode_items.size(), 3u * 6);
  EXPECT_EQ(first.encode_items[6 + 1], 8192u / DevicePool::kSlotUnitBytes);
  EXPECT_EQ(first.encode_items[6 + 4], uint32_t{kPage});
  EXPECT_GT(second.encode_batch, first.encode_batch);
  words_->declined()[first.encode_at + 1] = 7;
  words_->declined()[second.encode_at] = 1;
  polls_.Ask();
  EXPECT_TRUE(declined_.empty());
  words_->Store(Word::kEncoded, first.encode_batch);
  polls_.Ask();
  // A sink stays raw, whatever the client says.
  EXPECT_EQ(declined_, (std::vector<bool>{true, true, false}));
  words_->Store(Word::kEncoded, second.encode_batch);
  polls_.Ask();
  EXPECT_EQ(declined_, (std::vector<bool>{true, true, false, true, false}));
}

TEST_F(ProcessStepsTest, WaitsForWhatIsReservedPlannedReleasedAndEncoded) {
  const SequenceId sequence = Create();
  const AttendEntry entry{sequence, 0, 5};
  int told = 0;
  steps_->ReserveTokens({&entry, 1});
  EXPECT_EQ(steps_->planned_to(sequence), 0u);
  steps_->WhenRun(sequence, [&] { ++told; });
  const auto told_after_asking = [&] {
    polls_.Ask();
    return told;
  };
  EXPECT_EQ(told_after_asking(), 0);
  EXPECT_FALSE(steps_->HasWritten(sequence));
  const ProcessSteps::Plan plan = Plan(Append(sequence, 0, 5));
  const ProcessSteps::Plan encodes = PlanJob(160, 1);
  EXPECT_EQ(told_after_asking(), 0);
  steps_->ReleaseTokens({&entry, 1});
  EXPECT_EQ(steps_->planned_to(sequence), UINT64_MAX);
  EXPECT_EQ(told_after_asking(), 0);
  words_->Store(Word::kReleased, plan.epoch);
  EXPECT_EQ(told_after_asking(), 0);
  words_->Store(Word::kReleased, encodes.epoch);
  EXPECT_EQ(told_after_asking(), 0);
  words_->Store(Word::kEncoded, encodes.encode_batch);
  told_after_asking();  // the batch ends
  EXPECT_EQ(told_after_asking(), 1);
  EXPECT_EQ(told_after_asking(), 1);
  steps_->WhenRun(sequence, [&] { ++told; });
  EXPECT_EQ(told, 2);
  // Never, once the connection has ended.
  Plan(Append(sequence, 5, 1));
  steps_->WhenRun(sequence, [&] { ++told; });
  steps_->Close();
  words_->Store(Word::kReleased, steps_->epoch());
  EXPECT_EQ(told_after_asking(), 2);
  std::vector<DeviceEncodeJob> none;
  EXPECT_TRUE(absl::IsUnavailable(steps_->MakePlan(cache_, {}, {}, true, &none).status()));
  store_->Drop(sequence);
}

TEST_F(ProcessStepsTest, KeepsWhatKernelsMayTouchUntilTheProcessIsGone) {
  const SequenceId sequence = Create();
  Plan(Append(sequence, 0, 3));
  PlanJob(160, 2);
  const auto fd = steps_->MapSlab(cache_.id, 0);
  ASSERT_TRUE(fd.ok()) << fd.status();
  close(*fd);
  EXPECT_EQ(gpu_->pool()->importers(0), 1u);
  steps_->Close();
  steps_->Close();
  const std::weak_ptr<ProcessSteps> alive = steps_;
  steps_ = nullptr;
  store_->Drop(sequence);
  loop_.RunReady();
  store_->tables().CollectReleased();
  EXPECT_FALSE(alive.expired());
  EXPECT_GT(gpu_->pool()->slot_bytes_used(), 0u);
  EXPECT_EQ(gpu_->pool()->importers(0), 1u);
  EXPECT_TRUE(declined_.empty());
  EndProcess();
  loop_.Run([&] { return alive.expired(); });
  EXPECT_EQ(gpu_->pool()->importers(0), 0u);
  EXPECT_EQ(declined_, (std::vector<bool>{true, true}));
  store_->tables().CollectReleased();
  EXPECT_EQ(gpu_->pool()->slot_bytes_used(), 0u);
}

TEST_F(ProcessStepsTest, SlabsAreMappedOnceByTheirTenant) {
  const auto field_of = [&](CacheId cache, uint32_t slab) { return DetailOf(steps_->MapSlab(cache, slab).status()); };
  EXPECT_EQ(field_of(cache_.id, 0).field, "slab");  // it has no page yet
  const SequenceId sequence = Create();
  Plan(Append(sequence, 0, 3));
  CacheConfig others = config_;
  others.tenant = "b";
  const CacheId other = *store_->caches().Open(others);
  for (const uint32_t slab : {uint32_t{0}, uint32_t{99}, UINT32_MAX}) {
    EXPECT_TRUE(absl::IsNotFound(steps_->MapSlab(other, slab).status())) << slab;
    EXPECT_EQ(field_of(other, slab).value, std::to_string(slab));
  }
  const auto fd = steps_->MapSlab(cache_.id, 0);
  ASSERT_TRUE(fd.ok()) << fd.status();
  close(*fd);
  EXPECT_TRUE(absl::IsFailedPrecondition(steps_->MapSlab(cache_.id, 0).status()));
  EXPECT_EQ(gpu_->pool()->importers(0), 1u);
  store_->Drop(sequence);
}

TEST_F(ProcessStepsTest, PlansHaveBounds) {
  EXPECT_TRUE(steps_->CheckRoom(ProcessSteps::kPlanPagesMax, 0).ok());
  EXPECT_EQ(DetailOf(steps_->CheckRoom(ProcessSteps::kPlanPagesMax + 1, 0)).field, "tokens of all entries");
  EXPECT_TRUE(absl::IsInvalidArgument(steps_->CheckRoom(ProcessSteps::kPlanPagesMax + 1, 0)));
  EXPECT_EQ(DetailOf(steps_->CheckRoom(1, ProcessSteps::kChangesWordsMax)).field, "entries");
  steps_->ReserveFlags(SharedSemaphores::kDeclinedWords / 2);
  EXPECT_EQ(DetailOf(steps_->CheckRoom(1, 0)).field, "pages that this process has yet to encode");
  EXPECT_TRUE(absl::IsResourceExhausted(steps_->CheckRoom(1, 0)));
  steps_->ReleaseFlags(SharedSemaphores::kDeclinedWords / 2);
  std::vector<DeviceEncodeJob> none;
  for (uint32_t i = 0; i < ReleaseEpochs::kOpenPlansMax; ++i) {
    ASSERT_TRUE(steps_->MakePlan(cache_, {}, {}, true, &none).ok()) << i;
  }
  const absl::Status full = steps_->CheckRoom(0, 0);
  EXPECT_TRUE(absl::IsResourceExhausted(full));
  EXPECT_EQ(DetailOf(full).field, "plans that this process has not released");
  std::vector<DeviceEncodeJob> jobs = Job(160, 1);
  EXPECT_TRUE(absl::IsResourceExhausted(steps_->MakePlan(cache_, {}, {}, true, &jobs).status()));
  EXPECT_EQ(jobs.size(), 1u);  // the caller's
}

TEST_F(ProcessStepsTest, WhatIsNotFiniteOrBrokenCanOnlyBeDropped) {
  const SequenceId sequence = Create();
  words_->non_finite()[9] = UINT64_MAX;  // of whoever had it before
  const ProcessSteps::Plan plan = Plan(Append(sequence, 0, 3), 9);
  EXPECT_TRUE(steps_->CheckSequence(sequence).ok());
  words_->Store(Word::kReleased, plan.epoch);
  EXPECT_TRUE(absl::IsInvalidArgument(steps_->CheckSequence(sequence)));
  words_->non_finite()[9] = 0;
  EXPECT_TRUE(steps_->CheckSequence(sequence).ok());
  const AttendEntry entry{sequence, 3, 1};
  steps_->Break({&entry, 1}, Job(160, 2), absl::UnavailableError("made up"));
  EXPECT_EQ(declined_, (std::vector<bool>{true, true}));
  const absl::Status broken = steps_->CheckSequence(sequence);
  EXPECT_TRUE(absl::IsFailedPrecondition(broken));
  EXPECT_NE(broken.message().find("made up"), absl::string_view::npos);
  steps_->Forget(sequence);
  EXPECT_TRUE(steps_->CheckSequence(sequence).ok());
  EXPECT_TRUE(steps_->HasWritten(sequence));
  store_->Drop(sequence);
}

}  // namespace
}  // namespace kvmanager
