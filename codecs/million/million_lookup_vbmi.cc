// Look-ups by permutes: a channel's table lies in one to eight registers, and one vpermi2b serves 64 tokens of 128
// entries.
#if defined(__x86_64__)
#define KVMANAGER_ISA_AVX512
#include "codecs/simd_inl.h"
#pragma GCC target("avx512vbmi")
#include "codecs/million/million_lookup.h"

namespace kvmanager::million {
namespace {

/// The indices of a subspace's 64 tokens.
struct Indices {
  __m512i low;  // bits 0..7
  __mmask64 bit7;
  __mmask64 bit8;
};

template <int kBits>
KVMANAGER_INLINE Indices LoadIndices(const SideLayout& side, const uint8_t* strip, int m) {
  Indices indices = {};
  if constexpr (kBits >= 8) {
    indices.low = _mm512_loadu_si512(strip + side.plane[0] + m * 64);
    indices.bit7 = _mm512_movepi8_mask(indices.low);
  } else {
    const __m256i nibbles = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(strip + side.plane[1] + m * 32));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(nibbles), _mm256_srli_epi16(nibbles, 4), 1);
    indices.low = _mm512_and_si512(both, _mm512_set1_epi8(15));
  }
  if constexpr ((kBits & 2) != 0) {
    const __m512i four =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(strip + side.plane[2] + m * 16)));
    const __m512i pairs = _mm512_srlv_epi64(four, _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6));
    const __m512i placed = _mm512_slli_epi16(_mm512_and_si512(pairs, _mm512_set1_epi8(3)), 4);
    indices.low = _mm512_or_si512(indices.low, placed);
  }
  if constexpr ((kBits & 1) != 0) {
    __mmask64 bits;
    __builtin_memcpy(&bits, strip + side.plane[3] + m * 8, 8);
    if constexpr (kBits == 9) {
      indices.bit8 = bits;
    } else {
      const __m512i set = _mm512_set1_epi8(kBits == 5 ? 16 : 64);
      indices.low = _mm512_or_si512(indices.low, _mm512_maskz_mov_epi8(bits, set));
    }
  }
  return indices;
}

/// One channel's table in registers.
template <int kBits>
struct Table {
  static constexpr int kEntries = kBits > 6 ? 1 << kBits : 64;
  __m512i part[kEntries / 64];
};

template <int kBits>
KVMANAGER_INLINE Table<kBits> LoadTable(const uint8_t* codes, int channel) {
  Table<kBits> table;
  KVMANAGER_UNROLL
  for (int i = 0; i < Table<kBits>::kEntries / 64; ++i) {
    table.part[i] = _mm512_load_si512(codes + size_t(channel) * Table<kBits>::kEntries + 64 * i);
  }
  return table;
}

KVMANAGER_INLINE __m512i LookUp256(const __m512i* part, const Indices& indices) {
  const __m512i low = _mm512_permutex2var_epi8(part[0], indices.low, part[1]);
  const __m512i high = _mm512_permutex2var_epi8(part[2], indices.low, part[3]);
  return _mm512_mask_mov_epi8(low, indices.bit7, high);
}

/// Codes of one channel, in order of tokens.
template <int kBits>
KVMANAGER_INLINE __m512i LookUp(const Table<kBits>& table, const Indices& indices) {
  if constexpr (kBits <= 6) {
    return _mm512_permutexvar_epi8(indices.low, table.part[0]);
  } else if constexpr (kBits == 7) {
    return _mm512_permutex2var_epi8(table.part[0], indices.low, table.part[1]);
  } else if constexpr (kBits == 8) {
    return LookUp256(table.part, indices);
  } else {
    return _mm512_mask_mov_epi8(LookUp256(table.part, indices), indices.bit8, LookUp256(table.part + 4, indices));
  }
}

/// Codes of four channels from `first` on, a multiple of 4. kWidth: the subspace's width, or 0 for any.
template <int kBits, int kWidth>
KVMANAGER_INLINE void LookUpFour(const SideLayout& side, const Table<kBits> (&tables)[4], const uint8_t* strip,
                                 int first, __m512i (&out)[4]) {
  if constexpr (kWidth > 0) {
    static_assert(4 % kWidth == 0);
    KVMANAGER_UNROLL
    for (int i = 0; i < 4; i += kWidth) {
      const Indices indices = LoadIndices<kBits>(side, strip, (first + i) / kWidth);
      KVMANAGER_UNROLL
      for (int k = i; k < i + kWidth; ++k) out[k] = LookUp<kBits>(tables[k], indices);
    }
  } else {
    int m = first / side.width, k = first % side.width;
    Indices indices = LoadIndices<kBits>(side, strip, m);
    KVMANAGER_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (k == side.width) {
        k = 0;
        indices = LoadIndices<kBits>(side, strip, ++m);
      }
      out[i] = LookUp<kBits>(tables[i], indices);
      ++k;
    }
  }
}

/// Bytes of four channels, 64 tokens each, to words of one token: words 16 L + 4 v + i are of token 16 L + 4 v + i, in
/// quarter L of out[v].
KVMANAGER_INLINE void InterleaveBytes(const __m512i (&x)[4], __m512i (&out)[4]) {
  const __m512i ab_low = _mm512_unpacklo_epi8(x[0], x[1]), ab_high = _mm512_unpackhi_epi8(x[0], x[1]);
  const __m512i cd_low = _mm512_unpacklo_epi8(x[2], x[3]), cd_high = _mm512_unpackhi_epi8(x[2], x[3]);
  out[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
  out[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
  out[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
  out[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

/// Quarter L of out[v]: word 4 L + v (tokens 16 L + 4 v .. + 3) of the four channels.
KVMANAGER_INLINE void InterleaveWords(const __m512i (&x)[4], __m512i (&out)[4]) {
  const __m512i ab_low = _mm512_unpacklo_epi32(x[0], x[1]), ab_high = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i cd_low = _mm512_unpacklo_epi32(x[2], x[3]), cd_high = _mm512_unpackhi_epi32(x[2], x[3]);
  out[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
  out[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
  out[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
  out[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

template <int kSide, int kBits, int kWidth>
void LookUpStrips(const SideLayout& side, const SideTable& table, int first, int channels, const uint8_t* const* strips,
                  int count, uint32_t* words) {
  for (int c = first; c < first + channels; c += 4, words += kStripTokens) {
    Table<kBits> tables[4];
    KVMANAGER_UNROLL
    for (int i = 0; i < 4; ++i) tables[i] = LoadTable<kBits>(table.by_channel, c + i);
    uint32_t* out = words;
    for (int strip = 0; strip < count; ++strip, out += StripWords(channels)) {
      __m512i x[4], y[4];
      LookUpFour<kBits, kWidth>(side, tables, strips[strip], c, x);
      if constexpr (kSide == 0) {
        InterleaveBytes(x, y);
      } else {
        InterleaveWords(x, y);
      }
      KVMANAGER_UNROLL
      for (int i = 0; i < 4; ++i) _mm512_store_si512(out + 16 * i, y[i]);
    }
  }
}

template <int kSide, int kBits>
LookUpFunction OfWidth(int width) {
  if (width == 2) return LookUpStrips<kSide, kBits, 2>;
  if (width == 4) return LookUpStrips<kSide, kBits, 4>;
  return LookUpStrips<kSide, kBits, 0>;
}

template <int kSide>
LookUpFunction OfSide(const SideLayout& side) {
  constexpr LookUpFunction (*kOfWidth[])(int) = {OfWidth<kSide, 4>, OfWidth<kSide, 5>, OfWidth<kSide, 6>,
                                                 OfWidth<kSide, 7>, OfWidth<kSide, 8>, OfWidth<kSide, 9>};
  return kOfWidth[side.bits - 4](side.width);
}

}  // namespace

LookUpFunction LookUpKByPermute(const SideLayout& side) { return OfSide<0>(side); }
LookUpFunction LookUpVByPermute(const SideLayout& side) { return OfSide<1>(side); }

}  // namespace kvmanager::million
#endif
