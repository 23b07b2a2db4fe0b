// Brings bytes of a GPU's memory to the host, to be looked at: pages that are sampled (quality.h), or read back
// (read.h).
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
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/pinned_region.h"
#include "kvmanager/memory/stream_words.h"
#include "kvmanager/server/device_reader.h"
#include "kvmanager/server/poll_list.h"

namespace kvmanager {

class DeviceReads final : public DeviceReader {
 public:
  static constexpr uint32_t kStagingBytes = 16 << 20;  // of what is on its way or looked at, all together

  /// Everything given outlives it.
  static absl::StatusOr<std::unique_ptr<DeviceReads>> Create(const Device* device, PollList* polls);
  /// Nothing is on its way (Drain), and nobody has bytes.
  ~DeviceReads() override;
  DeviceReads(const DeviceReads&) = delete;
  DeviceReads& operator=(const DeviceReads&) = delete;

  bool Read(absl::Span<const absl::Span<const uint8_t>> ranges, Then then) override;
  bool MayRead(uint64_t bytes) const override { return !failed_ && bytes <= kStagingBytes; }
  /// Waits, blocking, until the GPU touches nothing for this any more; nobody is told. false: it still does after
  /// `deadline_ms`.
  bool Drain(int64_t deadline_ms);

 private:
  static constexpr uint32_t kUnitBytes = kAlign;

  struct Waiting {
    uint64_t number = 0;  // what the stream stores behind it; 0: it was not enqueued
    std::shared_ptr<const uint8_t> bytes;
    Then then;
  };

  DeviceReads(const Device* device, PollList* polls) : device_(device), polls_(polls) {}
  absl::Status Enqueue(absl::Span<const absl::Span<const uint8_t>> ranges, uint8_t* to);
  void GiveBack(uint64_t piece);
  bool Quiet() const;
  bool Poll();  // true: nothing is on its way

  const Device* const device_;
  PollList* const polls_;
  CUstream_st* stream_ = nullptr;
  std::unique_ptr<StreamWords> words_;  // this process's alone: `done`
  std::unique_ptr<PinnedRegion> staging_;
  PieceRing ring_{kStagingBytes / kUnitBytes};
  std::deque<bool> given_back_;  // of the ring's pieces, oldest first
  uint64_t first_piece_ = 0;     // number of the oldest
  std::deque<Waiting> waiting_;
  uint64_t last_ = 0;
  bool failed_ = false;  // nothing is enqueued any more
  bool polling_ = false;
};

}  // namespace kvmanager
