#include <cuda_runtime.h>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/page_copy_neighbour.h"

namespace kvmanager {
namespace {

constexpr int kThreads = 256;
constexpr int kSharedBytes = 200 << 10;
constexpr int kLoadsInFlight = 16;

__global__ void __launch_bounds__(kThreads, 1) Read(const uint4* data, uint64_t words, uint32_t* sums) {
  extern __shared__ uint32_t shared[];
  const uint64_t stride = uint64_t{gridDim.x} * kThreads;
  uint32_t sum = 0;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += stride * kLoadsInFlight) {
    uint4 loaded[kLoadsInFlight];
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; ++j) {
      loaded[j] = i + j * stride < words ? __ldcs(data + i + j * stride) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int j = 0; j < kLoadsInFlight; ++j) sum += loaded[j].x ^ loaded[j].y ^ loaded[j].z ^ loaded[j].w;
  }
  shared[threadIdx.x] = sum;
  sums[blockIdx.x * kThreads + threadIdx.x] = shared[threadIdx.x];
}

}  // namespace

absl::Status EnqueueNeighbour(const uint8_t* data, uint64_t bytes, int multiprocessors, uint32_t* sums,
                              CUstream_st* stream) {
  KV_RETURN_IF_ERROR(CudaStatus(cudaFuncSetAttribute(Read, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
                                "cudaFuncSetAttribute"));
  Read<<<multiprocessors, kThreads, kSharedBytes, stream>>>(reinterpret_cast<const uint4*>(data), bytes / 16, sums);
  return CudaStatus(cudaGetLastError(), "neighbour launch");
}

}  // namespace kvmanager
