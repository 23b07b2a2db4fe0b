#include "kvmanager/server/device_reads.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_copy.h"

namespace kvmanager {

using Word = StreamWords::Word;

absl::StatusOr<std::unique_ptr<DeviceReads>> DeviceReads::Create(const Device* device, PollList* polls) {
  std::unique_ptr<DeviceReads> reads(new DeviceReads(device, polls));
  KV_ASSIGN_OR_RETURN(reads->words_, StreamWords::Create());
  KV_RETURN_IF_ERROR(reads->words_->Pin(device));
  KV_ASSIGN_OR_RETURN(reads->staging_, PinnedRegion::Make(device, kStagingBytes));
  KV_ASSIGN_OR_RETURN(reads->stream_, device->NewStream(StreamPriority::kLowest));
  return reads;
}

DeviceReads::~DeviceReads() {
  if (stream_ != nullptr) device_->DestroyStream(stream_);
}

bool DeviceReads::Quiet() const {
  const auto idle = device_->IsIdle(stream_);
  return !idle.ok() || *idle;
}

absl::Status DeviceReads::Enqueue(absl::Span<const absl::Span<const uint8_t>> ranges, uint8_t* to) {
  std::vector<PageCopy> copies;
  for (const absl::Span<const uint8_t> range : ranges) {
    copies.push_back({const_cast<uint8_t*>(range.data()), to, static_cast<uint32_t>(range.size())});
    to += Aligned(range.size());
  }
  KV_RETURN_IF_ERROR(device_->Use());
  // Nobody waits for these: by the copy engines, since kernels hardly notice those.
  KV_RETURN_IF_ERROR(EnqueuePageCopies(PageDirection::kDemote, copies, stream_, PageCopyMethod::kBatch));
  return device_->EnqueueWrite(stream_, words_->Address(Word::kDone), last_ + 1);
}

bool DeviceReads::Read(absl::Span<const absl::Span<const uint8_t>> ranges, Then then) {
  uint64_t bytes = 0;
  for (const absl::Span<const uint8_t> range : ranges) bytes += Aligned(range.size());
  if (bytes == 0 || !MayRead(bytes)) return false;
  const std::optional<uint32_t> at = ring_.Take(static_cast<uint32_t>(bytes / kUnitBytes));
  if (!at.has_value()) return false;
  const uint64_t piece = first_piece_ + given_back_.size();
  given_back_.push_back(false);
  uint8_t* const to = staging_->data() + uint64_t{*at} * kUnitBytes;
  // Shared with whoever looks at the bytes.
  std::shared_ptr<const uint8_t> staged(to, [this, piece](const uint8_t*) { GiveBack(piece); });
  const absl::Status status = Enqueue(ranges, to);
  if (!status.ok()) {
    failed_ = true;
    spdlog::error("GPU {} is read no more: {}", device_->info().ordinal, std::string(status.message()));
  }
  waiting_.push_back({status.ok() ? ++last_ : 0, std::move(staged), std::move(then)});
  if (!std::exchange(polling_, true)) polls_->Add([this] { return Poll(); });
  return true;
}

// Pieces are given back in any order, and the ring takes them from its oldest on.
void DeviceReads::GiveBack(uint64_t piece) {
  given_back_[piece - first_piece_] = true;
  while (!given_back_.empty() && given_back_.front()) {
    given_back_.pop_front();
    ++first_piece_;
    ring_.Release();
  }
}

bool DeviceReads::Poll() {
  if (!failed_ && words_->Load(Word::kDone) < last_) {
    if (const auto idle = device_->IsIdle(stream_); !idle.ok()) {
      failed_ = true;
      spdlog::error("GPU {} is read no more: {}", device_->info().ordinal, std::string(idle.status().message()));
    }
  }
  // What failed may have begun: nobody is told before it has ended.
  const bool over = failed_ && Quiet();
  const uint64_t done = words_->Load(Word::kDone);
  while (!waiting_.empty()) {
    const uint64_t number = waiting_.front().number;
    const bool read = number != 0 && number <= done;
    if (!read && !over) break;
    Waiting first = std::move(waiting_.front());
    waiting_.pop_front();
    first.then(read ? std::move(first.bytes) : nullptr);  // may read more
  }
  polling_ = !waiting_.empty();
  return !polling_;
}

bool DeviceReads::Drain(int64_t deadline_ms) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(deadline_ms);
  while (!Quiet()) {
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace kvmanager
