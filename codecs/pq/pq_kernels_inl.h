// PQ's kernels, written once over simd_inl.h's vectors and compiled per instruction set, without contraction of
// multiplications and additions: where they may fuse, MulAdd says so.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/pq/pq_kernels.h"

#if defined(KVMANAGER_PQ_VBMI)
#pragma GCC target("avx512vbmi")
#endif

#include "codecs/pq/pq_rows_inl.h"
#include "codecs/pq/pq_select_inl.h"

namespace kvmanager::pq {
namespace {

/// Nearest centroids of kT vectors, kV vectors of centroids at a time. The sum over channels is in order, in each lane,
/// with rounding after each multiplication and each addition.
template <int kT, int kV>
KVMANAGER_INLINE void NearestTile(const float* x, int width, const float* centroids, const float* half_norms, int count,
                                  uint8_t* codes) {
  VecF best[kT];
  VecI at[kT];
  KVMANAGER_UNROLL
  for (int i = 0; i < kT; ++i) {
    best[i] = SetF(__builtin_inff());
    at[i] = VecI{};
  }
  for (int c = 0; c < count; c += kV * kLanes) {
    VecF dot[kT][kV] = {};
    const float* row = centroids + c;
    for (int j = 0; j < width; ++j, row += count) {
      KVMANAGER_UNROLL
      for (int v = 0; v < kV; ++v) {
        const VecF y = LoadF(row + v * kLanes);
        KVMANAGER_UNROLL
        for (int i = 0; i < kT; ++i) dot[i][v] = dot[i][v] + SetF(x[i * width + j]) * y;
      }
    }
    KVMANAGER_UNROLL
    for (int v = 0; v < kV; ++v) {
      const VecF half = LoadF(half_norms + c + v * kLanes);
      const VecI index = Iota() + (c + v * kLanes);
      KVMANAGER_UNROLL
      for (int i = 0; i < kT; ++i) {
        const VecF distance = half - dot[i][v];
        const VecI closer = distance < best[i];
        best[i] = closer ? distance : best[i];
        at[i] = closer ? index : at[i];
      }
    }
  }
  for (int i = 0; i < kT; ++i) {
    int32_t code = at[i][0];
    float least = best[i][0];
    for (int l = 1; l < kLanes; ++l) {
      if (best[i][l] < least || (best[i][l] == least && at[i][l] < code)) {
        least = best[i][l];
        code = at[i][l];
      }
    }
    codes[i] = uint8_t(code);
  }
}

template <int kV>
KVMANAGER_INLINE void NearestAll(const float* x, size_t n, int width, const float* centroids, const float* half_norms,
                                 int count, uint8_t* codes) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) NearestTile<4, kV>(x + i * width, width, centroids, half_norms, count, codes + i);
  for (; i < n; ++i) NearestTile<1, kV>(x + i * width, width, centroids, half_norms, count, codes + i);
}

void Nearest(const float* x, size_t n, int width, const float* centroids, const float* half_norms, int count,
             uint8_t* codes) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;
  if (count % (kWide * kLanes) == 0) {
    NearestAll<kWide>(x, n, width, centroids, half_norms, count, codes);
  } else {
    NearestAll<1>(x, n, width, centroids, half_norms, count, codes);
  }
}

void Dots(const float* x, int width, const float* centroids, int count, float scale, float* out, float* low,
          float* high) {
  VecF least = SetF(__builtin_inff()), most = -least;
  const auto keep = [&](int c, VecF dot) {
    dot *= scale;
    StoreF(out + c, dot);
    least = MinF(least, dot);
    most = MaxF(most, dot);
  };
  // Several sums at once hide the latency of a multiply-add.
  constexpr int kAtOnce = 4;
  int c = 0;
  for (; c + kAtOnce * kLanes <= count; c += kAtOnce * kLanes) {
    VecF dot[kAtOnce] = {};
    for (int j = 0; j < width; ++j) {
      const VecF y = SetF(x[j]);
      KVMANAGER_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        dot[i] = MulAdd(y, LoadF(centroids + size_t(j) * count + c + i * kLanes), dot[i]);
      }
    }
    for (int i = 0; i < kAtOnce; ++i) keep(c + i * kLanes, dot[i]);
  }
  for (; c < count; c += kLanes) {
    VecF dot{};
    for (int j = 0; j < width; ++j) dot = MulAdd(SetF(x[j]), LoadF(centroids + size_t(j) * count + c), dot);
    keep(c, dot);
  }
  *low = ReduceMin(least);
  *high = ReduceMax(most);
}

void PackTable(const float* values, int count, float low, float inverse_step, uint8_t* table) {
  for (int c = 0; c < count; c += kLanes) {
    const VecI entry = RoundToInt((LoadF(values + c) - low) * inverse_step);
    StoreBytes(table + c, entry & 255);
    StoreBytes(table + 256 + c, entry >> 8 & 255);
  }
}

#if defined(KVMANAGER_PQ_VBMI)
/// Entries of one byte plane: tables of 64, 128 or 256 bytes in 1, 2 or 4 registers.
template <int kRegisters>
KVMANAGER_INLINE __m512i Permute(const __m512i (&t)[kRegisters], __m512i index, __mmask64 upper) {
  if constexpr (kRegisters == 1) return _mm512_permutexvar_epi8(index, t[0]);
  if constexpr (kRegisters >= 2) {
    const __m512i low = _mm512_permutex2var_epi8(t[0], index, t[1]);
    if constexpr (kRegisters == 2) return low;
    return _mm512_mask_mov_epi8(low, upper, _mm512_permutex2var_epi8(t[kRegisters - 2], index, t[kRegisters - 1]));
  }
}

template <int kRegisters, bool kFirst, bool kLast>
KVMANAGER_INLINE void LookUpBytes(const uint8_t* codes, size_t n, const uint8_t* table, uint16_t* sums) {
  __m512i low[kRegisters], high[kRegisters];
  KVMANAGER_UNROLL
  for (int i = 0; i < kRegisters; ++i) {
    low[i] = _mm512_loadu_si512(table + 64 * i);
    high[i] = _mm512_loadu_si512(table + 256 + 64 * i);
  }
  // Unpacking interleaves within 128-bit lanes; the last subspace puts the tokens in order again.
  const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (size_t i = 0; i < n; i += 64) {
    const __mmask64 seen = n - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (n - i)) - 1;
    const __m512i index = _mm512_maskz_loadu_epi8(seen, codes + i);
    const __mmask64 upper = kRegisters == 4 ? _mm512_movepi8_mask(index) : 0;
    const __m512i l = Permute<kRegisters>(low, index, upper), h = Permute<kRegisters>(high, index, upper);
    __m512i a = _mm512_unpacklo_epi8(l, h), b = _mm512_unpackhi_epi8(l, h);
    if constexpr (!kFirst) {
      a = _mm512_add_epi16(a, _mm512_loadu_si512(sums + i));
      b = _mm512_add_epi16(b, _mm512_loadu_si512(sums + i + 32));
    }
    if constexpr (kLast) {
      _mm512_storeu_si512(sums + i, _mm512_permutex2var_epi64(a, first_half, b));
      _mm512_storeu_si512(sums + i + 32, _mm512_permutex2var_epi64(a, second_half, b));
    } else {
      _mm512_storeu_si512(sums + i, a);
      _mm512_storeu_si512(sums + i + 32, b);
    }
  }
}

template <int kRegisters>
KVMANAGER_INLINE void LookUpOf(const uint8_t* codes, size_t n, const uint8_t* table, bool first, bool last,
                               uint16_t* sums) {
  if (first && last) return LookUpBytes<kRegisters, true, true>(codes, n, table, sums);
  if (first) return LookUpBytes<kRegisters, true, false>(codes, n, table, sums);
  if (last) return LookUpBytes<kRegisters, false, true>(codes, n, table, sums);
  LookUpBytes<kRegisters, false, false>(codes, n, table, sums);
}

void LookUp(const uint8_t* codes, size_t n, const uint8_t* table, int bits, bool first, bool last, uint16_t* sums) {
  if (bits <= 6) return LookUpOf<1>(codes, n, table, first, last, sums);
  if (bits == 7) return LookUpOf<2>(codes, n, table, first, last, sums);
  LookUpOf<4>(codes, n, table, first, last, sums);
}
#else
void LookUp(const uint8_t* codes, size_t n, const uint8_t* table, int bits, bool first, bool last, uint16_t* sums) {
  uint16_t entries[256];
  for (int i = 0; i < 1 << bits; ++i) entries[i] = uint16_t(table[i] | table[256 + i] << 8);
  if (first) {
    for (size_t i = 0; i < n; ++i) sums[i] = entries[codes[i]];
  } else {
    for (size_t i = 0; i < n; ++i) sums[i] = uint16_t(sums[i] + entries[codes[i]]);
  }
}
#endif

}  // namespace

#if defined(KVMANAGER_PQ_VBMI)
#define KVMANAGER_PQ_KERNELS kKernelsVbmi
#elif defined(KVMANAGER_ISA_AVX512)
#define KVMANAGER_PQ_KERNELS kKernelsAvx512
#elif defined(KVMANAGER_ISA_AVX2)
#define KVMANAGER_PQ_KERNELS kKernelsAvx2
#else
#define KVMANAGER_PQ_KERNELS kKernelsPortable
#endif

const Kernels KVMANAGER_PQ_KERNELS = {
    Nearest,         Dots,         PackTable, LookUp,    Top<uint16_t>, Top<float>, SumExp<uint16_t>, SumExp<float>,
    Weigh<uint16_t>, Weigh<float>, Select,    ScoreRows, AttendRows};

}  // namespace kvmanager::pq
