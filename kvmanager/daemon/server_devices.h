// The daemon's GPUs: the pool of each and what works on it, and the pinning of the host's pool beside them.
//
// Owned by Server, before whose other objects it is made and after which it goes. The loop's thread, and before that
// runs, its maker's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/gpu/gpu_metrics.h"
#include "kvmanager/handoff/recompute_device.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/store/page_store.h"
#include "monitoring/metrics.h"
#include "transport/cuda/peer_copier.h"

namespace kvmanager {

class ServerDevices {
 public:
  /// Everything given outlives it.
  ServerDevices(const Options* options, Metrics* metrics, const Clock* clock, PollList* polls)
      : options_(*options), metrics_(metrics), gpu_metrics_(metrics), clock_(*clock), polls_(polls) {}
  ServerDevices(const ServerDevices&) = delete;
  ServerDevices& operator=(const ServerDevices&) = delete;

  /// Takes the pools of Options::devices, if it asks for any, and begins to pin `host_pool`, which outlives this. Once.
  /// Errors, naming the flag: UNAVAILABLE, FAILED_PRECONDITION (Device::Open), RESOURCE_EXHAUSTED (the GPU has not that
  /// much memory).
  absl::Status Open(PagePool* host_pool);
  /// Those with a pool.
  Gpus gpus() const;
  /// Those that projections may run on.
  std::vector<RecomputeDevice*> recompute_devices() const;
  const HostPinner* pinner() const { return pinner_.get(); }  // nullptr: no GPU
  PeerCopier* copier() const { return copier_.get(); }        // nullptr: no GPU

  /// nullptr: the loop runs no more.
  void SetLoop(EventLoop* loop);
  /// From time to time: metrics, and how far the host's pool is pinned.
  void Look(PageStore* store);
  /// After the loop: what clients left on the GPUs ends, or is left to the process's end, with the GPUs' memory.
  void End();

 private:
  /// Members in the order of who needs whom.
  struct Opened {
    std::unique_ptr<Gpu> gpu;
    std::unique_ptr<CudaRecomputeDevice> recompute;  // nullptr: the CPU projects
  };

  absl::Status OpenOne(int ordinal, DeviceMetrics* metrics);
  absl::Status OpenRecompute(Opened& opened);
  void BeginPinning(PagePool* host_pool);

  const Options& options_;
  Metrics* const metrics_;
  GpuMetrics gpu_metrics_;
  const Clock& clock_;
  PollList* const polls_;
  std::vector<std::unique_ptr<DeviceMetrics>> device_metrics_;
  std::vector<Opened> opened_;
  std::unique_ptr<HostPinner> pinner_;
  std::unique_ptr<PeerCopier> copier_;
  bool pinned_ = false;
  int64_t pin_log_ns_ = 0;
};

}  // namespace kvmanager
