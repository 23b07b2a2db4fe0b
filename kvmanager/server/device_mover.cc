#include "kvmanager/server/device_mover.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_copy.h"

namespace kvmanager {

using Word = StreamWords::Word;

absl::StatusOr<std::unique_ptr<DeviceMover>> DeviceMover::Create(const Device* device, PollList* polls) {
  std::unique_ptr<DeviceMover> mover(new DeviceMover(device, polls));
  KV_ASSIGN_OR_RETURN(mover->words_, StreamWords::Create());
  KV_RETURN_IF_ERROR(mover->words_->Pin(device));
  KV_ASSIGN_OR_RETURN(mover->stream_, device->NewStream(StreamPriority::kLowest));
  return mover;
}

DeviceMover::~DeviceMover() {
  if (stream_ != nullptr) device_->DestroyStream(stream_);
}

bool DeviceMover::ready() const { return !failed_ && pinner_ != nullptr && pinner_->done() && pinner_->status().ok(); }

absl::Status DeviceMover::status() const {
  if (ready()) return absl::OkStatus();
  const std::string gpu = absl::StrCat("GPU ", device_->info().ordinal);
  if (failed_) return absl::FailedPreconditionError(absl::StrCat(gpu, " has failed: it moves no pages any more"));
  if (pinner_ != nullptr && pinner_->done()) {
    return absl::FailedPreconditionError(
        absl::StrCat(gpu, " moves no pages: the host pool could not be pinned: ", pinner_->status().message()));
  }
  return absl::UnavailableError(absl::StrCat(gpu, " moves no pages yet: the host pool is being pinned"));
}

bool DeviceMover::Quiet() const {
  const auto idle = device_->IsIdle(stream_);
  return !idle.ok() || *idle;
}

absl::Status DeviceMover::Enqueue(PageDirection direction, absl::Span<const PageCopy> copies) {
  if (failed_) return absl::UnavailableError("the GPU has failed");
  KV_RETURN_IF_ERROR(device_->Use());
  KV_RETURN_IF_ERROR(EnqueuePageCopies(direction, copies, stream_));
  return device_->EnqueueWrite(stream_, words_->Address(Word::kDone), last_ + 1);
}

void DeviceMover::Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) {
  const absl::Status status = Enqueue(direction, copies);
  if (!status.ok()) {
    failed_ = true;
    spdlog::error("GPU {} moves no more pages: {}", device_->info().ordinal, std::string(status.message()));
  }
  waiting_.push_back({status.ok() ? ++last_ : 0, std::move(done)});
  if (polling_) return;
  polling_ = true;
  polls_->Add([this] { return Poll(); });
}

bool DeviceMover::Poll() {
  if (!failed_ && words_->Load(Word::kDone) < last_) {
    if (const auto idle = device_->IsIdle(stream_); !idle.ok()) {
      failed_ = true;
      spdlog::error("GPU {} moves no more pages: {}", device_->info().ordinal, std::string(idle.status().message()));
    }
  }
  // What failed may have begun: nobody is told before it has ended.
  const bool over = failed_ && Quiet();
  const uint64_t done = words_->Load(Word::kDone);
  while (!waiting_.empty()) {
    Waiting& first = waiting_.front();
    const bool moved = first.number != 0 && first.number <= done;
    if (!moved && !over) break;
    absl::AnyInvocable<void(bool)> tell = std::move(first.done);
    waiting_.pop_front();
    tell(moved);  // may move more
  }
  polling_ = !waiting_.empty();
  return !polling_;
}

bool DeviceMover::Drain(int64_t deadline_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  while (!Quiet()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace kvmanager
