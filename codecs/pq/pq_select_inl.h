// From scores to chosen tokens: softmax weights of the middle tokens, and the k largest by radix.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/pq/pq_kernels.h"

namespace kvmanager::pq {
namespace {

KVMANAGER_INLINE VecF LoadScores(const float* s) { return LoadF(s); }
KVMANAGER_INLINE VecF LoadScores(const uint16_t* s) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(s))));
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s))));
#else
  return ToF(__builtin_convertvector(*reinterpret_cast<const Loose16*>(s), VecI));
#endif
}
KVMANAGER_INLINE VecF Distance(const float*, VecF s, float top, float) { return s - top; }
KVMANAGER_INLINE VecF Distance(const uint16_t*, VecF s, float top, float step) { return (s - top) * step; }

/// The last, partial vector of n values: what lies beyond them reads as `fill`.
template <typename T>
KVMANAGER_INLINE VecF LoadRest(const T* s, size_t left, T fill) {
  T rest[kLanes];
  for (int i = 0; i < kLanes; ++i) rest[i] = size_t(i) < left ? s[i] : fill;
  return LoadScores(rest);
}

template <typename T>
float Top(const T* s, size_t n) {
  VecF top = SetF(-__builtin_inff());
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) top = MaxF(top, LoadScores(s + i));
  if (i < n) top = MaxF(top, LoadRest(s + i, n - i, s[i]));
  return ReduceMax(top);
}

template <typename T>
float SumExp(const T* s, size_t n, float top, float step) {
  VecF sum[2] = {};
  size_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    KVMANAGER_UNROLL
    for (int u = 0; u < 2; ++u) sum[u] += ExpNegative(Distance(s, LoadScores(s + i + u * kLanes), top, step));
  }
  for (; i < n; i += kLanes) {
    const size_t left = n - i;
    if (left >= size_t(kLanes)) {
      sum[0] += ExpNegative(Distance(s, LoadScores(s + i), top, step));
      continue;
    }
    const VecF e = ExpNegative(Distance(s, LoadRest(s + i, left, s[i]), top, step));
    for (size_t l = 0; l < left; ++l) sum[1][l] += e[l];
  }
  return ReduceAdd(sum[0] + sum[1]);
}

template <typename T>
void Weigh(const T* const* s, int rows, size_t n, const float* top, const float* step, const float* weight,
           float* out) {
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t left = n - i;
    VecF sum{};
    for (int r = 0; r < rows; ++r) {
      const VecF score = left >= size_t(kLanes) ? LoadScores(s[r] + i) : LoadRest(s[r] + i, left, s[r][i]);
      sum = MulAdd(ExpNegative(Distance(s[r], score, top[r], step[r])), SetF(weight[r]), sum);
    }
    if (left >= size_t(kLanes)) {
      StoreF(out + i, sum);
    } else {
      for (size_t l = 0; l < left; ++l) out[i + l] = sum[l];
    }
  }
}

// ---- the k largest -------------------------------------------------------------------------------------------------

KVMANAGER_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

/// The bin, from the top, in which the k-th largest lies; *above becomes how many lie in higher bins.
KVMANAGER_INLINE uint32_t FindBin(const uint32_t* histogram, uint32_t bins, size_t k, size_t* above) {
  size_t seen = 0;
  for (uint32_t bin = bins; bin-- > 0;) {
    size_t count = 0;
    KVMANAGER_UNROLL
    for (int h = 0; h < kHistograms; ++h) count += histogram[h * kHistogramBins + bin];
    if (seen + count >= k) {
      *above = seen;
      return bin;
    }
    seen += count;
  }
  *above = seen;
  return 0;
}

/// Bits of the values whose bits >> shift are `bin`.
KVMANAGER_INLINE size_t Gather(const uint32_t* from, size_t n, int shift, uint32_t bin, uint32_t* to) {
  size_t count = 0, i = 0;
#if defined(KVMANAGER_ISA_AVX512)
  const __m512i wanted = _mm512_set1_epi32(int(bin));
  for (; i + 16 <= n; i += 16) {
    const __m512i x = _mm512_loadu_si512(from + i);
    const __mmask16 in = _mm512_cmpeq_epi32_mask(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), wanted);
    // In registers first: compressing straight to memory is slow on some processors. `to` may be `from`, read before.
    const __m512i packed = _mm512_maskz_compress_epi32(in, x);
    _mm512_mask_storeu_epi32(to + count, __mmask16((1u << __builtin_popcount(in)) - 1), packed);
    count += __builtin_popcount(in);
  }
#endif
  for (; i < n; ++i) {
    const uint32_t x = from[i];
    if (x >> shift == bin) to[count++] = x;
  }
  return count;
}

/// Bits of the values whose bits are at least `least`.
KVMANAGER_INLINE size_t GatherFrom(const uint32_t* from, size_t n, uint32_t least, uint32_t* to) {
  size_t count = 0, i = 0;
#if defined(KVMANAGER_ISA_AVX512)
  const __m512i limit = _mm512_set1_epi32(int(least));
  for (; i + 16 <= n; i += 16) {
    const __m512i x = _mm512_loadu_si512(from + i);
    const __mmask16 in = _mm512_cmpge_epu32_mask(x, limit);
    const __m512i packed = _mm512_maskz_compress_epi32(in, x);
    _mm512_mask_storeu_epi32(to + count, __mmask16((1u << __builtin_popcount(in)) - 1), packed);
    count += __builtin_popcount(in);
  }
#endif
  for (; i < n; ++i) {
    uint32_t x;
    __builtin_memcpy(&x, from + i, sizeof x);
    if (x >= least) to[count++] = x;
  }
  return count;
}

/// The k-th largest of n values given as bits; *above = how many are larger. Radix of 11, 10 and 10 bits. `from` may be
/// `candidates`.
KVMANAGER_INLINE uint32_t RadixThreshold(const uint32_t* from, size_t n, size_t k, uint32_t* candidates,
                                         uint32_t* histogram, size_t* above) {
  *above = 0;
  uint32_t threshold = 0;
  size_t left = n, wanted = k;
  constexpr int kShifts[] = {20, 10, 0};
  for (int level = 0; level < 3; ++level) {
    const int shift = kShifts[level];
    const uint32_t mask = level == 0 ? 2047 : 1023;
    __builtin_memset(histogram, 0, sizeof(uint32_t) * kHistograms * kHistogramBins);
    size_t i = 0;
    // Neighbours are often equal: several histograms keep the increments independent.
    for (; i + kHistograms <= left; i += kHistograms) {
      KVMANAGER_UNROLL
      for (int h = 0; h < kHistograms; ++h) {
        uint32_t x;
        __builtin_memcpy(&x, from + i + h, sizeof x);
        ++histogram[h * kHistogramBins + (x >> shift & mask)];
      }
    }
    for (; i < left; ++i) {
      uint32_t x;
      __builtin_memcpy(&x, from + i, sizeof x);
      ++histogram[x >> shift & mask];
    }
    size_t higher;
    const uint32_t bin = FindBin(histogram, mask + 1, wanted, &higher);
    *above += higher;
    wanted -= higher;
    threshold = level == 0 ? bin : threshold << 10 | bin;
    if (level < 2) {
      left = Gather(from, left, shift, threshold, candidates);
      from = candidates;
    }
  }
  return threshold;
}

/// The k-th largest of n values >= 0 as bits, which order as the values do; *above = how many are larger. Of many
/// values a sample says from where on the k largest lie, most likely; if it errs, all are sorted into the histogram.
KVMANAGER_INLINE uint32_t Threshold(const float* values, size_t n, size_t k, uint32_t* candidates, uint32_t* histogram,
                                    size_t* above) {
  constexpr size_t kSampleStep = 16, kSampledFrom = 4096;
  const uint32_t* bits = reinterpret_cast<const uint32_t*>(values);
  if (n >= kSampledFrom && k <= n / 4) {
    const size_t sampled = n / kSampleStep, rank = k / kSampleStep * 5 / 4 + 16;
    for (size_t i = 0; i < sampled; ++i) __builtin_memcpy(candidates + i, bits + i * kSampleStep, sizeof(uint32_t));
    const uint32_t least =
        RadixThreshold(candidates, sampled, rank < sampled ? rank : sampled, candidates, histogram, above);
    const size_t found = GatherFrom(bits, n, least, candidates);
    if (found >= k) return RadixThreshold(candidates, found, k, candidates, histogram, above);
  }
  return RadixThreshold(bits, n, k, candidates, histogram, above);
}

void Select(const float* values, size_t n, size_t k, uint32_t first, uint32_t* out, uint32_t* candidates,
            uint32_t* histogram) {
  if (k == 0) return;
  size_t above;
  const uint32_t threshold = Threshold(values, n, k, candidates, histogram, &above);
  size_t ties = k - above, count = 0, i = 0;
#if defined(KVMANAGER_ISA_AVX512)
  const __m512i limit = _mm512_set1_epi32(int(threshold));
  __m512i index = _mm512_add_epi32((__m512i)Iota(), _mm512_set1_epi32(int(first)));
  for (; i + 16 <= n && count < k; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
    const __m512i x = _mm512_loadu_si512(values + i);
    uint32_t in = _mm512_cmpge_epu32_mask(x, limit);
    uint32_t equal = _mm512_cmpeq_epi32_mask(x, limit);
    size_t equals = __builtin_popcount(equal);
    if (equals > ties) {
      // The lowest `ties` of them.
      uint32_t kept = 0;
      for (size_t t = 0; t < ties; ++t, equal &= equal - 1) kept |= equal & -equal;
      in &= ~equal;
      in |= kept;
      equals = ties;
    }
    ties -= equals;
    const size_t chosen = __builtin_popcount(in);
    _mm512_mask_storeu_epi32(out + count, __mmask16((1u << chosen) - 1),
                             _mm512_maskz_compress_epi32(__mmask16(in), index));
    count += chosen;
  }
#endif
  for (; i < n && count < k; ++i) {
    const uint32_t x = BitsOf(values[i]);
    if (x > threshold || (x == threshold && ties > 0)) {
      ties -= x == threshold;
      out[count++] = first + uint32_t(i);
    }
  }
}

}  // namespace
}  // namespace kvmanager::pq
