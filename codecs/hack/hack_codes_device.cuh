// The steps of the HACK encoder that its kernels share: the reference's fp32 operations in its order
// (hack_reference.cc), and codes to words and back (hack_format.h). Built with -fmad=false: products and sums round
// apart.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "codecs/hack/hack_device_format.h"

namespace kvmanager::hack::device {

inline constexpr uint32_t kInfinityBits = 0x7f800000;
/// Added to a level of at most 2^22 it rounds to the nearest integer, which is then in the low bits.
inline constexpr float kRoundToInteger = 0x1p23f;
inline constexpr uint32_t kRoundToIntegerBits = 0x4b000000;

// ---- elements ----

__device__ __forceinline__ bool IsFinite(float f) { return (__float_as_uint(f) & kInfinityBits) != kInfinityBits; }
__device__ __forceinline__ float Integer(uint32_t bits) {
  return __uint_as_float(bits | kRoundToIntegerBits) - kRoundToInteger;
}

/// Two elements of fp16 or bf16 in 32 bits.
template <bool kBFloat16>
struct Pair;
template <>
struct Pair<false> {
  static __device__ __forceinline__ __half2 As(uint32_t two) { return *reinterpret_cast<const __half2*>(&two); }
  static __device__ __forceinline__ uint32_t Bits(__half2 two) { return *reinterpret_cast<const uint32_t*>(&two); }
  static __device__ __forceinline__ float2 ToFloats(uint32_t two) { return __half22float2(As(two)); }
  static __device__ __forceinline__ uint32_t FromFloats(float a, float b) {
    const __half2 largest = __float2half2_rn(65504.f), least = __float2half2_rn(-65504.f);
    return Bits(__hmax2(__hmin2(__floats2half2_rn(a, b), largest), least));
  }
  static __device__ __forceinline__ float ToFloat(uint16_t one) { return __half2float(__ushort_as_half(one)); }
  // NaN wins.
  static __device__ __forceinline__ uint32_t Min(uint32_t a, uint32_t b) { return Bits(__hmin2_nan(As(a), As(b))); }
  static __device__ __forceinline__ uint32_t Max(uint32_t a, uint32_t b) { return Bits(__hmax2_nan(As(a), As(b))); }
};
template <>
struct Pair<true> {
  static __device__ __forceinline__ __nv_bfloat162 As(uint32_t two) {
    return *reinterpret_cast<const __nv_bfloat162*>(&two);
  }
  static __device__ __forceinline__ uint32_t Bits(__nv_bfloat162 two) {
    return *reinterpret_cast<const uint32_t*>(&two);
  }
  static __device__ __forceinline__ float2 ToFloats(uint32_t two) {
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t FromFloats(float a, float b) {
    constexpr float kLargest = 0x1.fep127f;
    return Bits(__floats2bfloat162_rn(fmaxf(fminf(a, kLargest), -kLargest), fmaxf(fminf(b, kLargest), -kLargest)));
  }
  static __device__ __forceinline__ float ToFloat(uint16_t one) { return __uint_as_float(uint32_t(one) << 16); }
  static __device__ __forceinline__ uint32_t Min(uint32_t a, uint32_t b) { return Bits(__hmin2_nan(As(a), As(b))); }
  static __device__ __forceinline__ uint32_t Max(uint32_t a, uint32_t b) { return Bits(__hmax2_nan(As(a), As(b))); }
};

// ---- metadata ----

__device__ __forceinline__ float HalfBitsToFloat(uint32_t bits) {
  return __half2float(__ushort_as_half(uint16_t(bits)));
}
__device__ __forceinline__ uint16_t ToHalfBits(float f) { return __half_as_ushort(__float2half_rn(f)); }
__device__ __forceinline__ float Levels(int width) { return float((1 << width) - 1); }

/// Least-squares grid: factors of half the range about its middle.
struct RangeGrid {
  static constexpr int kTries = 12 * 5;
  float below[kTries];
  float above[kTries];
};
constexpr RangeGrid MakeRangeGrid() {
  RangeGrid grid{};
  const double shifts[5] = {-0.15, -0.05, 0.0, 0.05, 0.15};
  int n = 0;
  for (int percent = 45; percent <= 100; percent += 5) {
    for (int s = 0; s < 5; ++s) {
      grid.below[n] = float(shifts[s] - percent / 100.0);
      grid.above[n] = float(shifts[s] + percent / 100.0);
      ++n;
    }
  }
  return grid;
}
static __constant__ RangeGrid kRangeGrid = MakeRangeGrid();

struct Meta {
  float step;
  float minimum;
};

/// fp16 minimum and step of bounds (lo: the mean, where the width is 0). *bad is set where they do not fit.
__device__ __forceinline__ Meta RoundBounds(int width, float lo, float hi, bool* bad) {
  Meta m;
  m.minimum = HalfBitsToFloat(ToHalfBits(lo));
  *bad |= !IsFinite(m.minimum);
  m.step = 0;
  if (width > 0) {
    float wanted = hi - m.minimum;
    if (width > 1) wanted = wanted / Levels(width);
    const float rounded = HalfBitsToFloat(ToHalfBits(wanted));
    *bad |= !IsFinite(rounded);
    m.step = rounded > 0 ? rounded : 0.f;
  }
  return m;
}

/// 8-bit metadata as fractions of the tops, and what they stand for (step u8, minimum s8).
struct StoredMeta {
  uint32_t step;
  int minimum;
};
__device__ __forceinline__ StoredMeta RoundToTops(int width, float top_step, float top_minimum, Meta* m) {
  float u8 = 0, s8 = 0;
  if (width > 0) u8 = fmaxf(1.f, top_step > 0 ? rintf(m->step * 255.f / top_step) : 0.f);
  if (top_minimum > 0) s8 = rintf(m->minimum * 127.f / top_minimum);
  m->step = top_step * u8 / 255.f;
  m->minimum = top_minimum * s8 / 127.f;
  return {uint32_t(u8), int(s8)};
}

// ---- norms of V's tokens ----

inline constexpr float kNegligible = 0x1p-100f;  // hack_reference.h

/// fp16 bits of the least number that is not below f, which is 0 or more.
__device__ __forceinline__ uint16_t RoundUpToHalf(float f) {
  const uint16_t bits = ToHalfBits(f);
  return HalfBitsToFloat(bits) < f ? uint16_t(bits + 1) : bits;
}
__device__ __forceinline__ float NormOf(float top, uint32_t stored) { return top * float(stored) / 255.f; }
/// Of a token whose largest magnitude is `largest`: what is stored, and what its values are multiplied with.
struct TokenNorm {
  uint32_t stored;
  float inverse;
};
__device__ __forceinline__ TokenNorm MakeNorm(float largest, float top) {
  const uint32_t stored = top > 0 ? uint32_t(fminf(fmaxf(ceilf(largest * 255.f / top), 1.f), 255.f)) : 0;
  const float norm = NormOf(top, stored);
  return {stored, norm > kNegligible ? 1.f / norm : 0.f};
}

__device__ __forceinline__ float Inverse(float step) { return step > 0 ? 1.f / step : 0.f; }
__device__ __forceinline__ float Level(float x, float inverse, float minimum, float levels) {
  return fminf(fmaxf((x - minimum) * inverse, 0.f), levels);
}

// ---- codes and words ----

/// The words that one thread makes of 32 codes: tiles i 0..3 and k 0..7, where j = 2h + k / 4 and lane = k % 4.
/// Widths up to 4: low[p] and high[p] of the 2-bit planes, `one` of the 1-bit plane; width 8: word[p][i] in `all`.
template <int kWidth>
struct Words {
  uint32_t low[2] = {0, 0};
  uint32_t high[2] = {0, 0};
  uint32_t one = 0;
};
template <>
struct Words<8> {
  uint32_t all[2][4];
};

constexpr int OneBitShift(int i) { return (i & 1) + 4 * (i >> 1); }
/// What the upper bits of rounded floats leave in a word where they are added at `first`, first + stride, ...
constexpr uint32_t Bias(int first, int stride, int count) {
  uint32_t bias = 0;
  for (int i = 0; i < count; ++i) bias += kRoundToIntegerBits << (first + i * stride);
  return bias;
}

/// Bits 0, 1 of the nibbles of tiles 0, 1 (a) and 2, 3 (b), as a word of a 2-bit plane.
__device__ __forceinline__ uint32_t TwoBitWord(uint32_t a, uint32_t b) {
  return (a & 0x03030303u) | (a >> 2 & 0x0c0c0c0cu) | (b << 4 & 0x30303030u) | (b << 2 & 0xc0c0c0c0u);
}

/// code(i, k) gives kRoundToIntegerBits + code. The codes are added into words at their places; only places below 8
/// keep any of the upper bits, whose sum is taken off.
template <int kWidth, class Code>
__device__ __forceinline__ Words<kWidth> Pack(const Code& code) {
  Words<kWidth> w;
  if constexpr (kWidth == 1) {
    uint32_t sum = 0;
    uint32_t bias = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int at = 8 * (k % 4) + OneBitShift(i) + 2 * (k / 4);
        sum += code(i, k) << at;
        bias += kRoundToIntegerBits << at;
      }
    }
    w.one = sum - bias;
  } else if constexpr (kWidth == 2) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      uint32_t sum = 0u - Bias(0, 2, 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) sum += code(i, 4 * p + lane) << (8 * lane + 2 * i);
      }
      w.low[p] = sum;
    }
  } else if constexpr (kWidth == 8) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t sum = 0u - Bias(0, 8, 1);
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) sum += code(i, 4 * p + lane) << (8 * lane);
        w.all[p][i] = sum;
      }
    }
  } else if constexpr (kWidth > 0) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      uint32_t nibbles[2] = {0u - Bias(0, 4, 2), 0u - Bias(0, 4, 2)};  // tiles 0, 1 and 2, 3
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) nibbles[i / 2] += code(i, 4 * p + lane) << (8 * lane + 4 * (i % 2));
      }
      w.low[p] = TwoBitWord(nibbles[0], nibbles[1]);
      if constexpr (kWidth == 4) {
        w.high[p] = TwoBitWord(nibbles[0] >> 2, nibbles[1] >> 2);
      } else {
        const uint32_t one = (nibbles[0] >> 2 & 0x01010101u) | (nibbles[0] >> 5 & 0x02020202u) |
                             (nibbles[1] << 2 & 0x10101010u) | (nibbles[1] >> 1 & 0x20202020u);
        w.one |= one << (2 * p);
      }
    }
  }
  return w;
}

/// Calls visit(byte offset from the segment's planes, word) for each of a task's words; V's 8-bit codes are stored less
/// 128.
template <int kWidth, class Visit>
__device__ __forceinline__ void ForEachWord(int h, int r, const Visit& visit) {
  if constexpr (kWidth == 8) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        visit(
            256 * (2 * h + p) + 64 * i + 4 * r, [=](auto& w) -> auto& { return w.all[p][i]; });
    }
  } else {
    if constexpr (kWidth >= 2) {
#pragma unroll
      for (int p = 0; p < 2; ++p)
        visit(
            64 * (2 * h + p) + 4 * r, [=](auto& w) -> auto& { return w.low[p]; });
    }
    if constexpr (kWidth == 4) {
#pragma unroll
      for (int p = 0; p < 2; ++p)
        visit(
            256 + 64 * (2 * h + p) + 4 * r, [=](auto& w) -> auto& { return w.high[p]; });
    }
    if constexpr (kWidth == 1 || kWidth == 3) {
      visit((kWidth == 3 ? 256 : 0) + 64 * h + 4 * r, [=](auto& w) -> auto& { return w.one; });
    }
  }
}

/// Code of (i, k) of a task's words, with kRoundToIntegerBits or not: the caller masks nothing.
template <int kWidth>
__device__ __forceinline__ uint32_t CodeOf(const Words<kWidth>& w, int i, int k) {
  const int p = k / 4, lane = k % 4;
  if constexpr (kWidth == 0) {
    return 0;
  } else if constexpr (kWidth == 8) {
    return w.all[p][i] >> (8 * lane) & 0xff;
  } else {
    uint32_t code = 0;
    if constexpr (kWidth >= 2) code = w.low[p] >> (8 * lane + 2 * i) & 3;
    if constexpr (kWidth == 4) code |= (w.high[p] >> (8 * lane + 2 * i) & 3) << 2;
    if constexpr (kWidth == 1) code = w.one >> (8 * lane + OneBitShift(i) + 2 * p) & 1;
    if constexpr (kWidth == 3) code |= (w.one >> (8 * lane + OneBitShift(i) + 2 * p) & 1) << 2;
    return code;
  }
}

/// Calls body with the width as a constant.
template <class Body>
__device__ __forceinline__ void WithWidth(int width, const Body& body) {
  switch (width) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 8:
      return body(std::integral_constant<int, 8>());
    default:
      return body(std::integral_constant<int, 0>());
  }
}

// ---- stochastic rounding (hack_reference.h, RoundingNoise) ----

__device__ __forceinline__ uint64_t Mix64(uint64_t h) {
  h += 0x9e3779b97f4a7c15;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9;
  h = (h ^ (h >> 27)) * 0x94d049bb133111eb;
  return h ^ (h >> 31);
}
__device__ __forceinline__ uint32_t NoiseSeed(uint32_t layer, int head, int side, uint64_t token) {
  return uint32_t(Mix64(Mix64(uint64_t(layer) << 32 | uint64_t(head) << 1 | uint64_t(side)) ^ token) >> 32);
}
__device__ __forceinline__ float Noise(uint32_t seed, int channel) {
  uint32_t h = seed + uint32_t(channel) * 0x9e3779b9u;
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return float(h >> 8) * 0x1p-24f;
}

}  // namespace kvmanager::hack::device
