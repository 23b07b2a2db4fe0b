#include "client/block_load.h"

#include <algorithm>
#include <utility>

#include "client/connection.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {
namespace {

constexpr size_t kAsked = 2;  // calls that are ahead of what is copied

}  // namespace

absl::Status BlockLoad::Run() {
  absl::Status status = RunOn();
  asked_.clear();
  if (!status.ok() || !copying_.empty()) work_.Drain();  // of no use, but memory is read and written
  copying_.clear();
  released_.clear();
  return status;
}

absl::Status BlockLoad::RunOn() {
  while (true) {
    // The first call is answered sooner alone; those behind it are asked while its blocks are copied.
    const size_t ahead = copies_ == 0 ? 1 : kAsked;
    if (!ended_ && next_ < options_.count && asked_.size() < ahead) {
      Ask();
    } else if (!ended_ && !asked_.empty() && copying_.size() < options_.calls) {
      KV_RETURN_IF_ERROR(TakeMapped());
    } else if (!copying_.empty() && reason_ != Miss::kChecksum) {  // what comes behind a corrupt block is of no use
      KV_RETURN_IF_ERROR(TakeCopied());
    } else if (!released_.empty()) {
      KV_RETURN_IF_ERROR(TakeReleased());
    } else {
      return absl::OkStatus();
    }
  }
}

void BlockLoad::Ask() {
  size_ = size_ == 0 ? options_.first_blocks : 2 * size_;
  size_ = std::min(size_, options_.call_blocks);
  const uint32_t count = std::min(size_, options_.count - next_);
  asked_.push_back({next_, count, work_.Map(next_, count)});
  next_ += count;
}

absl::Status BlockLoad::TakeMapped() {
  const auto [at, count] = std::pair(asked_.front().at, asked_.front().count);
  auto mapped = asked_.front().call.Wait();
  asked_.pop_front();
  KV_RETURN_IF_ERROR(mapped.status());
  if (mapped->blocks < count) {
    ended_ = true;
    reason_ = mapped->reason;
  }
  if (mapped->blocks == 0) return absl::OkStatus();
  copying_.push_back({*std::move(mapped), copies_++ % options_.calls});
  return work_.Copy(copying_.back().mapped, at, copying_.back().place);
}

absl::Status BlockLoad::TakeCopied() {
  KV_ASSIGN_OR_RETURN(const bool copied, work_.Copied());
  if (!copied) {
    work_.Rest();
    return absl::OkStatus();
  }
  auto [mapped, place] = std::move(copying_.front());
  copying_.pop_front();
  const std::optional<uint32_t> corrupt = work_.Corrupt(mapped, place);
  if (corrupt.has_value()) {
    ended_ = true;
    reason_ = Miss::kChecksum;
  }
  Pending<absl::Status> call =
      mapped.lease == nullptr ? Ready<absl::Status>(absl::OkStatus()) : mapped.lease->ReleaseAsync(corrupt);
  released_.push_back({corrupt.value_or(mapped.blocks), std::move(mapped), std::move(call)});
  return released_.size() > options_.calls ? TakeReleased() : absl::OkStatus();
}

absl::Status BlockLoad::TakeReleased() {
  KV_RETURN_IF_ERROR(released_.front().call.Wait());
  blocks_ += released_.front().blocks;
  released_.pop_front();
  return absl::OkStatus();
}

}  // namespace kvmanager::client
