// Trains the indexes of caches on a GPU, for the store. Keys go to the host by way of pinned memory, workers train, and
// codebooks go back to the index's place, where the device completes them. One job after the other, behind
// attention and encoding. The loop's thread, but for the tasks.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/device_stream.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/page_mover.h"
#include "kvmanager/memory/pinned_region.h"
#include "kvmanager/memory/shared_semaphores.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

class DeviceIndexes {
 public:
  static constexpr size_t kStagingBytes = size_t{32} << 20;  // of keys that are copied at once

  /// Everything given outlives it; `workers` is told later (SetWorkers).
  static absl::StatusOr<std::unique_ptr<DeviceIndexes>> Create(const Device* device, DeviceStreams* streams,
                                                               PollList* polls);
  /// Nothing is on its way (Drain).
  ~DeviceIndexes();
  DeviceIndexes(const DeviceIndexes&) = delete;
  DeviceIndexes& operator=(const DeviceIndexes&) = delete;

  void SetWorkers(EncodeExecutor* workers) { workers_ = workers; }
  /// The keys are there. job.done is called once: when the index's part is on the GPU, or why it is not.
  void Post(std::shared_ptr<const DeviceCodec> codec, DeviceIndexJob job);
  /// Waits, blocking, until the GPU touches nothing for this any more; nobody is told. false: it still does after
  /// `deadline_ms`.
  bool Drain(int64_t deadline_ms);

 private:
  struct Waiting {
    std::shared_ptr<const DeviceCodec> codec;
    DeviceIndexJob job;
  };

  DeviceIndexes(const Device* device, DeviceStreams* streams, PollList* polls)
      : device_(device), streams_(streams), polls_(polls) {}
  void Next();
  void CopyKeys();              // the next piece
  void KeepKeys(size_t count);  // of a piece, from pinned memory
  void Train();
  void PutImage();
  void End(absl::Status status);
  absl::Status EnsureStaging(size_t bytes);
  /// Calls `then` once the stream has passed what is enqueued now; `status`: of enqueuing it, an error ends the job.
  void WhenPassed(absl::Status status, absl::AnyInvocable<void()> then);

  const Device* const device_;
  DeviceStreams* const streams_;
  PollList* const polls_;
  EncodeExecutor* workers_ = nullptr;
  CUstream_st* stream_ = nullptr;
  std::unique_ptr<SharedSemaphores> words_;  // this process's alone: `done`
  std::unique_ptr<PinnedRegion> staging_;
  std::deque<Waiting> waiting_;  // the first one is under way, if busy_
  bool busy_ = false;
  // Of the job under way:
  std::vector<uint8_t> keys_;
  std::vector<const uint8_t*> pages_;
  size_t copied_ = 0;  // pages
  uint64_t last_ = 0;
};

}  // namespace kvmanager
