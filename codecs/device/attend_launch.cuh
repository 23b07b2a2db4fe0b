// From the template of a kernel to its functions.
#pragma once

#include <cuda_runtime.h>

#include "codecs/device/attend_kernel.cuh"
#include "codecs/device/attend_launch.h"

namespace kvmanager::device {

/// So that it may begin while the kernel before it ends: once that lets it (LetNextBegin), or is done.
template <class Params>
cudaError_t LaunchIntoEnd(void (*kernel)(Params), dim3 blocks, int threads, size_t shared_bytes, CUstream_st* stream,
                          const Params& params) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <class Raw, class Encoded, int kWarps, int kStages, int kBlocksPerSm>
struct Attend {
  using Memory = AttendMemory<Raw, Encoded, kWarps, kStages>;
  static_assert(sizeof(Memory) * kBlocksPerSm + 1024 * kBlocksPerSm <= 228 * 1024, "a multiprocessor has 228 KiB");
  static constexpr auto kKernel = AttendKernel<Raw, Encoded, kWarps, kStages, kBlocksPerSm>;
  static constexpr int kThreads = kWarps * 32, kHeadDim = Encoded::kHeadDim;

  static int Prepare() {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
  }
  static int Launch(const AttendParams& params, int blocks, CUstream_st* stream) {
    if constexpr (LaunchedIntoEnd<Encoded>()) {
      return LaunchIntoEnd(kKernel, blocks, kThreads, sizeof(Memory), stream, params);
    }
    kKernel<<<blocks, kThreads, sizeof(Memory), stream>>>(params);
    return cudaPeekAtLastError();
  }
};

/// Base, where encoded pages stand in a space of their own: q is mapped before, outputs are brought together behind.
template <class Base>
struct LaunchApart : Base {
  static constexpr int kHeadDim = Base::kHeadDim;

  static int Launch(const AttendParams& params, int blocks, CUstream_st* stream) {
    const int rows = static_cast<int>(params.tokens) * (params.query_heads / params.kv_heads);
    const dim3 map_blocks(params.kv_heads, (rows + kMapRows - 1) / kMapRows);
    cudaError_t error = LaunchIntoEnd(MapKernel<kHeadDim>, map_blocks, MapBlock<kHeadDim>::kThreads, 0, stream, params);
    if (error == cudaSuccess) {
      error = LaunchIntoEnd(Base::kKernel, blocks, Base::kThreads, sizeof(typename Base::Memory), stream, params);
    }
    if (error == cudaSuccess) {
      error = LaunchIntoEnd(ExpandKernel<kHeadDim>, map_blocks, MapBlock<kHeadDim>::kThreads, 0, stream, params);
    }
    return error;
  }
};
template <class Raw, class Encoded, int kWarps, int kStages, int kBlocksPerSm>
using AttendApart = LaunchApart<Attend<Raw, Encoded, kWarps, kStages, kBlocksPerSm>>;

/// A kernel for tiles of at most 4 rows, and one for all, as one.
template <template <int kRows> class Kernel>
struct AttendByRows {
  static int Launch(const AttendParams& params, int rows_max, int blocks, CUstream_st* stream) {
    return rows_max <= 4 ? Kernel<4>::Launch(params, blocks, stream) : Kernel<8>::Launch(params, blocks, stream);
  }
  static int Prepare() {
    const int error = Kernel<4>::Prepare();
    return error != 0 ? error : Kernel<8>::Prepare();
  }
};

}  // namespace kvmanager::device
