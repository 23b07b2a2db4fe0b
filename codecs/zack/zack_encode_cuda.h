// Encode and decode of ZACK's pages on a GPU: products with factors cut to each head's ranks (rotation_cuda.h has what
// they are exact to). Launches allocate nothing, do not wait, and may be captured in a graph. Free functions without
// state: any thread may call them.
#pragma once

#include <cstdint>

#include "codecs/device/device_codec.h"
#include "codecs/zack/zack_device.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::zack {

/// What the launches return where this build has no CUDA; other values are cudaError_t, 0 being success.
inline constexpr int kZackCudaUnavailable = -1;

struct ZackDeviceShape {
  PageLayout layout;                               // of raw pages: 64 tokens, head_dim 64 or 128
  const uint8_t* factors = nullptr;                // what ZackDeviceSide counts from; on the device, as all here
  const ZackDeviceSide* sides = nullptr;           // [layers][kv_heads][side]
  const uint32_t* page_bytes = nullptr;            // [layers]
  int encode_bytes_max = 0, decode_bytes_max = 0;  // of a packed factor
};

int LaunchZackEncode(const ZackDeviceShape& shape, const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                     CUstream_st* stream);
int LaunchZackDecode(const ZackDeviceShape& shape, const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream);

}  // namespace kvmanager::zack
