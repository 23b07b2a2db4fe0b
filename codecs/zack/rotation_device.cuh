// Products of pages' rows with factors in kernels: rows of K or V into a space that a codec stores, and back.
//
// A block has the factor in shared memory, and its four warps take 16 of a page's 64 tokens each. Fragments of A come
// from memory directly, 16 bytes of a row to a lane (rotation_cuda_pack.cc has the order).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "codecs/device/mma_device.cuh"

namespace kvmanager::zack {

constexpr int kRotatedTokens = 64, kRotateThreads = 2 * kRotatedTokens;
constexpr int kFactorHeaderBytes = 16;  // the scale

using device::Multiply;

enum class Out { kHalfOrInfinity, kHalf, kBFloat16 };

/// What is not a number becomes an infinity: it would go unnoticed in the search for ranges.
__device__ __forceinline__ float OrInfinity(float x) { return x == x ? x : __builtin_huge_valf(); }

template <Out kOut>
__device__ __forceinline__ uint32_t ToTwo(float a, float b) {
  constexpr float kHalfMax = 65504, kBFloat16Max = 0x1.fep127f;
  if constexpr (kOut == Out::kHalfOrInfinity) {
    const __half2 two = __floats2half2_rn(OrInfinity(a), OrInfinity(b));
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

/// Of a packed factor [rows][columns].
template <bool kBFloat16>
__host__ __device__ constexpr int FactorBytes(int rows, int columns) {
  const int parts = kBFloat16 ? 3 : 2;
  return kFactorHeaderBytes + (rows + 31) / 32 * 32 * ((columns + 31) / 32 * 32) * 2 * parts;
}

/// By all threads of a block; nobody uses what is there any more.
__device__ __forceinline__ void LoadFactor(uint8_t* to, const uint8_t* from, int bytes) {
  for (int n = 16 * threadIdx.x; n < bytes; n += 16 * kRotateThreads) {
    *reinterpret_cast<uint4*>(to + n) = __ldg(reinterpret_cast<const uint4*>(from + n));
  }
}

/// sums += a16 b of 32 columns: a16 has two rows of a lane, 8 of each 32 elements; b: the lane's place in the columns'
/// part of a packed factor of `rows` rows.
template <int kRowsMax, bool kBFloat16>
__device__ __forceinline__ void MultiplyPacked(const uint4 (&a16)[kRowsMax / 32][2], const uint2* b, int rows,
                                               float (&sums)[4][4]) {
  constexpr int kParts = kBFloat16 ? 3 : 2;
#pragma unroll
  for (int kb = 0; kb < kRowsMax / 32; ++kb) {
    if (32 * kb >= rows) break;
#pragma unroll
    for (int ks = 0; ks < 2; ++ks) {
      const uint4 low = a16[kb][0], high = a16[kb][1];
      const uint32_t a[4] = {ks == 0 ? low.x : low.z, ks == 0 ? high.x : high.z, ks == 0 ? low.y : low.w,
                             ks == 0 ? high.y : high.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2* const of = b + ((kb * 2 + ks) * 4 + j) * 32 * kParts;
        if constexpr (kParts == 2) {
          const uint4 both = *reinterpret_cast<const uint4*>(of);
          Multiply<kBFloat16>(sums[j], a, both.z, both.w);  // the small part first
          Multiply<kBFloat16>(sums[j], a, both.x, both.y);
        } else {
#pragma unroll
          for (int part = kParts - 1; part >= 0; --part) Multiply<kBFloat16>(sums[j], a, of[part].x, of[part].y);
        }
      }
    }
  }
}

/// What a lane multiplies of 64 rows, of which a warp has 16: two rows' elements, 8 of each 32.
template <int kRowsMax>
struct RowsOfLane {
  uint4 a16[kRowsMax / 32][2];

  /// from: [64][rows].
  __device__ __forceinline__ void Load(const uint8_t* from, int rows) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint8_t* const row = from + (16 * warp + g) * rows * 2 + 16 * t;
#pragma unroll
    for (int kb = 0; kb < kRowsMax / 32; ++kb) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        a16[kb][r] = make_uint4(0, 0, 0, 0);
        if (32 * kb + 8 * t < rows)
          a16[kb][r] = __ldg(reinterpret_cast<const uint4*>(row + 8 * r * rows * 2 + 64 * kb));
      }
    }
  }
};

/// to [64][columns] = from [64][rows] factor; rows (at most kRowsMax) and columns are multiples of 16. The largest of
/// this lane's results, in value, before they are rounded.
template <int kRowsMax, bool kBFloat16, Out kOut>
__device__ __forceinline__ float RotateLoaded(const RowsOfLane<kRowsMax>& from, int rows, uint8_t* to, int columns,
                                              const uint8_t* factor) {
  constexpr int kParts = kBFloat16 ? 3 : 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = *reinterpret_cast<const float*>(factor);
  const uint2* b = reinterpret_cast<const uint2*>(factor + kFactorHeaderBytes) + lane * kParts;
  uint8_t* const out = to + (16 * warp + g) * columns * 2 + 16 * t;
  float most = 0;
#pragma unroll 1
  for (int m = 0; m < columns; m += 32) {
    float sums[4][4] = {};
    MultiplyPacked<kRowsMax, kBFloat16>(from.a16, b, rows, sums);
    b += (rows + 31) / 32 * 8 * 32 * kParts;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float x = sums[j][2 * r] * scale, y = sums[j][2 * r + 1] * scale;
        if constexpr (kOut == Out::kHalfOrInfinity) {
          most = fmaxf(most, fmaxf(fabsf(OrInfinity(x)), fabsf(OrInfinity(y))));
        }
        words[j] = ToTwo<kOut>(x, y);
      }
      if (m + 8 * t < columns) {
        *reinterpret_cast<uint4*>(out + 8 * r * columns * 2 + 2 * m) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  return most;
}

template <int kRowsMax, bool kBFloat16, Out kOut>
__device__ __forceinline__ float RotateRows(const uint8_t* from, int rows, uint8_t* to, int columns,
                                            const uint8_t* factor) {
  RowsOfLane<kRowsMax> loaded;
  loaded.Load(from, rows);
  return RotateLoaded<kRowsMax, kBFloat16, kOut>(loaded, rows, to, columns, factor);
}

}  // namespace kvmanager::zack
