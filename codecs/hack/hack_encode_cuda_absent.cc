#include "codecs/hack/hack_encode_cuda.h"

namespace kvmanager::hack {

int LaunchHackEncode(const HackDeviceShape&, const HackDeviceHead*, const DeviceEncodeItem*, uint32_t, uint32_t*,
                     CUstream_st*) {
  return kHackCudaUnavailable;
}

int LaunchHackDecode(const HackDeviceShape&, const HackDeviceHead*, const DeviceDecodeItem*, uint32_t, CUstream_st*) {
  return kHackCudaUnavailable;
}

}  // namespace kvmanager::hack
