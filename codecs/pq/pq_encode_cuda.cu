// Codes of keys on a GPU: those of Kernels::nearest, bit for bit. This file is built with -fmad=false.
//
// The nearest centroid has the least |c|^2 / 2 - x . c, an unfused fp32 sum in the order of channels, which takes 64
// operations of a centroid and 32 channels. So tensor cores find it first: 16-bit centroids, of which x . c is known
// within a bound; where the second best is further away than twice that bound the best is sure, and only other tokens
// (some 5% of random ones) are searched in fp32.
//
// The bound: with c' the rounded centroid, |x . c - x . c'| <= |x| max |c - c'|. The matrix instruction adds exact
// products with truncated additions, and the fp32 search rounds 64 times: each is off by less than 2^-17 |x| |c|. Keys
// carry the centroid's number in their lowest 8 bits: 2^-15 of what they are.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codecs/device/mma_device.cuh"
#include "codecs/pq/pq_device.h"

namespace kvmanager::pq {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kTiles = 2;  // of 16 tokens to a warp
static_assert(kWarps * kTiles * 16 == kEncodeTokensMax);
constexpr unsigned kAll = 0xffffffffu;
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kTiny = 1e-15f;

__device__ __forceinline__ uint16_t Rounded(float x, bool bfloat16) {
  return bfloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}
__device__ __forceinline__ float ToFloat(uint32_t bits, bool bfloat16) {
  return bfloat16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(uint16_t(bits)));
}

/// Widths of sub-vectors whose fragments there are.
__host__ __device__ constexpr bool HasFragments(int width) { return width == 16 || width == 32 || width == 64; }

/// The channel that lane t of a row has as its j-th: width / 4 neighbours to a lane, four of them to a step of 16
/// channels, so that rows of x are read 16 bytes at a time. What is contracted has no order of its own.
__device__ __forceinline__ int ChannelOf(int width, int t, int j) { return t * (width / 4) + j; }

/// A block has a sub-vector of one head of one codebook.
/// Fragments: [tile of 8 centroids][lane][steps][2] of two channels: B of m16n8k16, lane (g, t): centroid g.
__global__ void __launch_bounds__(256) PrepareBooks(const __grid_constant__ DeviceShape shape, uint8_t* const* books) {
  const int sub = blockIdx.x % shape.m, head = blockIdx.x / shape.m % shape.kv_heads;
  uint8_t* const book = books[blockIdx.x / shape.m / shape.kv_heads];
  const int width = shape.width(), count = shape.count(), at = head * shape.m + sub;
  const float* const centroids = reinterpret_cast<const float*>(book) + size_t(at) * width * count;
  const float* const half_norms = reinterpret_cast<const float*>(book + shape.half_norms_at()) + size_t(at) * count;
  float off = 0, norm = 0, half_norm = 0;
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    float off2 = 0, norm2 = 0;
    for (int j = 0; j < width; ++j) {
      const float x = centroids[size_t(j) * count + c], y = ToFloat(Rounded(x, shape.bfloat16), shape.bfloat16) - x;
      off2 += y * y, norm2 += x * x;
    }
    off = fmaxf(off, sqrtf(off2)), norm = fmaxf(norm, sqrtf(norm2)), half_norm = fmaxf(half_norm, half_norms[c]);
    // fmaxf forgets what is no number.
    if (!(off2 < kInfinity) || !(norm2 < kInfinity) || !(half_norms[c] < kInfinity)) half_norm = kInfinity;
  }
  __shared__ float most[3][256];
  most[0][threadIdx.x] = off, most[1][threadIdx.x] = norm, most[2][threadIdx.x] = half_norm;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 256; ++i) {
      off = fmaxf(off, most[0][i]), norm = fmaxf(norm, most[1][i]), half_norm = fmaxf(half_norm, most[2][i]);
    }
    // Squares that are nearly no numbers any more are not relied on.
    if (norm < kTiny) half_norm = kInfinity;
    // Of |x|, and what does not depend on x; with something to spare.
    reinterpret_cast<float2*>(book + shape.bounds_at())[at] =
        make_float2(off * 1.01f + norm * 0x1p-14f, half_norm * 0x1p-14f);
  }
  if (!HasFragments(width)) return;
  uint16_t* const fragments = reinterpret_cast<uint16_t*>(book + shape.fragments_at()) + size_t(at) * width * count;
  for (int i = threadIdx.x; i < width * count; i += blockDim.x) {
    const int j = i % (width / 4), lane = i / (width / 4) % 32, tile = i / (width / 4) / 32;
    const int c = tile * 8 + lane / 4, channel = ChannelOf(width, lane % 4, j);
    fragments[i] = Rounded(centroids[size_t(channel) * count + c], shape.bfloat16);
  }
}

using device::Multiply;

/// The two least keys of a row; a key's lowest bits are its centroid.
struct Best {
  float first, second;
  __device__ __forceinline__ void Add(float key, uint32_t centroid) {
    key = __uint_as_float((__float_as_uint(key) & 0xffffff00u) | centroid);
    second = fminf(second, fmaxf(first, key));
    first = fminf(first, key);
  }
  /// With the other lanes' of the row.
  __device__ __forceinline__ void Join(int mask) {
    const float a = __shfl_xor_sync(kAll, first, mask), b = __shfl_xor_sync(kAll, second, mask);
    second = fminf(fmaxf(first, a), fminf(second, b));
    first = fminf(first, a);
  }
};

/// All lanes search all centroids of one sub-vector: a lane has every 32nd. Without branches, so that loads overlap.
__device__ __forceinline__ uint32_t Nearest(const uint16_t* x, int width, bool bfloat16, const float* centroids,
                                            const float* half_norms, int count) {
  constexpr int kEach = 8;
  const int lane = threadIdx.x % 32;
  int at[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) at[i] = min(32 * i + lane, count - 1);  // the last one again changes nothing
  float dot[kEach] = {};
#pragma unroll 4
  for (int j = 0; j < width; ++j) {
    const float y = ToFloat(__ldg(x + j), bfloat16);
#pragma unroll
    for (int i = 0; i < kEach; ++i) dot[i] = dot[i] + y * __ldg(centroids + size_t(j) * count + at[i]);
  }
  float best = kInfinity;
  uint32_t nearest = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float distance = __ldg(half_norms + at[i]) - dot[i];
    if (distance < best) best = distance, nearest = at[i];
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = __shfl_xor_sync(kAll, best, mask);
    const uint32_t other_nearest = __shfl_xor_sync(kAll, nearest, mask);
    if (other < best || (other == best && other_nearest < nearest)) best = other, nearest = other_nearest;
  }
  return nearest;
}

/// A block has an item's tokens of one KV head, a warp kTiles * 16 of them. kWidth 0: any, by the search alone.
template <int kWidth, bool kBFloat16>
__global__ void __launch_bounds__(kThreads)
    Encode(const __grid_constant__ DeviceShape shape, const uint8_t* pool, const uint32_t* slots,
           const DeviceIndexTable table, const DeviceEncodeCodes* items) {
  const DeviceEncodeCodes item = items[blockIdx.x / shape.kv_heads];
  const int head = blockIdx.x % shape.kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const uint32_t first = warp * kTiles * 16;
  if (first >= item.tokens) return;
  const auto in_index = [&](uint32_t at) {
    return const_cast<uint8_t*>(table.pool) + __ldg(table.slots + item.index + at) * kRowUnitBytes;
  };
  const uint8_t* const book = in_index(0);
  const int width = kWidth == 0 ? shape.width() : kWidth, count = shape.count();
  const auto row_of = [&](uint32_t index) {  // of the item; beyond it the last token stands in
    const uint32_t token = item.first + min(index, item.tokens - 1), page = token / shape.page_tokens;
    const uint8_t* const slot = pool + __ldg(slots + item.table + page) * kRowUnitBytes;
    return reinterpret_cast<const uint16_t*>(slot) +
           size_t(head * shape.page_tokens + token % shape.page_tokens) * shape.head_dim;
  };
  // Lane l's: row l of the warp's tokens.
  const uint16_t* const my_row = row_of(first + lane);
  const auto row_at = [&](int r) {
    return reinterpret_cast<const uint16_t*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(my_row), r));
  };
  const uint16_t* rows[kTiles][2];  // of this lane's fragments
#pragma unroll
  for (int i = 0; i < kTiles; ++i) rows[i][0] = row_at(16 * i + g), rows[i][1] = row_at(16 * i + 8 + g);
  uint32_t word = 0;  // of row `lane`
  uint32_t* const out = reinterpret_cast<uint32_t*>(in_index(1 + item.first / kCodeChunkTokens)) +
                        size_t(head) * shape.words() * kCodeChunkTokens + item.first % kCodeChunkTokens;
  for (int s = 0; s < shape.m; ++s) {
    const int at = head * shape.m + s;
    const float* const centroids = reinterpret_cast<const float*>(book) + size_t(at) * width * count;
    const float* const half_norms = reinterpret_cast<const float*>(book + shape.half_norms_at()) + size_t(at) * count;
    uint32_t code = 0, unsure = kAll;  // of row `lane`; of all rows
    if constexpr (kWidth != 0) {
      constexpr int kSteps = kWidth / 16;
      const float2 bound = __ldg(reinterpret_cast<const float2*>(book + shape.bounds_at()) + at);
      uint32_t a[kTiles][kSteps][4];
      float squares[kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t x[2 * kSteps];
          const auto* const from = rows[i][h] + s * kWidth + t * (kWidth / 4);
          if constexpr (kSteps == 1) {
            const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
            x[0] = v.x, x[1] = v.y;
          } else {
#pragma unroll
            for (int k = 0; k < kSteps / 2; ++k) {
              const uint4 v = __ldg(reinterpret_cast<const uint4*>(from) + k);
              x[4 * k] = v.x, x[4 * k + 1] = v.y, x[4 * k + 2] = v.z, x[4 * k + 3] = v.w;
            }
          }
          float sum = 0;
#pragma unroll
          for (int k = 0; k < 2 * kSteps; ++k) {
            const float low = ToFloat(x[k] & 0xffff, kBFloat16), high = ToFloat(x[k] >> 16, kBFloat16);
            sum = fmaf(low, low, fmaf(high, high, sum));
            // Negative: keys begin at half the norm.
            a[i][k / 2][k % 2 * 2 + h] = x[k] ^ 0x80008000u;
          }
          sum += __shfl_xor_sync(kAll, sum, 1);
          squares[i][h] = sum + __shfl_xor_sync(kAll, sum, 2);
        }
      }
      Best best[kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) best[i][0] = best[i][1] = {kInfinity, kInfinity};
      const uint32_t* const fragments =
          reinterpret_cast<const uint32_t*>(book + shape.fragments_at()) + size_t(at) * (kWidth / 2) * count;
#pragma unroll 4
      for (int tile = 0; tile < count / 8; ++tile) {
        uint32_t b[2 * kSteps];
        const auto* const from = fragments + (tile * 32 + lane) * (2 * kSteps);
        if constexpr (kSteps == 1) {
          const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
          b[0] = v.x, b[1] = v.y;
        } else {
#pragma unroll
          for (int k = 0; k < kSteps / 2; ++k) {
            const uint4 v = __ldg(reinterpret_cast<const uint4*>(from) + k);
            b[4 * k] = v.x, b[4 * k + 1] = v.y, b[4 * k + 2] = v.z, b[4 * k + 3] = v.w;
          }
        }
        const float2 half = __ldg(reinterpret_cast<const float2*>(half_norms + tile * 8) + t);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          float d[4] = {half.x, half.y, half.x, half.y};
#pragma unroll
          for (int k = 0; k < kSteps; ++k) Multiply<kBFloat16>(d, a[i][k], b[2 * k], b[2 * k + 1]);
#pragma unroll
          for (int j = 0; j < 4; ++j) best[i][j / 2].Add(d[j], tile * 8 + j % 2);
        }
      }
      unsure = 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          Best& b = best[i][h];
          // Which of a tile's columns this lane has.
          b.first = __uint_as_float(__float_as_uint(b.first) | 2 * t);
          b.Join(1), b.Join(2);
          const float away = 2 * (sqrtf(squares[i][h]) * bound.x + bound.y);
          const bool sure = b.second - b.first > away && squares[i][h] > kTiny * kTiny;
          const uint32_t not_sure = __ballot_sync(kAll, !sure);
          // Row g of the eight is said by lane 4 g.
          const int row = lane - (16 * i + 8 * h);
          const uint32_t said = __shfl_sync(kAll, __float_as_uint(b.first) & 255, (row & 7) * 4);
          if (row >= 0 && row < 8) code = said;
#pragma unroll
          for (int r = 0; r < 8; ++r) unsure |= (not_sure >> (4 * r) & 1) << (16 * i + 8 * h + r);
        }
      }
    }
    if (first + 32 > item.tokens) unsure &= (1u << (item.tokens - first)) - 1;
    while (unsure != 0) {
      const int r = __ffs(unsure) - 1;
      unsure &= unsure - 1;
      const uint32_t found = Nearest(row_at(r) + s * width, width, kBFloat16, centroids, half_norms, count);
      if (lane == r) code = found;
    }
    word |= code << 8 * (s % kCodesOfWord);
    if (s % kCodesOfWord == kCodesOfWord - 1 || s + 1 == shape.m) {
      if (first + lane < item.tokens) out[size_t(s / kCodesOfWord) * kCodeChunkTokens + first + lane] = word;
      word = 0;
    }
  }
}

template <bool kBFloat16>
auto KernelFor(int width) {
  return width == 16   ? Encode<16, kBFloat16>
         : width == 32 ? Encode<32, kBFloat16>
         : width == 64 ? Encode<64, kBFloat16>
                       : Encode<0, kBFloat16>;
}

}  // namespace

int LaunchPqPrepareBooks(const DeviceShape& shape, uint8_t* const* books, uint32_t count, CUstream_st* stream) {
  if (count == 0) return 0;
  PrepareBooks<<<count * shape.kv_heads * shape.m, 256, 0, stream>>>(shape, books);
  return cudaPeekAtLastError();
}

int LaunchPqEncode(const DeviceShape& shape, const uint8_t* pool, const uint32_t* slots, const DeviceIndexTable& table,
                   const DeviceEncodeCodes* items, uint32_t count, CUstream_st* stream) {
  if (count == 0) return 0;
  const auto kernel = shape.bfloat16 ? KernelFor<true>(shape.width()) : KernelFor<false>(shape.width());
  kernel<<<count * shape.kv_heads, kThreads, 0, stream>>>(shape, pool, slots, table, items);
  return cudaPeekAtLastError();
}

}  // namespace kvmanager::pq
