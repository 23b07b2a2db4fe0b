#include "kvmanager/daemon/server_devices.h"

#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_pool.h"
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
    device_metrics_.push_back(std::make_unique<DeviceMetrics>(metrics_, ordinal));
    if (options_.device_pool_bytes > 0) KV_RETURN_IF_ERROR(OpenOne(ordinal, device_metrics_.back().get()));
  }
  if (opened_.empty()) return absl::OkStatus();
  BeginPinning(host_pool);
  std::vector<const Device*> gpus;
  for (const Opened& each : opened_) gpus.push_back(each.gpu->device());
  KV_ASSIGN_OR_RETURN(copier_, PeerCopier::Create(gpus));
  return absl::OkStatus();
}

absl::Status ServerDevices::OpenOne(int ordinal, DeviceMetrics* metrics) {
  auto device = Device::Open(ordinal);
  if (!device.ok()) {
    return absl::Status(device.status().code(),
                        absl::StrCat("--device-pool-bytes asks for GPU ", ordinal, " of --devices, but ",
                                     device.status().message(), "; leave the option out to serve from host memory"));
  }
  const auto slabs = static_cast<uint32_t>(options_.device_pool_bytes / options_.device_slab_bytes);
  KV_ASSIGN_OR_RETURN(auto region, DeviceRegion::Reserve(device->get(), options_.device_slab_bytes, slabs));
  KV_ASSIGN_OR_RETURN(const uint64_t free_bytes, (*device)->FreeBytes());
  auto pool = DevicePool::Create(std::move(region));
  if (!pool.ok()) {
    if (!absl::IsResourceExhausted(pool.status())) return pool.status();
    return FieldError(absl::StatusCode::kResourceExhausted, "--device-pool-bytes",
                      absl::StrCat(options_.device_pool_bytes),
                      absl::StrCat("less than what GPU ", ordinal, " has free, ", free_bytes,
                                   ": ask for less, or end what else uses it"));
  }
  Opened opened;
  KV_ASSIGN_OR_RETURN(opened.gpu, Gpu::Create(*std::move(device), *std::move(pool), polls_, &gpu_metrics_, metrics));
  KV_RETURN_IF_ERROR(OpenRecompute(opened));
  spdlog::info("GPU {}: a pool of {} slabs of {} MiB", ordinal, slabs, options_.device_slab_bytes >> 20);
  opened_.push_back(std::move(opened));
  return absl::OkStatus();
}

absl::Status ServerDevices::OpenRecompute(Opened& opened) {
  if (options_.recompute_device_bytes == 0) return absl::OkStatus();
  auto recompute = CudaRecomputeDevice::Create(opened.gpu->device());
  if (!recompute.ok()) {
    return absl::Status(
        recompute.status().code(),
        absl::StrCat("--recompute-device-bytes asks for projections on GPU ", opened.gpu->ordinal(), ", but ",
                     recompute.status().message(), "; leave the option out to recompute on the CPU"));
  }
  opened.recompute = *std::move(recompute);
  opened.recompute->SetStreams(opened.gpu->streams());
  return absl::OkStatus();
}

void ServerDevices::BeginPinning(PagePool* host_pool) {
  std::vector<absl::Span<uint8_t>> slabs;
  for (uint32_t slab = 0; slab < host_pool->slabs(); ++slab) slabs.push_back(host_pool->SlabData(slab));
  const Device* const device = opened_.front().gpu->device();
  pinner_ = std::make_unique<HostPinner>(
      std::move(slabs),
      HostPinner::Calls{[device](uint8_t* data, size_t bytes) { return device->PinHost(data, bytes); },
                        [device](uint8_t* data) { device->UnpinHost(data); }});
  for (const Opened& each : opened_) {
    each.gpu->mover()->SetPinner(pinner_.get());
    each.gpu->arena_mover()->SetPinner(pinner_.get());
    if (each.recompute != nullptr) each.recompute->SetPinner(pinner_.get());
  }
  pin_log_ns_ = clock_.NowNs();
}

void ServerDevices::SetLoop(EventLoop* loop) {
  for (const Opened& each : opened_) each.gpu->streams()->SetLoop(loop);
}

void ServerDevices::Look(PageStore* store) {
  if (opened_.empty()) return;
  store->tables().CollectReleased();
  for (const Opened& each : opened_) each.gpu->UpdateMetrics();
  if (pinned_) return;
  pinned_ = pinner_->done();
  gpu_metrics_.pool_pinned_bytes.Set(double(pinner_->ready_bytes()));
  if (pinned_ && !pinner_->status().ok()) {
    spdlog::error("the host pool stays pinned up to {} of {} bytes only: {}", pinner_->ready_bytes(),
                  pinner_->total_bytes(), std::string(pinner_->status().message()));
  } else if (pinned_ || clock_.NowNs() - pin_log_ns_ >= kPinLogNs) {
    pin_log_ns_ = clock_.NowNs();
    spdlog::info("host pool: {} of {} MiB pinned", pinner_->ready_bytes() >> 20, pinner_->total_bytes() >> 20);
  }
}

void ServerDevices::End() {
  for (const Opened& each : opened_) {
    if (each.gpu->Drain(kStreamsEndMs)) continue;
    spdlog::error("GPU {} still works for connections that ended: its memory goes with the process",
                  each.gpu->ordinal());
    (void)pinner_.release();
    (void)copier_.release();
    new auto(std::move(opened_));
    opened_.clear();
    return;
  }
}

Gpus ServerDevices::gpus() const {
  Gpus gpus;
  for (const Opened& each : opened_) gpus.push_back(each.gpu.get());
  return gpus;
}

std::vector<RecomputeDevice*> ServerDevices::recompute_devices() const {
  std::vector<RecomputeDevice*> devices;
  for (const Opened& each : opened_) {
    if (each.recompute != nullptr) devices.push_back(each.recompute.get());
  }
  return devices;
}

}  // namespace kvmanager
