// Encode and decode of HACK pages on a GPU, byte for byte what the CPU's kernels give.
//
// A launch takes any number of pages, allocates nothing, does not synchronise, and may be captured in a graph. What it
// is given lies in device memory (or memory that the device reads) and stays until the stream has passed it. Free
// functions without state: any thread may call them.
#pragma once

#include <cstdint>

#include "codecs/device/device_codec.h"
#include "codecs/hack/hack_device_format.h"

namespace kvmanager::hack {

/// What the launches return where this build has no CUDA; other values are cudaError_t, 0 being success.
inline constexpr int kHackCudaUnavailable = -1;

/// heads: HackDeviceFormat::heads, on the device. items and declined: as of DeviceCodec.
int LaunchHackEncode(const HackDeviceShape& shape, const HackDeviceHead* heads, const DeviceEncodeItem* items,
                     uint32_t count, uint32_t* declined, CUstream_st* stream);

int LaunchHackDecode(const HackDeviceShape& shape, const HackDeviceHead* heads, const DeviceDecodeItem* items,
                     uint32_t count, CUstream_st* stream);

}  // namespace kvmanager::hack
