// Bytes are the CPU's: the operations of NearestCentroid (million_reference.h), unfused, in its order. This file is
// built with -fmad=false.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "codecs/million/million_encode_cuda.h"

namespace kvmanager::million {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// One side of a head of one layer.
struct Codebook {
  const uint8_t* codes;  // [head_dim][entries]
  const float* step;
  const float* mid;
};

__device__ __forceinline__ Codebook CodebookOf(const MillionDeviceShape& shape, const uint64_t* codebooks,
                                               const uint8_t* bytes, uint32_t layer, int head, int side) {
  const uint8_t* const at = bytes + codebooks[(uint64_t{layer} * shape.kv_heads + head) * 2 + side];
  return {at, reinterpret_cast<const float*>(at + shape.steps_at[side]),
          reinterpret_cast<const float*>(at + shape.mids_at[side])};
}
/// -127..127.
__device__ __forceinline__ float CodeOf(int side, uint8_t byte) {
  return static_cast<float>(static_cast<int8_t>(byte ^ (side == 0 ? 0x80 : 0)));
}
__device__ __forceinline__ float ElementOf(const uint16_t* from, bool bfloat16) {
  if (bfloat16) return __uint_as_float(uint32_t{*from} << 16);
  return __half2float(*reinterpret_cast<const __half*>(from));
}
__device__ __forceinline__ uint64_t RawOffset(const MillionDeviceShape& shape, int side, int head, int token) {
  return ((uint64_t(side) * shape.kv_heads + head) * shape.page_tokens + token) * shape.head_dim * 2;
}

/// Of which sides a launch is.
struct Sides {
  int first, count;
};
// A block has a strip of one side of one head of a page.
struct Place {
  uint32_t item;
  int head, side, strip;
};
__device__ __forceinline__ Place PlaceOf(const MillionDeviceShape& shape, Sides sides) {
  const uint32_t strips = shape.page_tokens / kStripTokens;
  uint32_t block = blockIdx.x;
  Place p;
  p.strip = int(block % strips), block /= strips;
  p.side = sides.first + int(block % sides.count), block /= sides.count;
  p.head = int(block % shape.kv_heads);
  p.item = block / shape.kv_heads;
  return p;
}

/// Zeros behind the side's indices; and no page is declined.
__device__ __forceinline__ void BeginPage(const MillionDeviceShape& shape, const Place& p, uint8_t* record,
                                          uint32_t* declined) {
  if (p.strip != 0) return;
  if (p.head == 0 && p.side == 0 && threadIdx.x == 0) declined[p.item] = 0;
  const uint32_t end = p.side == 0 ? shape.side[1].offset : shape.record_bytes;
  for (uint32_t i = shape.side[p.side].end + threadIdx.x; i < end; i += kThreads) record[i] = 0;
}

// ---- 2 channels to a subspace, indices of 8 bits ----

constexpr int kTogether = 8;  // centroids whose least key is compared with the best before

/// Of one subspace. Two arrays: every lane reads every centroid, and what is written to registers counts, so no
/// padding.
struct Centroids {
  float4 two[128];    // components of two centroids
  float4 halves[64];  // of four centroids' squared norms
};

/// One token's search. What it keeps is the first run of kTogether centroids that has the least key.
struct Search {
  float x, y;  // less mid
  float best = __builtin_huge_valf();
  int run = 0;

  __device__ __forceinline__ float Key(float half, float a, float b) const { return (half - x * a) - y * b; }
  /// The lowest index of the least key; 0 if no key is less than infinity.
  __device__ __forceinline__ int Find(const Centroids& centroids) const {
    const float2* const components = reinterpret_cast<const float2*>(centroids.two);
    const float* const halves = reinterpret_cast<const float*>(centroids.halves);
    int index = 0;
#pragma unroll
    for (int i = kTogether - 1; i >= 0; --i) {
      const float2 c = components[run + i];
      if (Key(halves[run + i], c.x, c.y) == best) index = run + i;
    }
    return best < __builtin_huge_valf() ? index : 0;
  }
};

/// A warp takes one subspace after another: a lane has two tokens.
__global__ void __launch_bounds__(kThreads)
    EncodePairs(const __grid_constant__ MillionDeviceShape shape, const uint64_t* codebooks, const uint8_t* bytes,
                const DeviceEncodeItem* items, uint32_t* declined, Sides sides) {
  constexpr int kCentroids = 256, kSubspaces = 32;  // that are read together
  __shared__ Centroids all_centroids[kWarps];
  __shared__ uint32_t rows[kStripTokens][kSubspaces + 1];
  const Place p = PlaceOf(shape, sides);
  const DeviceEncodeItem item = items[p.item];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Centroids& centroids = all_centroids[warp];
  const Codebook book = CodebookOf(shape, codebooks, bytes, item.layer, p.head, p.side);
  uint8_t* const record = item.encoded + uint64_t{shape.record_bytes} * p.head;
  const SideLayout& side = shape.side[p.side];
  uint8_t* const strip = record + side.offset + side.strip_bytes * p.strip;
  BeginPage(shape, p, record, declined);
  for (int first = 0; first < side.subspaces; first += kSubspaces) {
    const int count = min(kSubspaces, side.subspaces - first);
    __syncthreads();
    for (int i = threadIdx.x; i < kStripTokens * kSubspaces; i += kThreads) {
      const int t = i / kSubspaces, m = i % kSubspaces;
      const uint8_t* const row = item.raw + RawOffset(shape, p.side, p.head, kStripTokens * p.strip + t);
      if (m < count) rows[t][m] = reinterpret_cast<const uint32_t*>(row)[first + m];
    }
    __syncthreads();
    for (int m = warp; m < count; m += kWarps) {
      const int channel = 2 * (first + m);
      const float2 step = *reinterpret_cast<const float2*>(book.step + channel);
      const float2 mid = *reinterpret_cast<const float2*>(book.mid + channel);
      const uint8_t* const codes = book.codes + uint64_t(channel) * shape.entries[p.side];
      __syncwarp();
#pragma unroll
      for (int i = lane; i < kCentroids; i += 32) {
        const float a = step.x * CodeOf(p.side, codes[i]),
                    b = step.y * CodeOf(p.side, codes[shape.entries[p.side] + i]);
        reinterpret_cast<float2*>(centroids.two)[i] = make_float2(a, b);
        reinterpret_cast<float*>(centroids.halves)[i] = (a * a + b * b) * 0.5f;
      }
      __syncwarp();
      Search search[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t two = rows[2 * lane + k][m];
        const uint16_t low = uint16_t(two), high = uint16_t(two >> 16);
        search[k].x = ElementOf(&low, shape.bfloat16) - mid.x;
        search[k].y = ElementOf(&high, shape.bfloat16) - mid.y;
      }
#pragma unroll 2
      for (int run = 0; run < kCentroids; run += kTogether) {
        float least[2] = {__builtin_huge_valf(), __builtin_huge_valf()};
#pragma unroll
        for (int i = 0; i < kTogether; i += 4) {
          const float4 halves = centroids.halves[(run + i) / 4];
          const float4 c01 = centroids.two[(run + i) / 2], c23 = centroids.two[(run + i) / 2 + 1];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const Search& s = search[k];
            least[k] = fminf(least[k], fminf(s.Key(halves.x, c01.x, c01.y), s.Key(halves.y, c01.z, c01.w)));
            least[k] = fminf(least[k], fminf(s.Key(halves.z, c23.x, c23.y), s.Key(halves.w, c23.z, c23.w)));
          }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (least[k] < search[k].best) search[k].best = least[k], search[k].run = run;
        }
      }
      const int a = search[0].Find(centroids), b = search[1].Find(centroids);
      reinterpret_cast<uint16_t*>(strip + 64 * (first + m))[lane] = uint16_t(a | b << 8);
    }
  }
}

// ---- every other format ----

/// Index of a token of a subspace, from its planes, and its opposite, by the warp that has all tokens' indices.
__device__ __forceinline__ int IndexOf(const SideLayout& side, const uint8_t* strip, int subspace, int token) {
  int index = 0, low = 0;
  for (int i = 0; i < kPlanes; ++i) {
    const int b = 8 >> i;  // kPlaneBits
    if ((side.bits & b) == 0) continue;
    const uint8_t* const at = strip + side.plane[i] + subspace * 8 * b;
    const int byte = b == 1 ? token / 8 : token % (8 * b), shift = b == 1 ? token % 8 : token / (8 * b) * b;
    index |= (at[byte] >> shift & ((1 << b) - 1)) << low;
    low += b;
  }
  return index;
}
__device__ __forceinline__ void PackByWarp(const SideLayout& side, const uint16_t* indices, int subspace,
                                           uint8_t* strip) {
  int low = 0;
  for (int i = 0; i < kPlanes; ++i) {
    const int b = 8 >> i, parts = 8 / b;
    if ((side.bits & b) == 0) continue;
    uint8_t* const at = strip + side.plane[i] + subspace * 8 * b;
    for (int byte = threadIdx.x % 32; byte < 8 * b; byte += 32) {
      uint32_t packed = 0;
      for (int part = 0; part < parts; ++part) {
        const int token = b == 1 ? 8 * byte + part : part * 8 * b + byte;
        packed |= (indices[token] >> low & ((1 << b) - 1)) << part * b;
      }
      at[byte] = uint8_t(packed);
    }
    low += b;
  }
}

/// A warp takes one subspace after another, and 32 tokens at a time.
__global__ void __launch_bounds__(kThreads)
    EncodeGeneral(const __grid_constant__ MillionDeviceShape shape, const uint64_t* codebooks, const uint8_t* bytes,
                  const DeviceEncodeItem* items, uint32_t* declined, Sides sides) {
  __shared__ uint16_t indices[kWarps][kStripTokens];
  const Place p = PlaceOf(shape, sides);
  const DeviceEncodeItem item = items[p.item];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Codebook book = CodebookOf(shape, codebooks, bytes, item.layer, p.head, p.side);
  uint8_t* const record = item.encoded + uint64_t{shape.record_bytes} * p.head;
  const SideLayout& side = shape.side[p.side];
  uint8_t* const strip = record + side.offset + side.strip_bytes * p.strip;
  const uint32_t entries = shape.entries[p.side];
  BeginPage(shape, p, record, declined);
  for (int m = warp; m < side.subspaces; m += kWarps) {
    const int channel = m * side.width;
    __syncwarp();
    for (int t = lane; t < kStripTokens; t += 32) {
      const uint16_t* const x =
          reinterpret_cast<const uint16_t*>(item.raw + RawOffset(shape, p.side, p.head, kStripTokens * p.strip + t)) +
          channel;
      float best = __builtin_huge_valf();
      int nearest = 0;
      for (int i = 0; i < side.centroids; ++i) {
        float norm = 0;
        for (int k = 0; k < side.width; ++k) {
          const float y = book.step[channel + k] * CodeOf(p.side, book.codes[uint64_t{entries} * (channel + k) + i]);
          norm = norm + y * y;
        }
        float key = norm * 0.5f;
        for (int k = 0; k < side.width; ++k) {
          const float y = book.step[channel + k] * CodeOf(p.side, book.codes[uint64_t{entries} * (channel + k) + i]);
          key = key - (ElementOf(x + k, shape.bfloat16) - book.mid[channel + k]) * y;
        }
        if (key < best) best = key, nearest = i;
      }
      indices[warp][t] = uint16_t(nearest);
    }
    __syncwarp();
    PackByWarp(side, indices[warp], m, strip);
  }
}

/// The same for subspaces of few channels: a lane has two tokens, and makes one of 32 centroids that all lanes compare.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    EncodeNarrow(const __grid_constant__ MillionDeviceShape shape, const uint64_t* codebooks, const uint8_t* bytes,
                 const DeviceEncodeItem* items, uint32_t* declined, Sides sides) {
  __shared__ uint16_t indices[kWarps][kStripTokens];
  __shared__ float centroids[kWarps][32][kWidth + 1];  // components, and half their squared norm
  const Place p = PlaceOf(shape, sides);
  const DeviceEncodeItem item = items[p.item];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Codebook book = CodebookOf(shape, codebooks, bytes, item.layer, p.head, p.side);
  uint8_t* const record = item.encoded + uint64_t{shape.record_bytes} * p.head;
  const SideLayout& side = shape.side[p.side];
  uint8_t* const strip = record + side.offset + side.strip_bytes * p.strip;
  const uint32_t entries = shape.entries[p.side];
  BeginPage(shape, p, record, declined);
  for (int m = warp; m < side.subspaces; m += kWarps) {
    const int channel = m * kWidth;
    float step[kWidth], x[2][kWidth], best[2];
    int nearest[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < kWidth; ++k) step[k] = book.step[channel + k];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8_t* const row = item.raw + RawOffset(shape, p.side, p.head, kStripTokens * p.strip + 32 * i + lane);
      best[i] = __builtin_huge_valf();
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const uint16_t* const at = reinterpret_cast<const uint16_t*>(row) + channel + k;
        x[i][k] = ElementOf(at, shape.bfloat16) - book.mid[channel + k];
      }
    }
    for (int first = 0; first < side.centroids; first += 32) {
      const int count = min(32, side.centroids - first);
      __syncwarp();
      if (lane < count) {
        float norm = 0;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float y = step[k] * CodeOf(p.side, book.codes[uint64_t{entries} * (channel + k) + first + lane]);
          centroids[warp][lane][k] = y;
          norm = norm + y * y;
        }
        centroids[warp][lane][kWidth] = norm * 0.5f;
      }
      __syncwarp();
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        const float* const centroid = centroids[warp][j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float key = centroid[kWidth];
#pragma unroll
          for (int k = 0; k < kWidth; ++k) key = key - x[i][k] * centroid[k];
          if (key < best[i]) best[i] = key, nearest[i] = first + j;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) indices[warp][32 * i + lane] = uint16_t(nearest[i]);
    __syncwarp();
    PackByWarp(side, indices[warp], m, strip);
  }
}

__global__ void __launch_bounds__(kThreads)
    Decode(const __grid_constant__ MillionDeviceShape shape, const uint64_t* codebooks, const uint8_t* bytes,
           const DeviceDecodeItem* items) {
  const Place p = PlaceOf(shape, {0, 2});
  const DeviceDecodeItem item = items[p.item];
  const Codebook book = CodebookOf(shape, codebooks, bytes, item.layer, p.head, p.side);
  const SideLayout& side = shape.side[p.side];
  const uint8_t* const strip =
      item.encoded + uint64_t{shape.record_bytes} * p.head + side.offset + side.strip_bytes * p.strip;
  uint16_t* const to = reinterpret_cast<uint16_t*>(item.raw + RawOffset(shape, p.side, p.head, kStripTokens * p.strip));
  for (int i = threadIdx.x; i < kStripTokens * shape.head_dim; i += kThreads) {
    const int t = i / shape.head_dim, c = i % shape.head_dim;
    const int index = IndexOf(side, strip, c / side.width, t);
    const float value =
        book.mid[c] + book.step[c] * CodeOf(p.side, book.codes[uint64_t{shape.entries[p.side]} * c + index]);
    if (shape.bfloat16) {
      reinterpret_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(value);
    } else {
      reinterpret_cast<__half*>(to)[i] = __float2half_rn(value);
    }
  }
}

using EncodeKernel = void (*)(const MillionDeviceShape, const uint64_t*, const uint8_t*, const DeviceEncodeItem*,
                              uint32_t*, Sides);

EncodeKernel KernelFor(const SideLayout& side) {
  switch (side.width) {
    case 1:
      return EncodeNarrow<1>;
    case 2:
      return side.bits == 8 ? EncodePairs : EncodeNarrow<2>;
    case 4:
      return EncodeNarrow<4>;
    case 8:
      return EncodeNarrow<8>;
    default:
      return EncodeGeneral;
  }
}

uint32_t BlocksOf(const MillionDeviceShape& shape, uint32_t count, Sides sides) {
  return count * sides.count * shape.kv_heads * (shape.page_tokens / kStripTokens);
}

}  // namespace

int LaunchMillionEncode(const MillionDeviceShape& shape, const uint64_t* codebooks, const uint8_t* bytes,
                        const DeviceEncodeItem* items, uint32_t count, uint32_t* declined, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  const EncodeKernel kernels[] = {KernelFor(shape.side[0]), KernelFor(shape.side[1])};
  const auto launch = [&](Sides sides) {
    kernels[sides.first]<<<BlocksOf(shape, count, sides), kThreads, 0, stream>>>(shape, codebooks, bytes, items,
                                                                                 declined, sides);
  };
  if (kernels[0] == kernels[1]) {
    launch({0, 2});
  } else {
    launch({0, 1});
    launch({1, 1});
  }
  return cudaPeekAtLastError();
}

int LaunchMillionDecode(const MillionDeviceShape& shape, const uint64_t* codebooks, const uint8_t* bytes,
                        const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  Decode<<<BlocksOf(shape, count, {0, 2}), kThreads, 0, stream>>>(shape, codebooks, bytes, items);
  return cudaPeekAtLastError();
}

}  // namespace kvmanager::million
