// Where there is no CUDA Toolkit: every device says so.
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_region.h"

namespace kvmanager {
namespace {

constexpr char kAbsent[] = "built without CUDA: nvcc was not on PATH";

}  // namespace

struct DeviceDriver {};

Device::Device() = default;
Device::~Device() = default;
absl::StatusOr<std::unique_ptr<Device>> Device::Open(int) { return absl::UnavailableError(kAbsent); }
absl::StatusOr<std::unique_ptr<Device>> Device::OpenByUuid(const DeviceUuid&) {
  return absl::UnavailableError(kAbsent);
}
absl::Status Device::Use() const { return absl::UnavailableError(kAbsent); }
absl::StatusOr<uint64_t> Device::FreeBytes() const { return absl::UnavailableError(kAbsent); }
absl::Status Device::PinHost(uint8_t*, size_t) const { return absl::UnavailableError(kAbsent); }
void Device::UnpinHost(uint8_t*) const {}
absl::StatusOr<CUstream_st*> Device::NewStream(StreamPriority) const { return absl::UnavailableError(kAbsent); }
void Device::DestroyStream(CUstream_st*) const {}
absl::StatusOr<bool> Device::IsIdle(CUstream_st*) const { return absl::UnavailableError(kAbsent); }
absl::Status Device::EnqueueWait(CUstream_st*, const void*, uint64_t) const { return absl::UnavailableError(kAbsent); }
absl::Status Device::EnqueueWrite(CUstream_st*, const void*, uint64_t) const { return absl::UnavailableError(kAbsent); }
absl::Status Device::EnqueueCopy(CUstream_st*, void*, const void*, size_t) const {
  return absl::UnavailableError(kAbsent);
}
absl::Status Device::Follow(CUstream_st*, CUstream_st*) const { return absl::UnavailableError(kAbsent); }
absl::Status Device::EnqueueRelease(CUstream_st*, const void*, uint64_t) const {
  return absl::UnavailableError(kAbsent);
}

void AllowManyStreams() {}
std::string DeviceSummary() { return kAbsent; }
absl::Status CudaStatus(int, absl::string_view) { return absl::UnavailableError(kAbsent); }
absl::Status CheckNotForked() { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<DeviceRegion>> DeviceRegion::Reserve(const Device*, uint64_t, uint32_t) {
  return absl::UnavailableError(kAbsent);
}
DeviceRegion::~DeviceRegion() = default;
uint8_t* DeviceRegion::data() const { return nullptr; }
absl::Status DeviceRegion::Make(uint32_t) { return absl::UnavailableError(kAbsent); }
void DeviceRegion::Unmake(uint32_t) {}
absl::Status DeviceRegion::Zero(uint32_t) { return absl::UnavailableError(kAbsent); }
absl::StatusOr<int> DeviceRegion::Export(uint32_t) { return absl::UnavailableError(kAbsent); }
absl::Status DeviceRegion::Import(uint32_t, int, bool) { return absl::UnavailableError(kAbsent); }

}  // namespace kvmanager
