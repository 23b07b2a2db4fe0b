#include "kvmanager/gpu/gpu.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<Gpu>> Gpu::Create(std::unique_ptr<Device> device, std::unique_ptr<DevicePool> pool,
                                                 PollList* polls, GpuMetrics* metrics, DeviceMetrics* device_metrics) {
  const Device* const on = device.get();
  Parts parts;
  KV_ASSIGN_OR_RETURN(parts.streams, DeviceStreams::Create(on, device_metrics));
  KV_ASSIGN_OR_RETURN(parts.encodes, DeviceEncodes::Create(on, polls, &metrics->encoded_pages));
  KV_ASSIGN_OR_RETURN(parts.mover, DeviceMover::Create(on, polls));
  KV_ASSIGN_OR_RETURN(parts.arena_mover, DeviceMover::Create(on, polls, PageCopyMethod::kBatch));
  KV_ASSIGN_OR_RETURN(parts.sends, DeviceSends::Create(on, pool.get(), polls));
  KV_ASSIGN_OR_RETURN(parts.reads, DeviceReads::Create(on, polls));
  KV_ASSIGN_OR_RETURN(parts.indexes, DeviceIndexes::Create(on, parts.streams.get(), polls));
  return std::make_unique<Gpu>(std::move(device), std::move(pool), std::move(parts), device_metrics);
}

Gpu::Gpu(std::unique_ptr<Device> device, std::unique_ptr<DevicePool> pool, Parts parts, DeviceMetrics* metrics)
    : metrics_(metrics), device_(std::move(device)), pool_(std::move(pool)), parts_(std::move(parts)) {
  metrics_->capacity_bytes.Set(double(pool_->capacity_bytes()));
}

void Gpu::UpdateMetrics() { metrics_->used_bytes.Set(double(pool_->used_bytes())); }

bool Gpu::Drain(int64_t deadline_ms) {
  return parts_.streams->Drain(deadline_ms) && parts_.mover->Drain(deadline_ms) &&
         parts_.arena_mover->Drain(deadline_ms) && parts_.sends->Drain(deadline_ms) &&
         parts_.indexes->Drain(deadline_ms) && parts_.reads->Drain(deadline_ms);
}

}  // namespace kvmanager
