// Where there is no CUDA Toolkit.
#include "codecs/pq/pq_device.h"

namespace kvmanager::pq {

int LaunchPqPrepareBooks(const DeviceShape&, uint8_t* const*, uint32_t, CUstream_st*) { return kPqCudaUnavailable; }
int LaunchPqEncode(const DeviceShape&, const uint8_t*, const uint32_t*, const DeviceIndexTable&,
                   const DeviceEncodeCodes*, uint32_t, CUstream_st*) {
  return kPqCudaUnavailable;
}
size_t SelectScratchBytes(const DeviceShape&, uint32_t) { return 0; }
bool CanSelectOnDevice(const DeviceShape&) { return false; }
int PrepareSelect() { return kPqCudaUnavailable; }
int LaunchPqSelect(const SelectParams&, int, uint32_t, CUstream_st*) { return kPqCudaUnavailable; }
int SelectBlocks(const DeviceShape&, uint32_t, uint32_t, int) { return 1; }
int LaunchPqCacheUpdate(const CacheParams&, CUstream_st*) { return kPqCudaUnavailable; }

}  // namespace kvmanager::pq
