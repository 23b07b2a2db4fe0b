// q times the steps of K's channels, in 8 bits with a unit per row: what attention multiplies the codes of a HACK page
// with, once for each page (hack_reference.h has the arithmetic).
#pragma once

#include "codecs/device/attend_device.cuh"

namespace kvmanager::device {

__host__ __device__ constexpr int AlignTo(int bytes, int alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// Bytes as floats, of fewer instructions than a conversion, which shares its unit with exponentials: a byte behind the
/// exponent of 2^23.
struct ByteFloats {
  /// 0x4b000000, from where the compiler cannot know it: it would keep it as a constant, and give a register, written
  /// each time, to the other constant of the instruction.
  uint32_t exponent;

  __device__ __forceinline__ void Init(uint32_t* space) {
    if (threadIdx.x % 32 == 0) *space = 0x4b000000;
    __syncwarp();
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(exponent) : "r"(SharedAddress(space)));
    __syncwarp();
  }
  __device__ __forceinline__ float Unsigned(uint32_t word, int byte) const {
    return AsFloat(__byte_perm(word, exponent, 0x7440 + byte)) - 8388608.f;
  }
  /// Of signed bytes whose top bits were flipped (word ^ 0x80808080).
  __device__ __forceinline__ float Flipped(uint32_t word, int byte) const {
    return AsFloat(__byte_perm(word, exponent, 0x7440 + byte)) - 8388736.f;
  }
};
/// The low bytes of four words.
__device__ __forceinline__ uint32_t LowBytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

/// A warp's q of a tile, and its products with a page's steps. kTileRowsMax: 4 where no tile has more rows, else
/// kTileRows.
template <int kHeadDimension, int kTileRowsMax>
struct StepFold {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kRows = kTileRowsMax;
  static constexpr int kSegments = kHeadDim / 16;

  // An integer n whose magnitude is below 2^22 is the float 1.5 * 2^23 + n, less that number, bit by bit: products that
  // begin at its bits need no conversion.
  static constexpr float kMagic = 12582912.f;
  static constexpr int kMagicBits = 0x4b400000;
  static constexpr float kNegligible = 0x1p-100f;  // hack_reference.h
  static constexpr float kLowLevels = 254;         // of q's second byte in a unit of its first: hack_reference.h

  // The maximum of a state is that of an earlier page, and scores may be larger by as much as fp32 does not mind: in
  // most pages lanes need not tell each other of theirs.
  static constexpr float kSlack = 24;

  // Of channels 4 * lane .. 4 * lane + 3, which are word j = lane % 4 of segment lane / 4.
  float q[kRows][4];
  ByteFloats bytes;

  static __device__ __forceinline__ float2 Tops(const uint8_t* at) {
    return __half22float2(*reinterpret_cast<const __half2*>(at));
  }

  static __device__ __forceinline__ bool HasChannels(int lane) { return kHeadDim == 128 || lane < kHeadDim / 4; }
  /// x / 255, rounded once.
  static __device__ __forceinline__ float Over255(float x) {
    const float rough = x * (1 / 255.f);
    return fmaf(fmaf(-255.f, rough, x), 1 / 255.f, rough);
  }
  /// x / y, rounded once, of numbers whose quotient and its inverse are far from fp32's limits: without a branch, which
  /// would stand between this work and other work that hides its latency.
  static __device__ __forceinline__ float Over(float x, float y) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
    const float rough = x * inverse;
    return fmaf(fmaf(-rough, y, x), inverse, rough);
  }
  static __device__ __forceinline__ float Inverse(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
  }
  static constexpr float kRotationNorm = kHeadDim == 64    ? 0.125f
                                         : kHeadDim == 128 ? 0.088388348f
                                                           : 0.0625f;  // 1 / sqrt(kHeadDim)
  /// Rows times the normalised Walsh-Hadamard matrix; lanes without channels have zeros.
  template <int kCount>
  static __device__ __forceinline__ void RotateRows(float (&x)[kCount][4]) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const float a = x[r][0] + x[r][1], b = x[r][0] - x[r][1], c = x[r][2] + x[r][3], d = x[r][2] - x[r][3];
      x[r][0] = a + c, x[r][1] = b + d, x[r][2] = a - c, x[r][3] = b - d;
    }
#pragma unroll
    for (int bit = 1; bit < kHeadDim / 4; bit *= 2) {
      const float sign = (threadIdx.x & bit) != 0 ? -1.f : 1.f;
      const float norm = bit == kHeadDim / 8 ? kRotationNorm : 1.f;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[r][j] = fmaf(x[r][j], sign, __shfl_xor_sync(kAllLanes, x[r][j], bit)) * norm;
        }
      }
    }
  }
  /// Of values by row, that of `row`, which lanes differ in.
  static __device__ __forceinline__ float OfRow(const float (&x)[kRows], int row) {
    const float a = row & 1 ? x[1] : x[0], b = row & 1 ? x[3] : x[2];
    const float low = row & 2 ? b : a;
    if constexpr (kRows == 4) return low;
    const float c = row & 1 ? x[kRows - 3] : x[kRows - 4], d = row & 1 ? x[kRows - 1] : x[kRows - 2];
    return row & 4 ? (row & 2 ? d : c) : low;
  }
  /// Lanes with `bit` keep the sums of the upper half of 2 * kHalf rows, the others those of the lower.
  template <int kHalf>
  static __device__ __forceinline__ void HalveRows(float (&x)[kRows], int bit) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      const float keep = upper ? x[kHalf + r] : x[r], give = upper ? x[r] : x[kHalf + r];
      x[r] = keep + __shfl_xor_sync(kAllLanes, give, bit);
    }
  }
  /// Sums over all lanes; row r's is in lane LaneOfSum(r).
  static __device__ __forceinline__ float SumByRow(float (&x)[kRows]) {
    int bit = 16;
    if constexpr (kRows == 8) HalveRows<4>(x, bit), bit /= 2;
    HalveRows<2>(x, bit), HalveRows<1>(x, bit / 2);
#pragma unroll
    for (bit /= 4; bit >= 1; bit /= 2) x[0] += __shfl_xor_sync(kAllLanes, x[0], bit);
    return x[0];
  }
  static __device__ __forceinline__ constexpr int LaneOfSum(int row) { return row * (32 / kRows); }

  // Steps and minima of V's channels as floats, so that each is converted once by one lane, not by all that need it:
  // four floats of channels 2 i and 2 i + 1, the steps and then the minima, stand together; those of odd i behind those
  // of even i, so that lanes meet in no bank. The caller synchronises the warp before and behind.
  static constexpr int kStagedOdd = 4 * kHeadDim + 64;
  static constexpr int kStagedBytes = kStagedOdd + 4 * kHeadDim;
  static constexpr int kStagedSegment = 64;  // from one segment's to the next one's
  /// Of channels 2 g and 2 g + 1 of a segment, from its own.
  static __device__ __forceinline__ int StagedAt(int g) { return (g % 2 != 0 ? kStagedOdd : 0) + g / 2 * 16; }
  __device__ __forceinline__ void StageMeta(const uint8_t* steps_at, const uint8_t* minima_at, uint8_t* to) const {
    const int lane = threadIdx.x % 32;
    if (!HasChannels(lane)) return;
    const uint32_t steps = reinterpret_cast<const uint32_t*>(steps_at)[lane];
    const uint32_t minima = reinterpret_cast<const uint32_t*>(minima_at)[lane] ^ 0x80808080u;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      reinterpret_cast<float4*>(to + (j == 0 ? 0 : kStagedOdd))[lane] =
          make_float4(bytes.Unsigned(steps, j), bytes.Unsigned(steps, j + 1), bytes.Flipped(minima, j),
                      bytes.Flipped(minima, j + 1));
    }
  }

  /// Rounded as hack_reference.h has it: in steps, since each ends in a long latency, and the caller has other work to
  /// put between them. words: the codes, [row][j][segment].
  struct Folding {
    float f[kRows][4], largest[kRows], minimum[kRows];
  };
  __device__ __forceinline__ void MultiplySteps(const uint8_t* tops_at, const uint8_t* steps_at,
                                                const uint8_t* minima_at, Folding& fold) const {
    const int lane = threadIdx.x % 32;
    const bool has_channels = HasChannels(lane);
    const float2 tops = Tops(tops_at);
    const uint32_t steps = has_channels ? reinterpret_cast<const uint32_t*>(steps_at)[lane] : 0;
    const uint32_t minima = (has_channels ? reinterpret_cast<const uint32_t*>(minima_at)[lane] : 0) ^ 0x80808080u;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float step = Over255(tops.x * bytes.Unsigned(steps, j)), least = bytes.Flipped(minima, j);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        fold.f[r][j] = __fmul_rn(q[r][j], step);
        fold.largest[r] = j == 0 ? fabsf(fold.f[r][0]) : fmaxf(fold.largest[r], fabsf(fold.f[r][j]));
        fold.minimum[r] = j == 0 ? q[r][0] * least : fmaf(q[r][j], least, fold.minimum[r]);
      }
    }
    // Numbers that are not negative order as their bits do.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      fold.largest[r] = AsFloat(__reduce_max_sync(kAllLanes, AsBits(fold.largest[r])));
    }
  }
  /// kLowAt: second bytes go to words + kLowAt; 0: there are none.
  template <int kLowAt = 0>
  __device__ __forceinline__ void CodeProducts(const AttendParams& params, const uint8_t* tops_at, Folding& fold,
                                               uint32_t* words, float (&unit)[2], float (&base)[2]) const {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const float mine = OfRow(fold.largest, lane);
    const float inverse = Over(127.f, fmaxf(mine, kNegligible)) * (mine > kNegligible ? 1.f : 0.f);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float times = __shfl_sync(kAllLanes, inverse, r);
      uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = AsBits(__fadd_rn(__fmul_rn(fold.f[r][j], times), kMagic));
      if (HasChannels(lane)) {
        words[(r * 4 + lane % 4) * kSegments + lane / 4] = LowBytes(code[0], code[1], code[2], code[3]);
      }
      if constexpr (kLowAt != 0) {
        uint32_t low[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float rest = __fmul_rn(fold.f[r][j], times) - (AsFloat(code[j]) - kMagic);  // exact
          low[j] = AsBits(fmaf(rest, kLowLevels, kMagic));
        }
        if (HasChannels(lane)) {
          words[kLowAt + (r * 4 + lane % 4) * kSegments + lane / 4] = LowBytes(low[0], low[1], low[2], low[3]);
        }
      }
    }
    const float sum = SumByRow(fold.minimum);
    const float least_top = Tops(tops_at).y;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (2 * t + h) % kRows;
      unit[h] = OfRow(fold.largest, row) * (params.scale_log2 * (1 / 127.f));
      base[h] = __shfl_sync(kAllLanes, sum, LaneOfSum(row)) * least_top * (params.scale_log2 * (1 / 127.f));
    }
  }
};

}  // namespace kvmanager::device
