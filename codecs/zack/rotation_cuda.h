// Products of pages with factors on a GPU: raw K and V into the space that a codec stores, and back.
//
// Tensor cores multiply exact 16-bit elements with factors split into 16-bit parts (two of float16, three of bfloat16),
// summed in fp32: elements are the CPU's (rotation.h) within a step of float16, but for sums that cancel. Launches
// allocate nothing, do not wait, and may be captured in a graph. Free functions without state: any thread may call
// them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/device/device_codec.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::zack {

/// What the launches return where this build has no CUDA; other values are cudaError_t, 0 being success.
inline constexpr int kRotationCudaUnavailable = -1;

/// A factor [rows][columns] as the kernels read it, which multiplies elements of `in`. Multiples of 16, at most 128.
size_t PackedFactorBytes(int rows, int columns, DType in);
/// to: PackedFactorBytes, 16-byte aligned.
void PackFactor(const float* factor, int rows, int columns, DType in, uint8_t* to);

struct DeviceRotation {
  PageLayout layout;                // of raw pages: 64 tokens, head_dim 64 or 128
  uint32_t layers = 0;              // items' layers are below; at most 1024
  const uint8_t* encode = nullptr;  // packed, on the device: [layers][kv_heads][side], for elements of layout.dtype
  const uint8_t* decode = nullptr;  // likewise, for elements of float16
};

/// Scratch memory on the device, of the pages of one launch.
struct RotatedPages {
  uint8_t* rotated = nullptr;  // [count] pages of float16, 16-byte aligned
  uint32_t* order = nullptr;   // [count] in which they are worked on
};

/// pages.rotated from items' raw pages; a value that does not fit is an infinity. inner: [count], out: `items` with the
/// rotated pages for raw ones. All on the device.
int LaunchRotateRaw(const DeviceRotation& rotation, const RotatedPages& pages, const DeviceEncodeItem* items,
                    uint32_t count, DeviceEncodeItem* inner, CUstream_st* stream);
/// Of rotated pages with an infinity, which a codec behind would not find: declined[i] = 1, and page_bytes
/// bytes of the encoded page become zero. inner: what LaunchRotateRaw left.
int LaunchDeclineInfinite(const PageLayout& layout, const DeviceEncodeItem* inner, uint32_t count, uint32_t page_bytes,
                          uint32_t* declined, CUstream_st* stream);
/// inner: [count], out: `items` with pages of `pages.rotated` for their raw ones. Before LaunchRotateBack of the same.
int LaunchNameRotated(const DeviceRotation& rotation, const RotatedPages& pages, const DeviceDecodeItem* items,
                      uint32_t count, DeviceDecodeItem* inner, CUstream_st* stream);
/// items' raw pages from rotated ones; values beyond the dtype become its largest.
int LaunchRotateBack(const DeviceRotation& rotation, const RotatedPages& pages, const DeviceDecodeItem* items,
                     uint32_t count, CUstream_st* stream);

}  // namespace kvmanager::zack
