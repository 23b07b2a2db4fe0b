// A block has a head's factor for one side in shared memory, and goes through pages: a warp takes 16 tokens. Fragments
// of A come from memory directly, 16 bytes of a row to a lane (rotation_cuda_pack.cc has the order).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "codecs/zack/rotation_cuda.h"

namespace kvmanager::zack {
namespace {

constexpr int kTokens = 64, kThreads = 2 * kTokens;
constexpr int kBlocksWanted = 132 * 3;  // that run at once, about
constexpr float kHalfMax = 65504, kBFloat16Max = 0x1.fep127f;

template <bool kBFloat16>
__device__ __forceinline__ void Multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

enum class Out { kHalfOrInfinity, kHalf, kBFloat16 };

template <Out kOut>
__device__ __forceinline__ uint32_t ToTwo(float a, float b) {
  if constexpr (kOut == Out::kHalfOrInfinity) {
    // What is not a number would go unnoticed in the search for ranges.
    const auto infinite = [](float x) { return x == x ? x : __builtin_huge_valf(); };
    const __half2 two = __floats2half2_rn(infinite(a), infinite(b));
    return *reinterpret_cast<const uint32_t*>(&two);
  } else if constexpr (kOut == Out::kHalf) {
    const __half2 two = __floats2half2_rn(fminf(fmaxf(a, -kHalfMax), kHalfMax), fminf(fmaxf(b, -kHalfMax), kHalfMax));
    return *reinterpret_cast<const uint32_t*>(&two);
  } else {
    const __nv_bfloat162 two = __floats2bfloat162_rn(fminf(fmaxf(a, -kBFloat16Max), kBFloat16Max),
                                                     fminf(fmaxf(b, -kBFloat16Max), kBFloat16Max));
    return *reinterpret_cast<const uint32_t*>(&two);
  }
}

template <int kDim, bool kBFloat16>
struct Factor {
  static constexpr int kParts = kBFloat16 ? 3 : 2;
  static constexpr int kBytes = kDim * kDim * 2 * kParts + 16;
};

/// 16 tokens of a warp: from and to [64][kDim].
template <int kDim, bool kBFloat16, Out kOut>
__device__ __forceinline__ void RotateRows(const uint8_t* from, uint8_t* to, const uint8_t* factor) {
  constexpr int kParts = Factor<kDim, kBFloat16>::kParts, kTiles = kDim / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const size_t row = size_t(16 * warp + g) * kDim * 2 + 16 * t;
  uint4 rows[kDim / 32][2];
#pragma unroll
  for (int kb = 0; kb < kDim / 32; ++kb) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[kb][r] = __ldg(reinterpret_cast<const uint4*>(from + row + size_t(8 * r) * kDim * 2 + 64 * kb));
    }
  }
  float sums[kTiles][4] = {};
#pragma unroll
  for (int kb = 0; kb < kDim / 32; ++kb) {
#pragma unroll
    for (int ks = 0; ks < 2; ++ks) {
      const uint4 low = rows[kb][0], high = rows[kb][1];
      const uint32_t a[4] = {ks == 0 ? low.x : low.z, ks == 0 ? high.x : high.z, ks == 0 ? low.y : low.w,
                             ks == 0 ? high.y : high.w};
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const uint2* const b =
            reinterpret_cast<const uint2*>(factor) + (((kb * 2 + ks) * kTiles + j) * 32 + lane) * kParts;
        if constexpr (kParts == 2) {
          const uint4 both = *reinterpret_cast<const uint4*>(b);
          Multiply<kBFloat16>(sums[j], a, both.z, both.w);  // the small part first
          Multiply<kBFloat16>(sums[j], a, both.x, both.y);
        } else {
#pragma unroll
          for (int part = kParts - 1; part >= 0; --part) Multiply<kBFloat16>(sums[j], a, b[part].x, b[part].y);
        }
      }
    }
  }
  const float scale = *reinterpret_cast<const float*>(factor + Factor<kDim, kBFloat16>::kBytes - 16);
#pragma unroll
  for (int m = 0; m < kTiles / 4; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = ToTwo<kOut>(sums[4 * m + j][2 * r] * scale, sums[4 * m + j][2 * r + 1] * scale);
      }
      *reinterpret_cast<uint4*>(to + row + size_t(8 * r) * kDim * 2 + 64 * m) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

/// Blocks: [side][kv_head] x shares of the pages. Page i is place(i, &from, &to): its layer.
template <int kDim, bool kBFloat16, Out kOut, class Place>
__device__ __forceinline__ void RotatePages(uint32_t count, const uint8_t* factors, int kv_heads, Place place) {
  extern __shared__ __align__(16) uint8_t factor[];
  constexpr int kBytes = Factor<kDim, kBFloat16>::kBytes;
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
      for (int n = 16 * threadIdx.x; n < kBytes; n += 16 * kThreads) {
        *reinterpret_cast<uint4*>(factor + n) = __ldg(reinterpret_cast<const uint4*>(source + n));
      }
      __syncthreads();
      loaded = layer;
    }
    RotateRows<kDim, kBFloat16, kOut>(from + at, to + at, factor);
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
             ? Launch(RotateRawKernel<kDim, true>, Factor<kDim, true>::kBytes, r.layout, count, stream, items, count,
                      r.encode, heads, rotated, inner)
             : Launch(RotateRawKernel<kDim, false>, Factor<kDim, false>::kBytes, r.layout, count, stream, items, count,
                      r.encode, heads, rotated, inner);
}
template <int kDim>
cudaError_t RotateBack(const DeviceRotation& r, const DeviceDecodeItem* items, uint32_t count, const uint8_t* rotated,
                       cudaStream_t stream) {
  const int heads = r.layout.kv_heads;
  constexpr int kBytes = Factor<kDim, false>::kBytes;
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
