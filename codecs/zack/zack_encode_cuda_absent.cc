// Where there is no CUDA Toolkit.
#include "codecs/zack/zack_encode_cuda.h"

namespace kvmanager::zack {

int LaunchZackEncode(const ZackDeviceShape&, const DeviceEncodeItem*, uint32_t, uint32_t*, CUstream_st*) {
  return kZackCudaUnavailable;
}
int LaunchZackDecode(const ZackDeviceShape&, const DeviceDecodeItem*, uint32_t, CUstream_st*) {
  return kZackCudaUnavailable;
}

}  // namespace kvmanager::zack
