// The nearest centroid of 64 tokens' sub-vectors, written once over simd_inl.h's vectors and compiled per instruction
// set, without contraction: a lane does NearestCentroid's operations (million_reference.h) in its order.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/million/million_encode_kernel.h"

namespace kvmanager::million {
namespace {

constexpr int kTokens = 64;  // of a strip
// Vectors of tokens that share a centroid's broadcast: as many as the registers hold.
constexpr int kShared = kLanes == 16 ? 4 : 2;

/// best and index where key is less than best: key and `at`.
KVMANAGER_INLINE void TakeLess(VecF key, VecU at, VecF& best, VecU& index) {
#if defined(KVMANAGER_ISA_AVX512)
  const __mmask16 less = _mm512_cmp_ps_mask(key, best, _CMP_LT_OQ);
  best = _mm512_min_ps(key, best);
  index = (VecU)_mm512_mask_mov_epi32((__m512i)index, less, (__m512i)at);
#elif defined(KVMANAGER_ISA_AVX2)
  const __m256 less = _mm256_cmp_ps(key, best, _CMP_LT_OQ);
  best = _mm256_min_ps(key, best);
  index = (VecU)_mm256_blendv_epi8((__m256i)index, (__m256i)at, (__m256i)less);
#else
  const VecI less = key < best;
  best = key < best ? key : best;
  index = ((VecU)less & at) | (~(VecU)less & index);
#endif
}

/// Components of the subspace's centroids and half their squared norms.
KVMANAGER_INLINE void MakeTable(const NearestArguments& a) {
  for (int i = 0; i < a.entries; i += kLanes) {
    VecF norm{};
    for (int k = 0; k < a.width; ++k) {
      const uint8_t* codes = a.codes + size_t(k) * a.entries + i;
      const VecF y = SetF(a.step[k]) * (a.flip != 0 ? LoadU8(codes) - 128.0f : LoadS8(codes));
      StoreF(a.table + size_t(k) * a.entries + i, y);
      norm = norm + y * y;
    }
    StoreF(a.table + size_t(a.width) * a.entries + i, norm * 0.5f);
  }
}

/// kWidth: the width, or 0 where it is a.width.
template <int kWidth>
KVMANAGER_INLINE void Search(const NearestArguments& a) {
  const int width = kWidth > 0 ? kWidth : a.width, entries = a.entries, centroids = a.centroids;
  const float* norms = a.table + size_t(width) * entries;
  for (int t = 0; t < kTokens; t += kShared * kLanes) {
    VecF best[kShared];
    VecU index[kShared] = {};
    VecF x[kShared][kWidth > 0 ? kWidth : 1] = {};
    KVMANAGER_UNROLL
    for (int v = 0; v < kShared; ++v) {
      best[v] = SetF(__builtin_inff());
      KVMANAGER_UNROLL
      for (int k = 0; k < kWidth; ++k) x[v][k] = LoadF(a.x + k * kTokens + t + v * kLanes);
    }
    VecU at{};
    for (int i = 0; i < centroids; ++i) {
      VecF key[kShared];
      const VecF norm = SetF(norms[i]);
      KVMANAGER_UNROLL
      for (int v = 0; v < kShared; ++v) key[v] = norm;
      if constexpr (kWidth > 0) {
        KVMANAGER_UNROLL
        for (int k = 0; k < kWidth; ++k) {
          const VecF y = SetF(a.table[k * entries + i]);
          KVMANAGER_UNROLL
          for (int v = 0; v < kShared; ++v) key[v] = key[v] - x[v][k] * y;
        }
      } else {
        for (int k = 0; k < width; ++k) {
          const VecF y = SetF(a.table[size_t(k) * entries + i]);
          KVMANAGER_UNROLL
          for (int v = 0; v < kShared; ++v) key[v] = key[v] - LoadF(a.x + k * kTokens + t + v * kLanes) * y;
        }
      }
      KVMANAGER_UNROLL
      for (int v = 0; v < kShared; ++v) TakeLess(key[v], at, best[v], index[v]);
      at += 1;
    }
    KVMANAGER_UNROLL
    for (int v = 0; v < kShared; ++v) {
      *reinterpret_cast<Loose16*>(a.indices + t + v * kLanes) = __builtin_convertvector(index[v], Vec16);
    }
  }
}

void Nearest(const NearestArguments& a) {
  MakeTable(a);
  switch (a.width) {
    case 1:
      return Search<1>(a);
    case 2:
      return Search<2>(a);
    case 4:
      return Search<4>(a);
    default:
      return Search<0>(a);
  }
}

void Centre(const CentreArguments& a) {
  const uint16_t* raw = reinterpret_cast<const uint16_t*>(a.raw);
  for (int t = 0; t < kTokens; ++t, raw += a.channels) {
    for (int c = 0; c < a.channels; c += kLanes) {
      const VecF x = a.bfloat16 ? LoadBFloat16(raw + c) : LoadHalf(raw + c);
      StoreF(a.row + c, x - LoadF(a.mid + c));
    }
    for (int c = 0; c < a.channels; ++c) a.out[c * kTokens + t] = a.row[c];
  }
}

}  // namespace

#if defined(KVMANAGER_ISA_AVX512)
const EncodeKernels kEncodeAvx512 = {Nearest, Centre};
#elif defined(KVMANAGER_ISA_AVX2)
const EncodeKernels kEncodeAvx2 = {Nearest, Centre};
#else
const EncodeKernels kEncodePortable = {Nearest, Centre};
#endif

}  // namespace kvmanager::million
