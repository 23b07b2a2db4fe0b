#include "kvmanager/gpu/device_mover.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_copy_runs.h"

namespace kvmanager {

DeviceMover::DeviceMover(const Device* device, std::unique_ptr<NumberedStream> stream, PollList* polls,
                         PageCopyMethod method)
    : device_(device),
      method_(method),
      progress_(std::move(stream), polls, absl::StrCat("GPU ", device->info().ordinal, " moves no more pages")) {}

absl::StatusOr<std::unique_ptr<DeviceMover>> DeviceMover::Create(const Device* device, PollList* polls,
                                                                 PageCopyMethod method) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<NumberedStream> stream, NumberedStream::Create(device));
  return std::unique_ptr<DeviceMover>(new DeviceMover(device, std::move(stream), polls, method));
}

bool DeviceMover::ready() const {
  return !progress_.failed() && pinner_ != nullptr && pinner_->done() && pinner_->status().ok();
}

absl::Status DeviceMover::status() const {
  if (ready()) return absl::OkStatus();
  const std::string gpu = absl::StrCat("GPU ", device_->info().ordinal);
  if (progress_.failed())
    return absl::FailedPreconditionError(absl::StrCat(gpu, " has failed: it moves no pages any more"));
  if (pinner_ != nullptr && pinner_->done()) {
    return absl::FailedPreconditionError(
        absl::StrCat(gpu, " moves no pages: the host pool could not be pinned: ", pinner_->status().message()));
  }
  return absl::UnavailableError(absl::StrCat(gpu, " moves no pages yet: the host pool is being pinned"));
}

void DeviceMover::Move(PageDirection direction, std::vector<PageCopy> copies, absl::AnyInvocable<void(bool)> done) {
  if (method_ == PageCopyMethod::kBatch) {
    copies = JoinNeighbours(std::move(copies), [&](const uint8_t* host) { return pinner_->EndOfSpan(host); });
  }
  progress_.Post([&](CUstream_st* stream) { return EnqueuePageCopies(direction, copies, stream, method_); },
                 std::move(done));
}

}  // namespace kvmanager
