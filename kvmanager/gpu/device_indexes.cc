#include "kvmanager/gpu/device_indexes.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "codecs/device/device_selection.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_copy.h"

namespace kvmanager {
namespace {

using Word = SharedSemaphores::Word;

constexpr size_t kImageAlign = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceIndexes>> DeviceIndexes::Create(const Device* device, DeviceStreams* streams,
                                                                     PollList* polls) {
  std::unique_ptr<DeviceIndexes> indexes(new DeviceIndexes(device, streams, polls));
  KV_ASSIGN_OR_RETURN(indexes->words_, SharedSemaphores::Create());
  KV_RETURN_IF_ERROR(indexes->words_->Pin(device));
  KV_ASSIGN_OR_RETURN(indexes->stream_, device->NewStream(StreamPriority::kLowest));
  return indexes;
}

DeviceIndexes::~DeviceIndexes() {
  if (stream_ != nullptr) device_->DestroyStream(stream_);
}

void DeviceIndexes::Post(std::shared_ptr<const DeviceCodec> codec, DeviceIndexJob job) {
  waiting_.push_back({std::move(codec), std::move(job)});
  if (!busy_) Next();
}

void DeviceIndexes::Next() {
  busy_ = !waiting_.empty();
  if (!busy_) return;
  const DeviceIndexJob& job = waiting_.front().job;
  keys_.resize(job.pages.size() * job.key_bytes);
  pages_.clear();
  for (size_t i = 0; i < job.pages.size(); ++i) pages_.push_back(keys_.data() + i * job.key_bytes);
  copied_ = 0;
  CopyKeys();
}

// The old memory goes when no stream has work.
absl::Status DeviceIndexes::EnsureStaging(size_t bytes) {
  bytes = std::max(bytes, kStagingBytes);
  if (staging_ != nullptr && staging_->bytes() >= bytes) return absl::OkStatus();
  KV_ASSIGN_OR_RETURN(std::unique_ptr<PinnedRegion> made, PinnedRegion::Make(device_, bytes));
  if (staging_ != nullptr) streams_->Retire(std::shared_ptr<const PinnedRegion>(std::move(staging_)));
  staging_ = std::move(made);
  return absl::OkStatus();
}

void DeviceIndexes::WhenPassed(absl::Status status, absl::AnyInvocable<void()> then) {
  if (status.ok()) {
    status = device_->EnqueueWrite(stream_, words_->Address(Word::kDone), ++last_);
  }
  if (!status.ok()) {
    // The GPU has failed, or the host has no memory to pin. What was enqueued may still touch the job's bytes.
    spdlog::error("GPU {} could not train an index: {}", device_->info().ordinal, std::string(status.message()));
    polls_->Add([this, status = std::move(status)]() mutable {
      const auto idle = device_->IsIdle(stream_);
      if (idle.ok() && !*idle) return false;
      End(std::move(status));
      return true;
    });
    return;
  }
  polls_->Add([this, number = last_, then = std::move(then)]() mutable {
    if (words_->Load(Word::kDone) < number) return false;
    then();
    return true;
  });
}

void DeviceIndexes::CopyKeys() {
  const DeviceIndexJob& job = waiting_.front().job;
  if (copied_ == job.pages.size()) return Train();
  absl::Status status = device_->Use();
  status.Update(EnsureStaging(job.key_bytes));
  size_t count = 0;
  if (status.ok()) {
    std::vector<PageCopy> copies;
    count = std::min(job.pages.size() - copied_, staging_->bytes() / job.key_bytes);
    for (size_t i = 0; i < count; ++i) {
      copies.push_back({const_cast<uint8_t*>(job.pages[copied_ + i]), staging_->data() + i * job.key_bytes,
                        static_cast<uint32_t>(job.key_bytes)});
    }
    status = EnqueuePageCopies(PageDirection::kDemote, copies, stream_);
  }
  WhenPassed(std::move(status), [this, count] { KeepKeys(count); });
}

void DeviceIndexes::KeepKeys(size_t count) {
  const uint64_t key_bytes = waiting_.front().job.key_bytes;
  std::vector<absl::AnyInvocable<void()>> task;
  task.push_back([to = keys_.data() + copied_ * key_bytes, from = staging_->data(), bytes = count * key_bytes] {
    std::memcpy(to, from, bytes);
  });
  workers_->Run(std::move(task), [this, count] {
    copied_ += count;
    CopyKeys();
  });
}

void DeviceIndexes::Train() {
  IndexJob* const job = waiting_.front().job.job.get();  // kept until it ends
  std::vector<absl::AnyInvocable<void()>> tasks;
  tasks.reserve(job->tasks());
  for (int task = 0; task < job->tasks(); ++task) tasks.push_back([this, job, task] { job->RunTask(task, pages_); });
  workers_->Run(std::move(tasks), [this] { PutImage(); });
}

// The image, and behind it the address that PrepareIndexes reads.
void DeviceIndexes::PutImage() {
  const Waiting& now = waiting_.front();
  const size_t bytes = now.job.job->image_bytes();
  const size_t address_at = (bytes + kImageAlign - 1) / kImageAlign * kImageAlign;
  absl::Status status = device_->Use();
  status.Update(EnsureStaging(address_at + sizeof(uint8_t*)));
  if (status.ok()) {
    now.job.job->WriteImage(staging_->data());
    auto* const address = reinterpret_cast<uint8_t**>(staging_->data() + address_at);
    *address = now.job.image;
    const PageCopy copy{now.job.image, staging_->data(), static_cast<uint32_t>(bytes)};
    status = EnqueuePageCopies(PageDirection::kFetch, {&copy, 1}, stream_);
    if (status.ok()) {
      status = CudaStatus(now.codec->selection()->LaunchPrepareIndexes(address, 1, stream_), "completing an index");
    }
  }
  WhenPassed(std::move(status), [this] { End(absl::OkStatus()); });
}

void DeviceIndexes::End(absl::Status status) {
  Waiting ended = std::move(waiting_.front());
  waiting_.pop_front();
  ended.job.done(std::move(status));
  Next();
}

bool DeviceIndexes::Drain(int64_t deadline_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  for (;;) {
    const auto idle = device_->IsIdle(stream_);
    if (!idle.ok() || *idle) return true;
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace kvmanager
