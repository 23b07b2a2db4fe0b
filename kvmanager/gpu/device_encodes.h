// Encodes pages on a GPU, behind attention: keeps the pages that wait for it, and tells the store when they are
// encoded.
//
// The store hands filled pages to the queue in the middle of a call; it does not know who fills them. The caller takes
// them from there and posts them once their K and V are written. All of them go through one stream of the lowest
// priority, which therefore must never wait for a client, in launches of a bounded length (launch_cuts.h). Tenants
// whose pages wait have a launch in turn, and few are on their way at once. The loop's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "codecs/device/device_encoder.h"
#include "kvmanager/base/clock.h"
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
  WorkerPool::Owner owner = WorkerPool::kDaemon;
};

class DeviceEncodeQueue final : public EncodeExecutor {
 public:
  void Encode(std::shared_ptr<const Codec>, std::vector<EncodeItem> items, WorkerPool::Owner owner,
              absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) override {
    jobs_.push_back({std::move(items), std::move(done), owner});
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
  /// On their way at once: what another tenant's pages wait for, 5 ms of the slowest codec.
  static constexpr size_t kLaunchesMax = 4;
  /// A codec whose kLaunchesMax launches take no longer than kFastNs, seen by polls, has twice the pages in its next
  /// ones, up to kScaleMax times: few launches for it, since each has other processes' kernels wait for their turn.
  static constexpr int64_t kFastNs = 300000, kSlowNs = 1000000;
  static constexpr uint32_t kScaleMax = 16;

  /// Everything given outlives it.
  static absl::StatusOr<std::unique_ptr<DeviceEncodes>> Create(const Device* device, PollList* polls,
                                                               prometheus::Counter* encoded_pages);

  /// The bytes of the pages, each of raw_bytes as appended, are there. job.done is called once, when the GPU has
  /// encoded them.
  void Post(std::shared_ptr<const DeviceCodec> codec, uint64_t raw_bytes, DeviceEncodeJob job);

 private:
  /// A job. Shared by its place in the line and by its launches.
  struct Batch {
    std::shared_ptr<const DeviceCodec> codec;
    DeviceEncodeJob job;
    uint32_t launch_pages = 0;  // of a launch
    size_t enqueued = 0;        // items
    size_t launches = 0;        // on their way
  };
  struct Launch {
    std::shared_ptr<Batch> batch;
    size_t first = 0, count = 0;  // items
    uint32_t at = 0;              // in the ring of flags
    uint64_t number = 0;          // what the stream stores behind it
  };
  /// What waits of an owner's, in order; the first may have been enqueued in part.
  struct Line {
    WorkerPool::Owner owner;
    std::deque<std::shared_ptr<Batch>> batches;
  };

  DeviceEncodes(const Device* device, PollList* polls, prometheus::Counter* encoded_pages)
      : device_(device), polls_(polls), encoded_pages_(encoded_pages) {}
  void SubmitWaiting();
  /// The batch's next launch.
  absl::Status Enqueue(const std::shared_ptr<Batch>& batch, uint32_t at, size_t count);
  bool Poll();  // true: nothing is on its way, or waits
  /// Of launches, by how long those took that have passed.
  void Rescale();

  const Device* const device_;
  PollList* const polls_;
  prometheus::Counter* const encoded_pages_;
  std::unique_ptr<SharedSemaphores> words_;  // this process's alone: `encoded`, and the flags
  std::unique_ptr<DeviceEncoder> encoder_;
  std::deque<Line> waiting_;                           // none is empty; the first is whose turn it is
  std::deque<Launch> submitted_;                       // at most kLaunchesMax
  PieceRing flags_{SharedSemaphores::kDeclinedWords};  // of `submitted_`
  uint64_t last_ = 0;
  const SteadyClock clock_;
  const DeviceCodec* scaled_ = nullptr;  // whose scale_ it is
  uint32_t scale_ = 1;
  int64_t burst_ns_ = 0;       // when the stream, idle before, was given launches
  size_t burst_launches_ = 0;  // since
  bool polling_ = false;
};

}  // namespace kvmanager
