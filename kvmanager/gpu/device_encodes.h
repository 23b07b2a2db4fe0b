// Encodes pages on a GPU, behind attention: keeps the pages that wait for it, and tells the store when they are
// encoded.
//
// The store hands filled pages to the queue in the middle of a call; it does not know who fills them. The caller takes
// them from there and posts them once their K and V are written. All of them go through one stream of the lowest
// priority, which therefore must never wait for a client. The loop's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "codecs/device/device_encoder.h"
#include "kvmanager/base/piece_ring.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/shared_semaphores.h"
#include "kvmanager/store/page_store.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// Pages of one call of the store.
struct DeviceEncodeJob {
  std::vector<EncodeItem> items;  // addresses on the device
  absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done;
};

class DeviceEncodeQueue final : public EncodeExecutor {
 public:
  void Encode(std::shared_ptr<const Codec>, std::vector<EncodeItem> items, WorkerPool::Owner,
              absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) override {
    jobs_.push_back({std::move(items), std::move(done)});
  }
  /// Nothing runs on the host's copies of these pages.
  void Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) override;
  void Train(DeviceIndexJob job) override { index_jobs_.push_back(std::move(job)); }
  std::vector<DeviceEncodeJob> Take() { return std::exchange(jobs_, {}); }
  std::vector<DeviceIndexJob> TakeIndexJobs() { return std::exchange(index_jobs_, {}); }

 private:
  std::vector<DeviceEncodeJob> jobs_;
  std::vector<DeviceIndexJob> index_jobs_;
};

class DeviceEncodes {
 public:
  static constexpr uint32_t kItemsMax = SharedSemaphores::kDeclinedWords;  // on their way at once; more wait here
  static constexpr uint32_t kJobItemsMax = kItemsMax / 2;

  /// Everything given outlives it.
  static absl::StatusOr<std::unique_ptr<DeviceEncodes>> Create(const Device* device, PollList* polls,
                                                               prometheus::Counter* encoded_pages);

  /// The bytes of the pages are there. job.done is called once, when the GPU has encoded them.
  void Post(std::shared_ptr<const DeviceCodec> codec, DeviceEncodeJob job);

 private:
  struct Batch {
    std::shared_ptr<const DeviceCodec> codec;
    DeviceEncodeJob job;
    uint32_t at = 0;      // in the ring of flags
    uint64_t number = 0;  // what the stream stores behind it
  };

  DeviceEncodes(const Device* device, PollList* polls, prometheus::Counter* encoded_pages)
      : device_(device), polls_(polls), encoded_pages_(encoded_pages) {}
  void SubmitWaiting();
  bool Poll();  // true: nothing is on its way

  const Device* const device_;
  PollList* const polls_;
  prometheus::Counter* const encoded_pages_;
  std::unique_ptr<SharedSemaphores> words_;  // this process's alone: `encoded`, and the flags
  std::unique_ptr<DeviceEncoder> encoder_;
  std::deque<Batch> waiting_, submitted_;
  PieceRing flags_{SharedSemaphores::kDeclinedWords};  // of `submitted_`
  uint64_t last_ = 0;
  bool polling_ = false;
};

}  // namespace kvmanager
