// Encode and decode of HACK pages on a GPU, byte for byte what the CPU's kernels give.
//
// A launch takes any number of pages, allocates nothing, does not synchronise, and may be captured in a graph. What it
// is given lies in device memory (or memory that the device reads) and stays until the stream has passed it. Free
// functions without state: any thread may call them.
#pragma once

#include <cstdint>

#include "codecs/hack/hack_device_format.h"

struct CUstream_st;

namespace kvmanager::hack {

/// What the launches return where this build has no CUDA; other values are cudaError_t, 0 being success.
inline constexpr int kHackCudaUnavailable = -1;

struct HackEncodeItem {
  const uint8_t* raw;    // a full raw page, 16-byte aligned
  uint8_t* encoded;      // page_bytes, 16-byte aligned; every byte is written
  uint64_t first_token;  // position in the context of the page's first token
  uint32_t layer;        // of the model
};

struct HackDecodeItem {
  const uint8_t* encoded;  // 16-byte aligned; any bytes are safe to decode
  uint8_t* raw;            // 16-byte aligned; every byte is written
};

/// heads: HackDeviceFormat::heads, on the device. items: [count], on the device; pages do not overlap. declined:
/// [count], on the device; out: 1 where a page cannot be encoded (its bytes are then all zero), else 0.
int LaunchHackEncode(const HackDeviceShape& shape, const HackDeviceHead* heads, const HackEncodeItem* items,
                     uint32_t count, uint32_t* declined, CUstream_st* stream);

int LaunchHackDecode(const HackDeviceShape& shape, const HackDeviceHead* heads, const HackDecodeItem* items,
                     uint32_t count, CUstream_st* stream);

}  // namespace kvmanager::hack
