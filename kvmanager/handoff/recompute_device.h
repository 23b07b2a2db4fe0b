// A GPU that projections run on, beside its pages and its clients' streams.
//
// Owned by the daemon's wiring beside the GPU (gpu.h), and outlives the Recomputer; tests have their own. The
// recomputer's thread runs all reloads, one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/pinned_region.h"
#include "transport/recompute/cuda_executor.h"
#include "transport/recompute/executor.h"

namespace kvmanager {

class DeviceStreams;

class RecomputeDevice {
 public:
  virtual ~RecomputeDevice() = default;

  // Any thread.

  virtual int ordinal() const = 0;
  /// Whether it can read and write the pages of the host's pool. Never becomes false.
  virtual bool reaches_pool() const = 0;
  /// Rows that are projected at once.
  virtual int chunk_rows() const = 0;
  /// Memory of the GPU that an executor of this model takes, and each layer that is registered with it.
  virtual uint64_t ExecutorBytes(const recompute::ProjectionModel& model) const = 0;
  virtual uint64_t LayerBytes(const recompute::ProjectionModel& model) const = 0;

  // The loop's thread.

  /// Whether an executor of this model can be made without waiting for clients' streams, which may be for ever: none
  /// has work, or no kernel has to be loaded for it.
  virtual bool CanMake(const recompute::ProjectionModel& model) const = 0;
  /// May take some tenths of a second, in which nobody can give clients' streams work. Errors: RESOURCE_EXHAUSTED (of
  /// the GPU), UNAVAILABLE.
  virtual absl::StatusOr<std::unique_ptr<recompute::ReloadExecutor>> MakeExecutor(
      const recompute::ProjectionModel& model) = 0;

  // The recomputer's thread.

  /// Host memory that its executors read and write: what there was, scratch_bytes(), if that is enough, else new memory
  /// of this size; the old stays. Errors: RESOURCE_EXHAUSTED, UNAVAILABLE.
  virtual absl::StatusOr<absl::Span<uint8_t>> Scratch(size_t bytes) = 0;
  virtual size_t scratch_bytes() const = 0;
};

class CudaRecomputeDevice final : public RecomputeDevice {
 public:
  /// device: outlives this. Loads cuBLAS, before clients have streams for which it would wait. Errors: UNAVAILABLE,
  /// naming what to install; RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<CudaRecomputeDevice>> Create(const Device* device);

  /// The host pool's, and clients' streams; both outlive this. Before there is another thread.
  void SetPinner(const HostPinner* pinner) { pinner_ = pinner; }
  void SetStreams(DeviceStreams* streams) { streams_ = streams; }

  int ordinal() const override { return device_->info().ordinal; }
  bool reaches_pool() const override { return pinner_ != nullptr && pinner_->done() && pinner_->status().ok(); }
  int chunk_rows() const override { return options_.chunk_rows; }
  uint64_t ExecutorBytes(const recompute::ProjectionModel& model) const override {
    return CudaExecutorBytes(model, options_);
  }
  uint64_t LayerBytes(const recompute::ProjectionModel& model) const override { return CudaLayerBytes(model); }
  bool CanMake(const recompute::ProjectionModel& model) const override;
  absl::StatusOr<std::unique_ptr<recompute::ReloadExecutor>> MakeExecutor(
      const recompute::ProjectionModel& model) override {
    return MakeCudaExecutor(model, options_, lanes_);
  }
  absl::StatusOr<absl::Span<uint8_t>> Scratch(size_t bytes) override;
  size_t scratch_bytes() const override { return scratch_.empty() ? 0 : scratch_.back()->bytes(); }

 private:
  CudaRecomputeDevice(const Device* device, std::shared_ptr<recompute::CudaLanes> lanes)
      : device_(device), lanes_(std::move(lanes)) {}

  const Device* const device_;
  const std::shared_ptr<recompute::CudaLanes> lanes_;  // shared: by executors
  const recompute::CudaExecutorOptions options_ = {.pages_in_host_memory = true};
  const HostPinner* pinner_ = nullptr;
  DeviceStreams* streams_ = nullptr;
  // The last is used; the others stay, since unpinning waits for every stream of the device.
  std::vector<std::unique_ptr<PinnedRegion>> scratch_;
};

}  // namespace kvmanager
