#include <cuda_runtime_api.h>

#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack/rotation_device.cuh"

namespace kvmanager::zack {
namespace {

constexpr int kTokens = kRotatedTokens, kThreads = kRotateThreads;
constexpr int kBlocksWanted = 132 * 3;  // that run at once, about

/// Blocks: [side][kv_head] x shares of the pages. Page i is place(i, &from, &to): its layer.
template <int kDim, bool kBFloat16, Out kOut, class Place>
__device__ __forceinline__ void RotatePages(uint32_t count, const uint8_t* factors, int kv_heads, Place place) {
  extern __shared__ __align__(16) uint8_t factor[];
  constexpr int kBytes = FactorBytes<kBFloat16>(kDim, kDim);
  const uint32_t side = blockIdx.x / kv_heads, head = blockIdx.x % kv_heads;
  const size_t at = (size_t{side} * kv_heads + head) * kTokens * kDim * 2;
  uint32_t loaded = UINT32_MAX;
  for (uint32_t i = blockIdx.y; i < count; i += gridDim.y) {
    const uint8_t* from;
    uint8_t* to;
    const uint32_t layer = place(i, &from, &to);
    if (layer != loaded) {
      const uint8_t* const source = factors + ((size_t{layer} * kv_heads + head) * 2 + side) * kBytes;
      __syncthreads();
      LoadFactor(factor, source, kBytes);
      __syncthreads();
      loaded = layer;
    }
    RotateRows<kDim, kBFloat16, kOut>(from + at, kDim, to + at, kDim, factor);
  }
}

template <int kDim, bool kBFloat16>
__global__ void __launch_bounds__(kThreads)
    RotateRawKernel(const DeviceEncodeItem* items, uint32_t count, const uint8_t* factors, int kv_heads,
                    uint8_t* rotated, DeviceEncodeItem* inner) {
  const size_t page_bytes = size_t{2} * kv_heads * kTokens * kDim * 2;
  RotatePages<kDim, kBFloat16, Out::kHalfOrInfinity>(count, factors, kv_heads,
                                                     [&](uint32_t i, const uint8_t** from, uint8_t** to) {
                                                       DeviceEncodeItem item = items[i];
                                                       *from = item.raw, *to = rotated + i * page_bytes;
                                                       item.raw = *to;
                                                       if (blockIdx.x == 0 && threadIdx.x == 0) inner[i] = item;
                                                       return item.layer;
                                                     });
}
template <int kDim, bool kToBFloat16>
__global__ void __launch_bounds__(kThreads)
    RotateBackKernel(const DeviceDecodeItem* items, uint32_t count, const uint8_t* factors, int kv_heads,
                     const uint8_t* rotated) {
  const size_t page_bytes = size_t{2} * kv_heads * kTokens * kDim * 2;
  RotatePages<kDim, false, kToBFloat16 ? Out::kBFloat16 : Out::kHalf>(
      count, factors, kv_heads, [&](uint32_t i, const uint8_t** from, uint8_t** to) {
        *from = rotated + i * page_bytes, *to = items[i].raw;
        return items[i].layer;
      });
}
__global__ void NameKernel(const DeviceDecodeItem* items, uint32_t count, uint8_t* rotated, size_t page_bytes,
                           DeviceDecodeItem* inner) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  DeviceDecodeItem item = items[i];
  item.raw = rotated + i * page_bytes;
  inner[i] = item;
}

/// A block per page. vectors: 16 bytes each, of a raw page and of an encoded one.
__global__ void DeclineInfiniteKernel(const DeviceEncodeItem* inner, uint32_t raw_vectors, uint32_t encoded_vectors,
                                      uint32_t* declined) {
  const DeviceEncodeItem item = inner[blockIdx.x];
  int infinite = 0;
  for (uint32_t i = threadIdx.x; i < raw_vectors; i += blockDim.x) {
    const uint4 eight = reinterpret_cast<const uint4*>(item.raw)[i];
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (const uint32_t word : words) {
      infinite |= (word & 0x7c00u) == 0x7c00u || (word & 0x7c000000u) == 0x7c000000u;
    }
  }
  if (__syncthreads_or(infinite) == 0) return;
  for (uint32_t i = threadIdx.x; i < encoded_vectors; i += blockDim.x) {
    reinterpret_cast<uint4*>(item.encoded)[i] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) declined[blockIdx.x] = 1;
}

template <typename Kernel, typename... Arguments>
cudaError_t Launch(Kernel kernel, int shared_bytes, const PageLayout& layout, uint32_t count, cudaStream_t stream,
                   Arguments... arguments) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const uint32_t sides = 2u * layout.kv_heads, shares = (kBlocksWanted + sides - 1) / sides;
  kernel<<<dim3(sides, count < shares ? count : shares), kThreads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

template <int kDim>
cudaError_t RotateRaw(const DeviceRotation& r, const DeviceEncodeItem* items, uint32_t count, uint8_t* rotated,
                      DeviceEncodeItem* inner, cudaStream_t stream) {
  const int heads = r.layout.kv_heads;
  return r.layout.dtype == DType::kBFloat16
             ? Launch(RotateRawKernel<kDim, true>, FactorBytes<true>(kDim, kDim), r.layout, count, stream, items, count,
                      r.encode, heads, rotated, inner)
             : Launch(RotateRawKernel<kDim, false>, FactorBytes<false>(kDim, kDim), r.layout, count, stream, items,
                      count, r.encode, heads, rotated, inner);
}
template <int kDim>
cudaError_t RotateBack(const DeviceRotation& r, const DeviceDecodeItem* items, uint32_t count, const uint8_t* rotated,
                       cudaStream_t stream) {
  const int heads = r.layout.kv_heads;
  constexpr int kBytes = FactorBytes<false>(kDim, kDim);
  return r.layout.dtype == DType::kBFloat16 ? Launch(RotateBackKernel<kDim, true>, kBytes, r.layout, count, stream,
                                                     items, count, r.decode, heads, rotated)
                                            : Launch(RotateBackKernel<kDim, false>, kBytes, r.layout, count, stream,
                                                     items, count, r.decode, heads, rotated);
}

}  // namespace

int LaunchRotateRaw(const DeviceRotation& rotation, const DeviceEncodeItem* items, uint32_t count, uint8_t* rotated,
                    DeviceEncodeItem* inner, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  return rotation.layout.head_dim == 128 ? RotateRaw<128>(rotation, items, count, rotated, inner, stream)
                                         : RotateRaw<64>(rotation, items, count, rotated, inner, stream);
}

int LaunchDeclineInfinite(const PageLayout& layout, const DeviceEncodeItem* inner, uint32_t count, uint32_t page_bytes,
                          uint32_t* declined, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  DeclineInfiniteKernel<<<count, 256, 0, stream>>>(inner, uint32_t(layout.raw_bytes() / 16), page_bytes / 16, declined);
  return cudaGetLastError();
}

int LaunchNameRotated(const DeviceRotation& rotation, const DeviceDecodeItem* items, uint32_t count, uint8_t* rotated,
                      DeviceDecodeItem* inner, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  NameKernel<<<(count + 255) / 256, 256, 0, stream>>>(items, count, rotated, rotation.layout.raw_bytes(), inner);
  return cudaGetLastError();
}

int LaunchRotateBack(const DeviceRotation& rotation, const DeviceDecodeItem* items, uint32_t count,
                     const uint8_t* rotated, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  return rotation.layout.head_dim == 128 ? RotateBack<128>(rotation, items, count, rotated, stream)
                                         : RotateBack<64>(rotation, items, count, rotated, stream);
}

}  // namespace kvmanager::zack
