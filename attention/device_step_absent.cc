// Where there is no CUDA Toolkit.
#include "attention/device_step.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<DeviceStep>> DeviceStep::Create(const Options&) {
  return absl::UnavailableError("built without CUDA: nvcc was not on PATH");
}

absl::StatusOr<size_t> DeviceStep::UploadBytes(const Options&) {
  return absl::UnavailableError("built without CUDA: nvcc was not on PATH");
}

}  // namespace kvmanager
