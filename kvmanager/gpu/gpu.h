// One GPU of the daemon: its pool of pages, and everything that works on it.
//
// This is the central header of the room gpu/: what runs on a GPU, or waits for one. The room knows the store, device
// memory, device codecs and attention. It knows neither peers and tickets nor connections and RPC: it is told what to
// run by handoff/ and rpc/, which are above it.
//
//   kernels for connections   device_stream.h, device_work.h (the daemon's), process_steps.h (the engine's own)
//   work for the store        device_encodes.h, device_indexes.h, device_mover.h, device_reads.h
//   work for hand-offs        device_sends.h
//   waiting                   stream_progress.h, written_publish.h
//
// Made and destroyed by the daemon's wiring; outlives every object that is given it. The loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/device_encodes.h"
#include "kvmanager/gpu/device_indexes.h"
#include "kvmanager/gpu/device_mover.h"
#include "kvmanager/gpu/device_reads.h"
#include "kvmanager/gpu/device_sends.h"
#include "kvmanager/gpu/device_stream.h"
#include "kvmanager/gpu/gpu_metrics.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_pool.h"
#include "kvmanager/memory/release_epochs.h"

namespace kvmanager {

class Gpu {
 public:
  /// What works on the GPU's memory. A test that runs no kernels gives only the streams.
  struct Parts {
    std::unique_ptr<DeviceStreams> streams;
    std::unique_ptr<DeviceEncodes> encodes;
    std::unique_ptr<DeviceIndexes> indexes;
    std::unique_ptr<DeviceMover> mover;
    std::unique_ptr<DeviceMover> arena_mover;  // by the copy engines: an engine's kernels run meanwhile
    std::unique_ptr<DeviceSends> sends;
    std::unique_ptr<DeviceReads> reads;
  };

  /// With all its parts. `pool` is of this device's memory. polls, metrics, device_metrics: outlive this. Errors: those
  /// of the parts' Create.
  static absl::StatusOr<std::unique_ptr<Gpu>> Create(std::unique_ptr<Device> device, std::unique_ptr<DevicePool> pool,
                                                     PollList* polls, GpuMetrics* metrics,
                                                     DeviceMetrics* device_metrics);
  /// The parts are of this device and pool. metrics outlives this.
  Gpu(std::unique_ptr<Device> device, std::unique_ptr<DevicePool> pool, Parts parts, DeviceMetrics* metrics);

  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  int ordinal() const { return device_->info().ordinal; }
  const Device* device() const { return device_.get(); }
  DevicePool* pool() { return pool_.get(); }
  ReleaseEpochs* epochs() { return &epochs_; }
  DeviceEncodeQueue* encode_queue() { return &encode_queue_; }  // the store's executor for this GPU
  DeviceStreams* streams() { return parts_.streams.get(); }
  DeviceEncodes* encodes() { return parts_.encodes.get(); }
  DeviceIndexes* indexes() { return parts_.indexes.get(); }
  DeviceMover* mover() { return parts_.mover.get(); }
  DeviceMover* arena_mover() { return parts_.arena_mover.get(); }
  DeviceSends* sends() { return parts_.sends.get(); }
  DeviceReads* reads() { return parts_.reads.get(); }

  /// From time to time: what only a look shows.
  void UpdateMetrics();
  /// Blocks until the GPU touches nothing for this any more. False: it still does; each part waits for `deadline_ms`.
  bool Drain(int64_t deadline_ms);

 private:
  DeviceMetrics* const metrics_;
  // In the order of who needs whom.
  const std::unique_ptr<Device> device_;
  const std::unique_ptr<DevicePool> pool_;
  ReleaseEpochs epochs_;
  DeviceEncodeQueue encode_queue_;
  const Parts parts_;
};

/// The daemon's GPUs with a pool, in the order of its flag --devices; empty: none is used.
using Gpus = std::vector<Gpu*>;

/// nullptr: none of these has the ordinal.
inline Gpu* FindGpu(const Gpus& gpus, int ordinal) {
  for (Gpu* const gpu : gpus) {
    if (gpu->ordinal() == ordinal) return gpu;
  }
  return nullptr;
}

}  // namespace kvmanager
