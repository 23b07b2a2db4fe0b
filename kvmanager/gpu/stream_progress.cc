#include "kvmanager/gpu/stream_progress.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <thread>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/shared_semaphores.h"

namespace kvmanager {
namespace {

using Word = SharedSemaphores::Word;

class DeviceNumberedStream final : public NumberedStream {
 public:
  explicit DeviceNumberedStream(const Device* device) : device_(device) {}
  ~DeviceNumberedStream() override {
    if (stream_ != nullptr) device_->DestroyStream(stream_);
  }

  absl::Status Open() {
    KV_ASSIGN_OR_RETURN(words_, SharedSemaphores::Create());
    KV_RETURN_IF_ERROR(words_->Pin(device_));
    KV_ASSIGN_OR_RETURN(stream_, device_->NewStream(StreamPriority::kLowest));
    return absl::OkStatus();
  }

  absl::Status Enqueue(absl::FunctionRef<absl::Status(CUstream_st*)> enqueue, uint64_t number) override {
    KV_RETURN_IF_ERROR(device_->Use());
    KV_RETURN_IF_ERROR(enqueue(stream_));
    return device_->EnqueueWrite(stream_, words_->Address(Word::kDone), number);
  }
  uint64_t passed() const override { return words_->Load(Word::kDone); }
  absl::StatusOr<bool> IsIdle() const override { return device_->IsIdle(stream_); }

 private:
  const Device* const device_;
  std::unique_ptr<SharedSemaphores> words_;  // this process's alone: `done`
  CUstream_st* stream_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NumberedStream>> NumberedStream::Create(const Device* device) {
  auto stream = std::make_unique<DeviceNumberedStream>(device);
  KV_RETURN_IF_ERROR(stream->Open());
  return stream;
}

void StreamProgress::Fail(const absl::Status& why) {
  failed_ = true;
  spdlog::error("{}: {}", failure_, std::string(why.message()));
}

bool StreamProgress::Quiet() const {
  const auto idle = stream_->IsIdle();
  return !idle.ok() || *idle;
}

void StreamProgress::Post(absl::FunctionRef<absl::Status(CUstream_st*)> enqueue, absl::AnyInvocable<void(bool)> done) {
  const absl::Status status =
      failed_ ? absl::UnavailableError("the GPU has failed") : stream_->Enqueue(enqueue, last_ + 1);
  if (!status.ok()) Fail(status);
  waiting_.push_back({status.ok() ? ++last_ : 0, std::move(done)});
  if (!std::exchange(polling_, true)) polls_->Add([this] { return Poll(); });
}

bool StreamProgress::Poll() {
  if (!failed_ && stream_->passed() < last_) {
    if (const auto idle = stream_->IsIdle(); !idle.ok()) Fail(idle.status());
  }
  // What failed may have begun: nobody is told before it has ended.
  const bool over = failed_ && Quiet();
  const uint64_t passed = stream_->passed();
  while (!waiting_.empty()) {
    const uint64_t number = waiting_.front().number;
    const bool done = number != 0 && number <= passed;
    if (!done && !over) break;
    Waiting first = std::move(waiting_.front());
    waiting_.pop_front();
    first.done(done);  // may post more
  }
  polling_ = !waiting_.empty();
  return !polling_;
}

bool StreamProgress::Drain(int64_t deadline_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  while (!Quiet()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace kvmanager
