// From scores to chosen tokens: softmax weights of the middle tokens, and the k largest by bisection.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/pq/pq_kernels.h"

namespace kvmanager::pq {
namespace {

// ---- weights from sums of table entries
// ------------------------------------------------------------------------------
//
// 32 tokens at a time, in vectors of 16-bit values whose even ones are the low halves of 32-bit lanes. As bits of a
// bfloat16, a distance of 1 is 1/128 of an octave but for the curvature of 2^x within an octave.

constexpr size_t kBlock16 = 32;
constexpr int kVectors16 = 16 / kLanes;
constexpr int kLanes16 = 2 * kLanes;
constexpr uint16_t kOneBits = 127 * kUnitsPerOctave;  // 1.0 as bfloat16

typedef uint16_t VecH __attribute__((vector_size(4 * kLanes)));
typedef uint16_t LooseH __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));

KVMANAGER_INLINE VecH LoadH(const uint16_t* p) { return *reinterpret_cast<const LooseH*>(p); }
KVMANAGER_INLINE void StoreH(uint16_t* p, VecH v) { *reinterpret_cast<LooseH*>(p) = v; }
KVMANAGER_INLINE VecH MinH(VecH a, VecH b) {
#if defined(KVMANAGER_ISA_AVX512)
  return (VecH)_mm512_min_epu16((__m512i)a, (__m512i)b);
#elif defined(KVMANAGER_ISA_AVX2)
  return (VecH)_mm256_min_epu16((__m256i)a, (__m256i)b);
#else
  return a < b ? a : b;
#endif
}
/// Tokens 0, 2, 4, ... and 1, 3, 5, ... as fp32.
KVMANAGER_INLINE VecF EvenOf(VecH e) { return (VecF)((VecU)e << 16); }
KVMANAGER_INLINE VecF OddOf(VecH e) { return (VecF)((VecU)e & SetU(0xFFFF0000)); }

uint16_t Least(const uint16_t* sums, size_t n) {
  uint16_t least = UINT16_MAX;
  size_t i = 0;
  if (n >= size_t(kLanes16)) {
    VecH v = LoadH(sums);
    for (i = kLanes16; i + kLanes16 <= n; i += kLanes16) v = MinH(v, LoadH(sums + i));
#if defined(KVMANAGER_ISA_AVX512)
    const __m512i low = _mm512_and_si512((__m512i)v, _mm512_set1_epi32(0xFFFF)),
                  high = _mm512_srli_epi32((__m512i)v, 16);
    least = uint16_t(_mm512_reduce_min_epu32(_mm512_min_epu32(low, high)));
#else
    for (int l = 0; l < kLanes16; ++l) least = v[l] < least ? v[l] : least;
#endif
  }
  for (; i < n; ++i) least = sums[i] < least ? sums[i] : least;
  return least;
}

/// Bits of 2^(-distance / 128). 2^f - 1 = f - 4 * 0.0859 * f (1 - f) within 0.003 for f in [0, 1).
KVMANAGER_INLINE VecH ExpBits(VecH distance) {
  const VecH x = kOneBits - distance;
  const VecH f = x & (kUnitsPerOctave - 1);
  return x - ((f * (11 * kUnitsPerOctave - f * 11) + 2048) >> 12);
}

template <bool kShifted>
KVMANAGER_INLINE float ExponentialsOf(uint16_t* sums, size_t n, uint16_t least, int shift) {
  constexpr uint16_t kMost = kOctavesKept * kUnitsPerOctave;
  const uint16_t unshifted = uint16_t((kMost >> shift) + 1);
  const VecH most = VecH{} + kMost, most_unshifted = VecH{} + unshifted;
  VecF even[kVectors16] = {}, odd[kVectors16] = {};
  const auto bits_of = [&](const uint16_t* p) {
    VecH distance = LoadH(p) - least;
    if (kShifted) distance = MinH(distance, most_unshifted) << uint16_t(shift);
    return ExpBits(MinH(distance, most));
  };
  const auto add = [&](int v, VecH e) {
    even[v] += EvenOf(e);
    odd[v] += OddOf(e);
  };
  size_t i = 0;
  for (; i + kBlock16 <= n; i += kBlock16) {
    KVMANAGER_UNROLL
    for (int v = 0; v < kVectors16; ++v) {
      const VecH e = bits_of(sums + i + v * kLanes16);
      StoreH(sums + i + v * kLanes16, e);
      add(v, e);
    }
  }
  if (i < n) {
    uint16_t rest[kBlock16] = {};
    __builtin_memcpy(rest, sums + i, (n - i) * sizeof(uint16_t));
    for (int v = 0; v < kVectors16; ++v) StoreH(rest + v * kLanes16, bits_of(rest + v * kLanes16));
    __builtin_memcpy(sums + i, rest, (n - i) * sizeof(uint16_t));
    for (size_t l = n - i; l < kBlock16; ++l) rest[l] = 0;
    for (int v = 0; v < kVectors16; ++v) add(v, LoadH(rest + v * kLanes16));
  }
  // The same 32 sums, added in the same order, on every instruction set.
  float sums_of[kBlock16 / 2];
  for (int v = 0; v < kVectors16; ++v) StoreF(sums_of + v * kLanes, even[v] + odd[v]);
  for (size_t count = kBlock16 / 4; count > 0; count /= 2) {
    for (size_t j = 0; j < count; ++j) sums_of[j] = sums_of[2 * j] + sums_of[2 * j + 1];
  }
  return sums_of[0];
}

float Exponentials(uint16_t* sums, size_t n, uint16_t least, int shift) {
  return shift == 0 ? ExponentialsOf<false>(sums, n, least, 0) : ExponentialsOf<true>(sums, n, least, shift);
}

#if defined(__clang__)
// GCC's __builtin_shuffle, whose lanes need not be constants: tools/fuzz compiles with clang.
KVMANAGER_INLINE VecF __builtin_shuffle(VecF a, VecF b, VecI from) {
  VecF to = {};
  for (int i = 0; i < kLanes; ++i) to[i] = from[i] < kLanes ? a[from[i]] : b[from[i] - kLanes];
  return to;
}
#endif

void Weigh(const uint16_t* const* e, int rows, size_t n, const float* weight, float* out) {
  VecI low{}, high{};
  for (int l = 0; l < kLanes; ++l) {
    low[l] = l / 2 + l % 2 * kLanes;
    high[l] = low[l] + kLanes / 2;
  }
  size_t i = 0;
  for (; i + kLanes16 <= n; i += kLanes16) {
    VecF even{}, odd{};
    for (int r = 0; r < rows; ++r) {
      const VecH x = LoadH(e[r] + i);
      even = MulAdd(EvenOf(x), SetF(weight[r]), even);
      odd = MulAdd(OddOf(x), SetF(weight[r]), odd);
    }
    StoreF(out + i, __builtin_shuffle(even, odd, low));
    StoreF(out + i + kLanes, __builtin_shuffle(even, odd, high));
  }
  for (; i < n; ++i) {
    float sum = 0;
    for (int r = 0; r < rows; ++r) {
      const uint32_t bits = uint32_t(e[r][i]) << 16;
      float x;
      __builtin_memcpy(&x, &bits, sizeof x);
      sum += x * weight[r];
    }
    out[i] = sum;
  }
}

// ---- weights from fp32 scores
// ----------------------------------------------------------------------------------------

/// The last, partial vector of n values: what lies beyond them reads as the first of it.
KVMANAGER_INLINE VecF LoadScores(const float* s, size_t left) {
  if (left >= size_t(kLanes)) return LoadF(s);
  float rest[kLanes];
  for (int i = 0; i < kLanes; ++i) rest[i] = s[size_t(i) < left ? i : 0];
  return LoadF(rest);
}

float Top32(const float* s, size_t n) {
  VecF top = SetF(-__builtin_inff());
  for (size_t i = 0; i < n; i += kLanes) top = MaxF(top, LoadScores(s + i, n - i));
  return ReduceMax(top);
}

float SumExp32(const float* s, size_t n, float top) {
  VecF sum{};
  for (size_t i = 0; i < n; i += kLanes) {
    const VecF e = ExpNegative(LoadScores(s + i, n - i) - top);
    if (n - i >= size_t(kLanes)) {
      sum += e;
    } else {
      for (size_t l = 0; l < n - i; ++l) sum[l] += e[l];
    }
  }
  return ReduceAdd(sum);
}

void Weigh32(const float* const* s, int rows, size_t n, const float* top, const float* weight, float* out) {
  for (size_t i = 0; i < n; i += kLanes) {
    VecF sum{};
    for (int r = 0; r < rows; ++r) {
      sum = MulAdd(ExpNegative(LoadScores(s[r] + i, n - i) - top[r]), SetF(weight[r]), sum);
    }
    if (n - i >= size_t(kLanes)) {
      StoreF(out + i, sum);
    } else {
      for (size_t l = 0; l < n - i; ++l) out[i + l] = sum[l];
    }
  }
}

// ---- the k largest
// ---------------------------------------------------------------------------------------------------
//
// Values >= 0 order as their bits do.

KVMANAGER_INLINE size_t CountFrom(const uint32_t* bits, size_t n, uint32_t least) {
  VecU counts[4] = {};
  size_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    KVMANAGER_UNROLL
    for (int u = 0; u < 4; ++u) counts[u] -= (VecU)(LoadU(bits + i + u * kLanes) >= SetU(least));
  }
  const VecU sum = (counts[0] + counts[1]) + (counts[2] + counts[3]);
  size_t count = 0;
  for (int l = 0; l < kLanes; ++l) count += sum[l];
  for (; i < n; ++i) count += bits[i] >= least;
  return count;
}

/// A bound that the k largest of n values reach, and at most `slack` others but for ties with the k-th. low: a bound
/// that at least k values reach.
KVMANAGER_INLINE uint32_t KthLargest(const uint32_t* bits, size_t n, size_t k, size_t slack, uint32_t low) {
  VecU most{};
  size_t seen = 0;
  for (; seen + kLanes <= n; seen += kLanes) {
    const VecU x = LoadU(bits + seen);
    most = x > most ? x : most;
  }
  uint32_t high = low;
  for (int l = 0; l < kLanes; ++l) high = most[l] > high ? most[l] : high;
  for (; seen < n; ++seen) high = bits[seen] > high ? bits[seen] : high;
  // At least k values reach `low`; fewer exceed `high`.
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const size_t count = CountFrom(bits, n, middle);
    if (count >= k && count <= k + slack) return middle;
    if (count > k) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// The values that reach `least`, and their indices; returns how many. `indices` [n] holds the values' indices if
/// kIndexed, else they are 0 .. n - 1. `to` may be `bits`.
template <bool kIndexed>
KVMANAGER_INLINE size_t Gather(const uint32_t* bits, size_t n, uint32_t least, uint32_t* to, uint32_t* indices) {
  size_t count = 0, i = 0;
#if defined(KVMANAGER_ISA_AVX512)
  const __m512i limit = _mm512_set1_epi32(int(least));
  __m512i index = (__m512i)Iota();
  for (; i + 16 <= n; i += 16) {
    const __m512i x = _mm512_loadu_si512(bits + i);
    const __mmask16 in = _mm512_cmpge_epu32_mask(x, limit);
    if (kIndexed) index = _mm512_loadu_si512(indices + i);
    // In registers first: compressing straight to memory is slow on some processors.
    const __m512i values = _mm512_maskz_compress_epi32(in, x), places = _mm512_maskz_compress_epi32(in, index);
    _mm512_storeu_si512(to + count, values);
    _mm512_storeu_si512(indices + count, places);
    count += CountBits(in);
    if (!kIndexed) index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
  }
#endif
  for (; i < n; ++i) {
    uint32_t x;
    __builtin_memcpy(&x, bits + i, sizeof x);
    const uint32_t index = kIndexed ? indices[i] : uint32_t(i);
    to[count] = x;
    indices[count] = index;
    count += x >= least;
  }
  return count;
}

/// A bound that somewhat more than the k largest reach, most likely: by a sample. 0 where all are to be looked at.
KVMANAGER_INLINE uint32_t SampledBound(const float* values, size_t n, size_t k, uint32_t* sample) {
  constexpr size_t kSampleStep = 16, kSampledFrom = 4096;
  if (n < kSampledFrom || k > n / 4) return 0;
  const size_t sampled = n / kSampleStep, rank = k / kSampleStep * 9 / 8 + 16;
  for (size_t i = 0; i < sampled; ++i) __builtin_memcpy(sample + i, values + i * kSampleStep, sizeof(uint32_t));
  return rank < sampled ? KthLargest(sample, sampled, rank, rank / 8, 0) : 0;
}

void Select(const float* values, size_t n, size_t k, uint32_t first, uint32_t* out, uint32_t* candidates,
            uint32_t* indices) {
  if (k == 0) return;
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(values);
  uint32_t bound = SampledBound(values, n, k, candidates);
  size_t found = Gather<false>(bits, n, bound, candidates, indices);
  if (found < k) found = Gather<false>(bits, n, bound = 0, candidates, indices);
  const uint32_t threshold = KthLargest(candidates, found, k, 0, bound);
  found = Gather<true>(candidates, found, threshold, candidates, indices);
  if (found == k) {
    for (size_t i = 0; i < k; ++i) out[i] = first + indices[i];
    return;
  }
  // All that exceed the threshold, and the first of those that equal it.
  size_t ties = k;
  for (size_t i = 0; i < found; ++i) ties -= candidates[i] > threshold;
  for (size_t i = 0, count = 0; count < k; ++i) {
    const bool tie = candidates[i] == threshold;
    if (tie && ties == 0) continue;
    ties -= tie;
    out[count++] = first + indices[i];
  }
}

}  // namespace
}  // namespace kvmanager::pq
