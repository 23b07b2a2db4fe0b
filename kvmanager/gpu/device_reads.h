// Copies pages of a GPU to the host, where they are read: pages that the quality monitor samples, or that a client
// reads back.
//
// Copies go by a stream of their own, behind attention, into pinned memory of kStagingBytes that is taken when this is
// made. The loop's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/piece_ring.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/stream_progress.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_reader.h"
#include "kvmanager/memory/pinned_region.h"

namespace kvmanager {

class DeviceReads final : public DeviceReader {
 public:
  static constexpr uint32_t kStagingBytes = 16 << 20;  // of what is on its way or looked at, all together

  /// Everything given outlives it. It goes when nothing is on its way (Drain), and nobody has bytes.
  static absl::StatusOr<std::unique_ptr<DeviceReads>> Create(const Device* device, PollList* polls);
  DeviceReads(const DeviceReads&) = delete;
  DeviceReads& operator=(const DeviceReads&) = delete;

  bool Read(absl::Span<const absl::Span<const uint8_t>> ranges, Then then) override;
  bool MayRead(uint64_t bytes) const override { return !progress_.failed() && bytes <= kStagingBytes; }
  /// As StreamProgress's.
  bool Drain(int64_t deadline_ms) { return progress_.Drain(deadline_ms); }

 private:
  static constexpr uint32_t kUnitBytes = kAlign;

  DeviceReads(const Device* device, std::unique_ptr<NumberedStream> stream, std::unique_ptr<PinnedRegion> staging,
              PollList* polls);
  void GiveBack(uint64_t piece);

  const std::unique_ptr<PinnedRegion> staging_;
  PieceRing ring_{kStagingBytes / kUnitBytes};
  std::deque<bool> given_back_;  // of the ring's pieces, oldest first
  uint64_t first_piece_ = 0;     // number of the oldest
  StreamProgress progress_;      // what waits there has pieces of the ring
};

}  // namespace kvmanager
