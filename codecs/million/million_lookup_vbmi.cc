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

KVMANAGER_INLINE __m512i Table(const uint8_t* table, int i) { return _mm512_load_si512(table + 64 * i); }

KVMANAGER_INLINE __m512i LookUp256(const uint8_t* table, const Indices& indices) {
  const __m512i low = _mm512_permutex2var_epi8(Table(table, 0), indices.low, Table(table, 1));
  const __m512i high = _mm512_permutex2var_epi8(Table(table, 2), indices.low, Table(table, 3));
  return _mm512_mask_mov_epi8(low, indices.bit7, high);
}

/// Codes of one channel, in order of tokens.
template <int kBits>
KVMANAGER_INLINE __m512i LookUp(const uint8_t* table, const Indices& indices) {
  if constexpr (kBits <= 6) {
    return _mm512_permutexvar_epi8(indices.low, Table(table, 0));
  } else if constexpr (kBits == 7) {
    return _mm512_permutex2var_epi8(Table(table, 0), indices.low, Table(table, 1));
  } else if constexpr (kBits == 8) {
    return LookUp256(table, indices);
  } else {
    return _mm512_mask_mov_epi8(LookUp256(table, indices), indices.bit8, LookUp256(table + 256, indices));
  }
}

/// Codes of kCount channels from `first` on. kWidth: the subspace's width, or 0 for any.
template <int kBits, int kWidth, int kCount>
KVMANAGER_INLINE void LookUpChannels(const SideLayout& side, const SideTable& table, const uint8_t* strip, int first,
                                     __m512i (&out)[kCount]) {
  const int entries = kBits > 6 ? 1 << kBits : 64;
  const uint8_t* codes = table.by_channel + size_t(first) * entries;
  if constexpr (kWidth > 0 && kCount % kWidth == 0) {
    const int m = first / kWidth;
    KVMANAGER_UNROLL
    for (int s = 0; s < kCount / kWidth; ++s) {
      const Indices indices = LoadIndices<kBits>(side, strip, m + s);
      KVMANAGER_UNROLL
      for (int k = 0; k < kWidth; ++k) {
        const int i = s * kWidth + k;
        out[i] = LookUp<kBits>(codes + i * entries, indices);
      }
    }
  } else {
    int m = first / side.width, k = first % side.width;
    Indices indices = LoadIndices<kBits>(side, strip, m);
    KVMANAGER_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (k == side.width) {
        k = 0;
        indices = LoadIndices<kBits>(side, strip, ++m);
      }
      out[i] = LookUp<kBits>(codes + i * entries, indices);
      ++k;
    }
  }
}

template <int kBits, int kWidth>
void LookUpK(const SideLayout& side, const SideTable& table, int head_dim, const uint8_t* strip, uint32_t* words) {
  for (int c = 0; c < head_dim; c += 4) {
    __m512i x[4];
    LookUpChannels<kBits, kWidth, 4>(side, table, strip, c, x);
    const __m512i ab_low = _mm512_unpacklo_epi8(x[0], x[1]), ab_high = _mm512_unpackhi_epi8(x[0], x[1]);
    const __m512i cd_low = _mm512_unpacklo_epi8(x[2], x[3]), cd_high = _mm512_unpackhi_epi8(x[2], x[3]);
    uint32_t* out = words + c / 4 * kStripTokens;
    _mm512_store_si512(out, _mm512_unpacklo_epi16(ab_low, cd_low));
    _mm512_store_si512(out + 16, _mm512_unpackhi_epi16(ab_low, cd_low));
    _mm512_store_si512(out + 32, _mm512_unpacklo_epi16(ab_high, cd_high));
    _mm512_store_si512(out + 48, _mm512_unpackhi_epi16(ab_high, cd_high));
  }
}

/// Word j of x[i] to word i of x[j].
KVMANAGER_INLINE void Transpose16(__m512i (&x)[16]) {
  __m512i y[16];
  KVMANAGER_UNROLL
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  // x[4 i + r]: words r, 4 + r, 8 + r, 12 + r of channels 4 i .. 4 i + 3, a quarter each.
  KVMANAGER_UNROLL
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  KVMANAGER_UNROLL
  for (int r = 0; r < 4; ++r) {
    const __m512i low01 = _mm512_shuffle_i64x2(x[r], x[4 + r], 0x44),
                  high01 = _mm512_shuffle_i64x2(x[r], x[4 + r], 0xee);
    const __m512i low23 = _mm512_shuffle_i64x2(x[8 + r], x[12 + r], 0x44),
                  high23 = _mm512_shuffle_i64x2(x[8 + r], x[12 + r], 0xee);
    y[r] = _mm512_shuffle_i64x2(low01, low23, 0x88);
    y[4 + r] = _mm512_shuffle_i64x2(low01, low23, 0xdd);
    y[8 + r] = _mm512_shuffle_i64x2(high01, high23, 0x88);
    y[12 + r] = _mm512_shuffle_i64x2(high01, high23, 0xdd);
  }
  KVMANAGER_UNROLL
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

template <int kBits, int kWidth>
void LookUpV(const SideLayout& side, const SideTable& table, int head_dim, const uint8_t* strip, uint32_t* words) {
  for (int c = 0; c < head_dim; c += 16) {
    __m512i x[16];
    LookUpChannels<kBits, kWidth, 16>(side, table, strip, c, x);
    Transpose16(x);
    // Word 4 L + i of a channel holds tokens 16 L + 4 i .. + 3, which TokenAt puts at place 16 i + 4 L.
    KVMANAGER_UNROLL
    for (int j = 0; j < 16; ++j) _mm512_store_si512(words + size_t(j % 4 * 4 + j / 4) * head_dim + c, x[j]);
  }
}

template <int kBits>
LookUpFunction KOfWidth(int width) {
  if (width == 2) return LookUpK<kBits, 2>;
  if (width == 4) return LookUpK<kBits, 4>;
  return LookUpK<kBits, 0>;
}

template <int kBits>
LookUpFunction VOfWidth(int width) {
  if (width == 2) return LookUpV<kBits, 2>;
  if (width == 4) return LookUpV<kBits, 4>;
  return LookUpV<kBits, 0>;
}

}  // namespace

LookUpFunction LookUpKByPermute(const SideLayout& side) {
  constexpr LookUpFunction (*kOfWidth[])(int) = {KOfWidth<4>, KOfWidth<5>, KOfWidth<6>,
                                                 KOfWidth<7>, KOfWidth<8>, KOfWidth<9>};
  return kOfWidth[side.bits - 4](side.width);
}

LookUpFunction LookUpVByPermute(const SideLayout& side) {
  constexpr LookUpFunction (*kOfWidth[])(int) = {VOfWidth<4>, VOfWidth<5>, VOfWidth<6>,
                                                 VOfWidth<7>, VOfWidth<8>, VOfWidth<9>};
  return kOfWidth[side.bits - 4](side.width);
}

}  // namespace kvmanager::million
#endif
