#include "kvmanager/gpu/device_reads.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_copy.h"

namespace kvmanager {

DeviceReads::DeviceReads(const Device* device, std::unique_ptr<NumberedStream> stream,
                         std::unique_ptr<PinnedRegion> staging, PollList* polls)
    : staging_(std::move(staging)),
      progress_(std::move(stream), polls, absl::StrCat("GPU ", device->info().ordinal, " is read no more")) {}

absl::StatusOr<std::unique_ptr<DeviceReads>> DeviceReads::Create(const Device* device, PollList* polls) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<PinnedRegion> staging, PinnedRegion::Make(device, kStagingBytes));
  KV_ASSIGN_OR_RETURN(std::unique_ptr<NumberedStream> stream, NumberedStream::Create(device));
  return std::unique_ptr<DeviceReads>(new DeviceReads(device, std::move(stream), std::move(staging), polls));
}

bool DeviceReads::Read(absl::Span<const absl::Span<const uint8_t>> ranges, Then then) {
  uint64_t bytes = 0;
  for (const absl::Span<const uint8_t> range : ranges) bytes += Aligned(range.size());
  if (bytes == 0 || !MayRead(bytes)) return false;
  const std::optional<uint32_t> at = ring_.Take(static_cast<uint32_t>(bytes / kUnitBytes));
  if (!at.has_value()) return false;
  const uint64_t piece = first_piece_ + given_back_.size();
  given_back_.push_back(false);
  uint8_t* to = staging_->data() + uint64_t{*at} * kUnitBytes;
  // Shared with whoever looks at the bytes.
  std::shared_ptr<const uint8_t> staged(to, [this, piece](const uint8_t*) { GiveBack(piece); });
  std::vector<PageCopy> copies;
  for (const absl::Span<const uint8_t> range : ranges) {
    copies.push_back({const_cast<uint8_t*>(range.data()), to, static_cast<uint32_t>(range.size())});
    to += Aligned(range.size());
  }
  progress_.Post(
      // Nobody waits for these: by the copy engines, since kernels hardly notice those.
      [&](CUstream_st* stream) {
        return EnqueuePageCopies(PageDirection::kDemote, copies, stream, PageCopyMethod::kBatch);
      },
      [staged = std::move(staged), then = std::move(then)](bool read) mutable {
        then(read ? std::move(staged) : nullptr);
      });
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

}  // namespace kvmanager
