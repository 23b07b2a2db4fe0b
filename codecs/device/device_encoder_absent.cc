#include "codecs/device/device_encoder.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<DeviceEncoder>> DeviceEncoder::Create(CUstream_st*, uint32_t) {
  return absl::UnavailableError("built without CUDA: nothing is encoded on a GPU");
}

}  // namespace kvmanager
