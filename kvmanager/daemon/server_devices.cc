#include "kvmanager/daemon/server_devices.h"

#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_region.h"

namespace kvmanager {
namespace {

static_assert(Options::kDeviceSlabBytesMin == DeviceRegion::kSlabBytesMin);
static_assert(Options::kDevicePoolBytesMax == SlabMemory::kBytesMax);

constexpr int64_t kPinLogNs = 3'000'000'000;  // between two lines about pinning
constexpr int64_t kStreamsEndMs = 10000;      // for what runs on GPUs when the daemon stops

}  // namespace

absl::Status ServerDevices::Open(PagePool* host_pool) {
  for (const int ordinal : options_.devices) {
    device_metrics_.push_back(std::make_unique<DeviceMetrics>(all_metrics_, ordinal));
    if (options_.device_pool_bytes > 0) KV_RETURN_IF_ERROR(OpenOne(ordinal, device_metrics_.back().get()));
  }
  if (parts_.empty()) return absl::OkStatus();
  BeginPinning(host_pool);
  std::vector<const Device*> gpus;
  for (const auto& parts : parts_) gpus.push_back(parts->device.get());
  KV_ASSIGN_OR_RETURN(copier_, PeerCopier::Create(gpus));
  return absl::OkStatus();
}

absl::Status ServerDevices::OpenOne(int ordinal, DeviceMetrics* metrics) {
  auto parts = std::make_unique<DeviceParts>();
  auto device = Device::Open(ordinal);
  if (!device.ok()) {
    return absl::Status(device.status().code(),
                        absl::StrCat("--device-pool-bytes asks for GPU ", ordinal, " of --devices, but ",
                                     device.status().message(), "; leave the option out to serve from host memory"));
  }
  parts->device = *std::move(device);
  const auto slabs = static_cast<uint32_t>(options_.device_pool_bytes / options_.device_slab_bytes);
  KV_ASSIGN_OR_RETURN(auto region, DeviceRegion::Reserve(parts->device.get(), options_.device_slab_bytes, slabs));
  KV_ASSIGN_OR_RETURN(const uint64_t free_bytes, parts->device->FreeBytes());
  auto pool = DevicePool::Create(std::move(region));
  if (!pool.ok()) {
    if (!absl::IsResourceExhausted(pool.status())) return pool.status();
    return FieldError(absl::StatusCode::kResourceExhausted, "--device-pool-bytes",
                      absl::StrCat(options_.device_pool_bytes),
                      absl::StrCat("less than what GPU ", ordinal, " has free, ", free_bytes,
                                   ": ask for less, or end what else uses it"));
  }
  parts->pool = *std::move(pool);
  parts->context.ordinal = ordinal;
  parts->context.device = parts->device.get();
  parts->context.pool = parts->pool.get();
  parts->context.metrics = metrics;
  parts->context.epochs = &parts->epochs;
  parts->context.encode_queue = &parts->encode_queue;
  KV_ASSIGN_OR_RETURN(parts->encodes, DeviceEncodes::Create(parts->device.get(), polls_, metrics_));
  parts->context.encodes = parts->encodes.get();
  KV_ASSIGN_OR_RETURN(parts->mover, DeviceMover::Create(parts->device.get(), polls_));
  KV_ASSIGN_OR_RETURN(parts->sends, DeviceSends::Create(parts->device.get(), parts->pool.get(), polls_));
  parts->context.sends = parts->sends.get();
  KV_ASSIGN_OR_RETURN(parts->reads, DeviceReads::Create(parts->device.get(), polls_));
  parts->context.reads = parts->reads.get();
  KV_ASSIGN_OR_RETURN(parts->streams, DeviceStreams::Create(parts->context));
  parts->context.streams = parts->streams.get();
  KV_ASSIGN_OR_RETURN(parts->indexes, DeviceIndexes::Create(parts->context, polls_));
  parts->context.indexes = parts->indexes.get();
  KV_RETURN_IF_ERROR(OpenRecompute(*parts));
  parts->context.metrics->capacity_bytes.Set(double(parts->pool->capacity_bytes()));
  spdlog::info("GPU {}: a pool of {} slabs of {} MiB", ordinal, slabs, options_.device_slab_bytes >> 20);
  parts_.push_back(std::move(parts));
  return absl::OkStatus();
}

absl::Status ServerDevices::OpenRecompute(DeviceParts& parts) {
  if (options_.recompute_device_bytes == 0) return absl::OkStatus();
  auto recompute = CudaRecomputeDevice::Create(parts.device.get());
  if (!recompute.ok()) {
    return absl::Status(
        recompute.status().code(),
        absl::StrCat("--recompute-device-bytes asks for projections on GPU ", parts.context.ordinal, ", but ",
                     recompute.status().message(), "; leave the option out to recompute on the CPU"));
  }
  parts.recompute = *std::move(recompute);
  parts.recompute->SetStreams(parts.streams.get());
  return absl::OkStatus();
}

void ServerDevices::BeginPinning(PagePool* host_pool) {
  std::vector<absl::Span<uint8_t>> slabs;
  for (uint32_t slab = 0; slab < host_pool->slabs(); ++slab) slabs.push_back(host_pool->SlabData(slab));
  const Device* const device = parts_.front()->device.get();
  pinner_ = std::make_unique<HostPinner>(
      std::move(slabs),
      HostPinner::Calls{[device](uint8_t* data, size_t bytes) { return device->PinHost(data, bytes); },
                        [device](uint8_t* data) { device->UnpinHost(data); }});
  for (const auto& parts : parts_) {
    parts->mover->SetPinner(pinner_.get());
    if (parts->recompute != nullptr) parts->recompute->SetPinner(pinner_.get());
  }
  pin_log_ns_ = clock_.NowNs();
}

void ServerDevices::SetLoop(EventLoop* loop) {
  for (const auto& parts : parts_) parts->streams->SetLoop(loop);
}

void ServerDevices::Look(PageStore* store) {
  if (parts_.empty()) return;
  store->CollectReleased();
  for (const auto& parts : parts_) parts->context.metrics->used_bytes.Set(double(parts->pool->used_bytes()));
  if (pinned_) return;
  pinned_ = pinner_->done();
  metrics_->pool_pinned_bytes.Set(double(pinner_->ready_bytes()));
  if (pinned_ && !pinner_->status().ok()) {
    spdlog::error("the host pool stays pinned up to {} of {} bytes only: {}", pinner_->ready_bytes(),
                  pinner_->total_bytes(), std::string(pinner_->status().message()));
  } else if (pinned_ || clock_.NowNs() - pin_log_ns_ >= kPinLogNs) {
    pin_log_ns_ = clock_.NowNs();
    spdlog::info("host pool: {} of {} MiB pinned", pinner_->ready_bytes() >> 20, pinner_->total_bytes() >> 20);
  }
}

void ServerDevices::End() {
  for (const auto& parts : parts_) {
    if (parts->streams->Drain(kStreamsEndMs) && parts->mover->Drain(kStreamsEndMs) &&
        parts->sends->Drain(kStreamsEndMs) && parts->indexes->Drain(kStreamsEndMs) &&
        parts->reads->Drain(kStreamsEndMs)) {
      continue;
    }
    spdlog::error("GPU {} still works for connections that ended: its memory goes with the process",
                  parts->context.ordinal);
    (void)pinner_.release();
    (void)copier_.release();
    for (auto& each : parts_) (void)each.release();
    parts_.clear();
    return;
  }
}

}  // namespace kvmanager
