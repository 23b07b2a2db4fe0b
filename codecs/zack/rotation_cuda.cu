#include <cuda_runtime_api.h>

#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack/rotation_device.cuh"

namespace kvmanager::zack {
namespace {

constexpr int kTokens = kRotatedTokens, kThreads = kRotateThreads, kNameThreads = 512;
constexpr int kMultiprocessors = 132, kSharedBytes = 227 << 10,
              kSharedReserved = 1 << 10;  // of blocks that run at once

/// One block. order: the items' numbers, layer by layer, so that a factor serves many pages. Shared memory: [layers].
template <class Item>
__global__ void __launch_bounds__(kNameThreads)
    NameKernel(const Item* items, uint32_t count, uint32_t layers, uint8_t* rotated, size_t page_bytes, Item* inner,
               uint32_t* order) {
  extern __shared__ uint32_t next[];  // by layer: pages, then the place of the next one
  for (uint32_t n = threadIdx.x; n < layers; n += kNameThreads) next[n] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < count; i += kNameThreads) {
    Item item = items[i];
    atomicAdd(&next[item.layer], 1);
    item.raw = rotated + i * page_bytes;
    inner[i] = item;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    uint32_t before = 0;
    for (uint32_t base = 0; base < layers; base += 32) {
      const uint32_t n = base + threadIdx.x, own = n < layers ? next[n] : 0;
      uint32_t sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(UINT32_MAX, sum, step);
        if (int(threadIdx.x) >= step) sum += other;
      }
      if (n < layers) next[n] = before + sum - own;
      before += __shfl_sync(UINT32_MAX, sum, 31);
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < count; i += kNameThreads) order[atomicAdd(&next[items[i].layer], 1)] = i;
}

/// Blocks: [side][kv_head] x shares of the pages. Page i is place(i, &from, &to): its layer.
template <int kDim, bool kBFloat16, Out kOut, class Place>
__device__ __forceinline__ void RotatePages(uint32_t count, const uint32_t* order, const uint8_t* factors, int kv_heads,
                                            Place place) {
  extern __shared__ __align__(16) uint8_t factor[];
  constexpr int kBytes = FactorBytes<kBFloat16>(kDim, kDim);
  const uint32_t side = blockIdx.x / kv_heads, head = blockIdx.x % kv_heads;
  const size_t at = (size_t{side} * kv_heads + head) * kTokens * kDim * 2;
  const uint32_t share = (count + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share;
  const uint32_t last = min(count, first + share);
  if (first >= last) return;
  const uint8_t* from;
  uint8_t* to;
  uint32_t layer = place(order[first], &from, &to), loaded = UINT32_MAX;
  RowsOfLane<kDim> rows, next;
  rows.Load(from + at, kDim);
  for (uint32_t n = first; n < last; ++n) {
    const uint32_t of = layer;
    uint8_t* const out = to + at;
    if (n + 1 < last) {  // while this page is multiplied
      layer = place(order[n + 1], &from, &to);
      next.Load(from + at, kDim);
    }
    if (of != loaded) {
      __syncthreads();
      LoadFactor(factor, factors + ((size_t{of} * kv_heads + head) * 2 + side) * kBytes, kBytes);
      __syncthreads();
      loaded = of;
    }
    RotateLoaded<kDim, kBFloat16, kOut>(rows, kDim, out, kDim, factor);
    rows = next;
  }
}

template <int kDim, bool kBFloat16>
__global__ void __launch_bounds__(kThreads)
    RotateRawKernel(const DeviceEncodeItem* items, uint32_t count, const uint32_t* order, const uint8_t* factors,
                    int kv_heads, uint8_t* rotated) {
  const size_t page_bytes = size_t{2} * kv_heads * kTokens * kDim * 2;
  RotatePages<kDim, kBFloat16, Out::kHalfOrInfinity>(count, order, factors, kv_heads,
                                                     [&](uint32_t i, const uint8_t** from, uint8_t** to) {
                                                       *from = items[i].raw, *to = rotated + i * page_bytes;
                                                       return items[i].layer;
                                                     });
}
template <int kDim, bool kToBFloat16>
__global__ void __launch_bounds__(kThreads)
    RotateBackKernel(const DeviceDecodeItem* items, uint32_t count, const uint32_t* order, const uint8_t* factors,
                     int kv_heads, const uint8_t* rotated) {
  const size_t page_bytes = size_t{2} * kv_heads * kTokens * kDim * 2;
  RotatePages<kDim, false, kToBFloat16 ? Out::kBFloat16 : Out::kHalf>(
      count, order, factors, kv_heads, [&](uint32_t i, const uint8_t** from, uint8_t** to) {
        *from = rotated + i * page_bytes, *to = items[i].raw;
        return items[i].layer;
      });
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
  const uint32_t sides = 2u * layout.kv_heads,
                 at_once = kMultiprocessors * (kSharedBytes / (shared_bytes + kSharedReserved));
  const uint32_t shares = at_once > sides ? at_once / sides : 1;  // of one wave
  kernel<<<dim3(sides, count < shares ? count : shares), kThreads, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

template <class Item>
cudaError_t Name(const DeviceRotation& r, const RotatedPages& pages, const Item* items, uint32_t count, Item* inner,
                 cudaStream_t stream) {
  NameKernel<<<1, kNameThreads, r.layers * sizeof(uint32_t), stream>>>(items, count, r.layers, pages.rotated,
                                                                       r.layout.raw_bytes(), inner, pages.order);
  return cudaGetLastError();
}

template <int kDim>
cudaError_t RotateRaw(const DeviceRotation& r, const RotatedPages& pages, const DeviceEncodeItem* items, uint32_t count,
                      cudaStream_t stream) {
  const auto launch = [&](auto kernel, int bytes) {
    return Launch(kernel, bytes, r.layout, count, stream, items, count, pages.order, r.encode, r.layout.kv_heads,
                  pages.rotated);
  };
  return r.layout.dtype == DType::kBFloat16 ? launch(RotateRawKernel<kDim, true>, FactorBytes<true>(kDim, kDim))
                                            : launch(RotateRawKernel<kDim, false>, FactorBytes<false>(kDim, kDim));
}
template <int kDim>
cudaError_t RotateBack(const DeviceRotation& r, const RotatedPages& pages, const DeviceDecodeItem* items,
                       uint32_t count, cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    return Launch(kernel, FactorBytes<false>(kDim, kDim), r.layout, count, stream, items, count, pages.order, r.decode,
                  r.layout.kv_heads, pages.rotated);
  };
  return r.layout.dtype == DType::kBFloat16 ? launch(RotateBackKernel<kDim, true>)
                                            : launch(RotateBackKernel<kDim, false>);
}

}  // namespace

int LaunchRotateRaw(const DeviceRotation& rotation, const RotatedPages& pages, const DeviceEncodeItem* items,
                    uint32_t count, DeviceEncodeItem* inner, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  const cudaError_t error = Name(rotation, pages, items, count, inner, stream);
  if (error != cudaSuccess) return error;
  return rotation.layout.head_dim == 128 ? RotateRaw<128>(rotation, pages, items, count, stream)
                                         : RotateRaw<64>(rotation, pages, items, count, stream);
}

int LaunchDeclineInfinite(const PageLayout& layout, const DeviceEncodeItem* inner, uint32_t count, uint32_t page_bytes,
                          uint32_t* declined, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  DeclineInfiniteKernel<<<count, 256, 0, stream>>>(inner, uint32_t(layout.raw_bytes() / 16), page_bytes / 16, declined);
  return cudaGetLastError();
}

int LaunchNameRotated(const DeviceRotation& rotation, const RotatedPages& pages, const DeviceDecodeItem* items,
                      uint32_t count, DeviceDecodeItem* inner, CUstream_st* stream) {
  return count == 0 ? cudaSuccess : Name(rotation, pages, items, count, inner, stream);
}

int LaunchRotateBack(const DeviceRotation& rotation, const RotatedPages& pages, const DeviceDecodeItem* items,
                     uint32_t count, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  return rotation.layout.head_dim == 128 ? RotateBack<128>(rotation, pages, items, count, stream)
                                         : RotateBack<64>(rotation, pages, items, count, stream);
}

}  // namespace kvmanager::zack
