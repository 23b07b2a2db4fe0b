// Where there is no CUDA Toolkit.
#include "codecs/million/million_encode_cuda.h"

namespace kvmanager::million {

int LaunchMillionEncode(const MillionDeviceShape&, const uint64_t*, const uint8_t*, const DeviceEncodeItem*, uint32_t,
                        uint32_t*, CUstream_st*) {
  return kMillionCudaUnavailable;
}

int LaunchMillionDecode(const MillionDeviceShape&, const uint64_t*, const uint8_t*, const DeviceDecodeItem*, uint32_t,
                        CUstream_st*) {
  return kMillionCudaUnavailable;
}

}  // namespace kvmanager::million
