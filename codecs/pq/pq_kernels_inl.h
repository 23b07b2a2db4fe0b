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

/// kV vectors of centroids from c on.
template <int kV>
KVMANAGER_INLINE void DotsTile(const float* x, int width, const float* centroids, int count, float scale, float* out,
                               VecF& least, VecF& most) {
  VecF dot[kV] = {};
  for (int j = 0; j < width; ++j) {
    KVMANAGER_UNROLL
    for (int v = 0; v < kV; ++v) dot[v] = dot[v] + SetF(x[j]) * LoadF(centroids + size_t(j) * count + v * kLanes);
  }
  KVMANAGER_UNROLL
  for (int v = 0; v < kV; ++v) {
    dot[v] *= scale;
    StoreF(out + v * kLanes, dot[v]);
    least = MinF(least, dot[v]);
    most = MaxF(most, dot[v]);
  }
}

void Dots(const float* x, int width, const float* centroids, int count, float scale, float* out, float* low,
          float* high) {
  // Wide: centroids are read in the order of memory.
  constexpr int kWide = kLanes == 16 ? 16 : 8;
  VecF least = SetF(__builtin_inff()), most = -least;
  int c = 0;
  for (; c + kWide * kLanes <= count; c += kWide * kLanes) {
    DotsTile<kWide>(x, width, centroids + c, count, scale, out + c, least, most);
  }
  for (; c < count; c += kLanes) DotsTile<1>(x, width, centroids + c, count, scale, out + c, least, most);
  *low = ReduceMin(least);
  *high = ReduceMax(most);
}

void PackTable(const float* values, int count, float high, float inverse_unit, uint8_t* table) {
  for (int c = 0; c < count; c += kLanes) {
    const VecI entry = RoundToInt(MinF((high - LoadF(values + c)) * inverse_unit, SetF(kSumMax)));
    StoreBytes(table + c, entry & ((1 << kTableLowBits) - 1));
    StoreBytes(table + 256 + c, entry >> kTableLowBits & 255);
  }
}

#if defined(KVMANAGER_PQ_VBMI)
constexpr size_t kPlaneTokens = 1024;
constexpr int kLookUpRows = 2;  // their tables fill half of the registers

/// Sums of low and of high bits, apart until every sub-vector is added.
struct Planes {
  alignas(64) uint8_t low[kLookUpRows][kPlaneTokens], high[kLookUpRows][kPlaneTokens];
};

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

/// One sub-vector of kR rows, n <= kPlaneTokens.
template <int kRegisters, int kR, bool kFirst>
KVMANAGER_INLINE void LookUpBytes(const uint8_t* codes, const uint8_t* ahead, size_t n, const uint8_t* table,
                                  size_t table_stride, Planes& planes) {
  __m512i low[kR][kRegisters], high[kR][kRegisters];
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    KVMANAGER_UNROLL
    for (int i = 0; i < kRegisters; ++i) {
      low[r][i] = _mm512_loadu_si512(table + r * table_stride + 64 * i);
      high[r][i] = _mm512_loadu_si512(table + r * table_stride + 256 + 64 * i);
    }
  }
  for (size_t i = 0; i < n; i += 64) {
    const __mmask64 seen = n - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (n - i)) - 1;
    const __m512i index = _mm512_maskz_loadu_epi8(seen, codes + i);
    __builtin_prefetch(ahead + i, 0, 3);
    const __mmask64 upper = kRegisters == 4 ? _mm512_movepi8_mask(index) : 0;
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      __m512i l = Permute<kRegisters>(low[r], index, upper), h = Permute<kRegisters>(high[r], index, upper);
      if constexpr (!kFirst) {
        l = _mm512_add_epi8(l, _mm512_load_si512(planes.low[r] + i));
        h = _mm512_add_epi8(h, _mm512_load_si512(planes.high[r] + i));
      }
      _mm512_store_si512(planes.low[r] + i, l);
      _mm512_store_si512(planes.high[r] + i, h);
    }
  }
}

template <int kRegisters, int kR>
KVMANAGER_INLINE void LookUpRows(const LookUpArguments& a, int row) {
  Planes planes;
  for (size_t at = 0; at < a.n; at += kPlaneTokens) {
    const size_t n = a.n - at < kPlaneTokens ? a.n - at : kPlaneTokens;
    const uint8_t *codes = a.codes + at, *ahead = a.ahead + at;
    const uint8_t* table = a.tables + row * a.table_stride;
    LookUpBytes<kRegisters, kR, true>(codes, ahead, n, table, a.table_stride, planes);
    for (int s = 1; s < a.subspaces; ++s) {
      const size_t to = s * a.code_stride;
      LookUpBytes<kRegisters, kR, false>(codes + to, ahead + to, n, table + s * kTableBytes, a.table_stride, planes);
    }
    for (int r = 0; r < kR; ++r) {
      uint16_t* sums = a.sums + (row + r) * a.sums_stride + at;
      for (size_t i = 0; i < n; i += 32) {
        const __m512i l = _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<__m256i*>(planes.low[r] + i)));
        const __m512i h = _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<__m256i*>(planes.high[r] + i)));
        __m512i sum = _mm512_add_epi16(l, _mm512_slli_epi16(h, kTableLowBits));
        if (!a.first) sum = _mm512_add_epi16(sum, _mm512_loadu_si512(sums + i));
        _mm512_storeu_si512(sums + i, sum);
      }
    }
  }
}

template <int kRegisters>
KVMANAGER_INLINE void LookUpOf(const LookUpArguments& a) {
  int row = 0;
  for (; row + kLookUpRows <= a.rows; row += kLookUpRows) LookUpRows<kRegisters, kLookUpRows>(a, row);
  if (row < a.rows) LookUpRows<kRegisters, 1>(a, row);
}

void LookUp(const LookUpArguments& a) {
  if (a.bits <= 6) return LookUpOf<1>(a);
  if (a.bits == 7) return LookUpOf<2>(a);
  LookUpOf<4>(a);
}
#else
void LookUp(const LookUpArguments& a) {
  for (int r = 0; r < a.rows; ++r) {
    uint16_t* sums = a.sums + r * a.sums_stride;
    for (int s = 0; s < a.subspaces; ++s) {
      const uint8_t* codes = a.codes + s * a.code_stride;
      const uint8_t* table = a.tables + r * a.table_stride + s * kTableBytes;
      uint16_t entries[256];
      for (int i = 0; i < 1 << a.bits; ++i) entries[i] = uint16_t(table[i] | table[256 + i] << kTableLowBits);
      if (a.first && s == 0) {
        for (size_t i = 0; i < a.n; ++i) sums[i] = entries[codes[i]];
      } else {
        for (size_t i = 0; i < a.n; ++i) sums[i] = uint16_t(sums[i] + entries[codes[i]]);
      }
    }
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

const Kernels KVMANAGER_PQ_KERNELS = {Nearest, Dots,     PackTable, LookUp, Least,     Exponentials, Weigh,
                                      Top32,   SumExp32, Weigh32,   Select, ScoreRows, AttendRows};

}  // namespace kvmanager::pq
