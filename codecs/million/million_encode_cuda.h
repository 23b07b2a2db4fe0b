// Encode and decode of MILLION pages on a GPU, byte for byte what the CPU gives.
//
// A launch takes any number of pages, allocates nothing, does not synchronise, and may be captured in a graph. What it
// is given lies in device memory (or memory that the device reads) and stays until the stream has passed it. Free
// functions without state: any thread may call them.
#pragma once

#include <cstdint>

#include "codecs/device/device_codec.h"
#include "codecs/million/million_device_format.h"

namespace kvmanager::million {

/// What the launches return where this build has no CUDA; other values are cudaError_t, 0 being success.
inline constexpr int kMillionCudaUnavailable = -1;

/// codebooks: MillionDeviceFormat's, and `bytes` that they point into, on the device. items and declined: as of
/// DeviceCodec.
int LaunchMillionEncode(const MillionDeviceShape& shape, const uint64_t* codebooks, const uint8_t* bytes,
                        const DeviceEncodeItem* items, uint32_t count, uint32_t* declined, CUstream_st* stream);

int LaunchMillionDecode(const MillionDeviceShape& shape, const uint64_t* codebooks, const uint8_t* bytes,
                        const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream);

}  // namespace kvmanager::million
