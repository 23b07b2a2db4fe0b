#include "codecs/zack/rotation_cuda.h"

namespace kvmanager::zack {

int LaunchRotateRaw(const DeviceRotation&, const DeviceEncodeItem*, uint32_t, uint8_t*, DeviceEncodeItem*,
                    CUstream_st*) {
  return kRotationCudaUnavailable;
}
int LaunchDeclineInfinite(const PageLayout&, const DeviceEncodeItem*, uint32_t, uint32_t, uint32_t*, CUstream_st*) {
  return kRotationCudaUnavailable;
}
int LaunchNameRotated(const DeviceRotation&, const DeviceDecodeItem*, uint32_t, uint8_t*, DeviceDecodeItem*,
                      CUstream_st*) {
  return kRotationCudaUnavailable;
}
int LaunchRotateBack(const DeviceRotation&, const DeviceDecodeItem*, uint32_t, const uint8_t*, CUstream_st*) {
  return kRotationCudaUnavailable;
}

}  // namespace kvmanager::zack
