// Where MILLION's kernels of attention find their tables: with pages of K and V as they are, and of rotated ones.
#pragma once

#include "codecs/device/attend_tables.cuh"
#include "codecs/million/million_device_format.h"

namespace kvmanager::device {

template <bool kApart>
__device__ __forceinline__ const void* MillionTablesOf(const AttendParams& p) {
  if constexpr (kApart) return static_cast<const million::MillionSpace*>(p.codec)->tables;
  return p.codec;
}

}  // namespace kvmanager::device
