// From the template of a kernel to its functions.
#pragma once

#include <cuda_runtime.h>

#include "codecs/device/attend_kernel.cuh"
#include "codecs/device/attend_launch.h"

namespace kvmanager::device {

template <class Raw, class Encoded, int kWarps, int kStages, int kBlocksPerSm>
struct Attend {
  using Memory = AttendMemory<Raw, Encoded, kWarps, kStages>;
  static_assert(sizeof(Memory) * kBlocksPerSm + 1024 * kBlocksPerSm <= 228 * 1024, "a multiprocessor has 228 KiB");
  static constexpr auto kKernel = AttendKernel<Raw, Encoded, kWarps, kStages, kBlocksPerSm>;

  static int Prepare() {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
  }
  static int Launch(const AttendParams& params, int blocks, CUstream_st* stream) {
    kKernel<<<blocks, kWarps * 32, sizeof(Memory), stream>>>(params);
    return cudaPeekAtLastError();
  }
};

}  // namespace kvmanager::device
