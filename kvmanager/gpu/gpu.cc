#include "kvmanager/gpu/gpu.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Create(std::unique_ptr<Device> device, std::unique_ptr<DevicePool> pool,
                                                 PollList* polls, GpuMetrics* metrics, DeviceMetrics* device_metrics) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Gpu> gpu, CreateBare(std::move(device), std::move(pool), device_metrics));
  const Device* const on = gpu->device();
  KV_ASSIGN_OR_RETURN(gpu->encodes_, DeviceEncodes::Create(on, polls, &metrics->encoded_pages));
  KV_ASSIGN_OR_RETURN(gpu->mover_, DeviceMover::Create(on, polls));
  KV_ASSIGN_OR_RETURN(gpu->sends_, DeviceSends::Create(on, gpu->pool(), polls));
  KV_ASSIGN_OR_RETURN(gpu->reads_, DeviceReads::Create(on, polls));
  KV_ASSIGN_OR_RETURN(gpu->indexes_, DeviceIndexes::Create(on, gpu->streams(), polls));
  return gpu;
}

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::CreateBare(std::unique_ptr<Device> device, std::unique_ptr<DevicePool> pool,
                                                     DeviceMetrics* device_metrics) {
  std::unique_ptr<Gpu> gpu(new Gpu(std::move(device), std::move(pool), device_metrics));
  KV_ASSIGN_OR_RETURN(gpu->streams_, DeviceStreams::Create(gpu->device(), device_metrics));
  device_metrics->capacity_bytes.Set(double(gpu->pool()->capacity_bytes()));
  return gpu;
}

void Gpu::UpdateMetrics() { metrics_->used_bytes.Set(double(pool_->used_bytes())); }

bool Gpu::Drain(int64_t deadline_ms) {
  return streams_->Drain(deadline_ms) && mover_->Drain(deadline_ms) && sends_->Drain(deadline_ms) &&
         indexes_->Drain(deadline_ms) && reads_->Drain(deadline_ms);
}

}  // namespace kvmanager
