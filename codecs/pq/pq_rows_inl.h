// Attention over tokens given by address, for tiles of up to four rows: as raw pages are attended to, but each token's
// K and V lie anywhere.
//
// Invariant: a row's additions happen in an order that depends on the tokens alone, not on tile or neighbours.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/pq/pq_kernels.h"

namespace kvmanager::pq {
namespace {

constexpr int kBlockTokens = 16;  // few: fetching and computing take turns often
constexpr size_t kAhead = 24;     // tokens from what is read to what is fetched
constexpr int kTileRows = 4;

/// A row of K or V, all of its lines.
KVMANAGER_INLINE void PrefetchRow(const uint8_t* p, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(p + 64 * i, 0, 3);
}

KVMANAGER_INLINE const uint16_t* RowAt(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

/// Scores of `tokens` tokens for kR rows into p [kR][stride]; kT * (kR rounded up to a power of two) = kLanes, so that
/// one transposed reduction yields one vector of scores. ahead: what to prefetch, token by token, `fetched` of them.
template <bool kBFloat16, int kR>
KVMANAGER_INLINE void RowScores(const RowArguments& a, int row, const uint8_t* const* k, int tokens,
                                const uint8_t* const* ahead, int fetched, float* p, size_t stride) {
  constexpr int kRows2 = kR == 3 ? 4 : kR;
  constexpr int kT = kLanes / kRows2;
  const int d = a.head_dim, lines = (d * 2 + 63) / 64;
  const float* q = a.q + size_t(row) * d;
  for (int t = 0; t < tokens; t += kT) {
    const uint16_t* token[kT];
    KVMANAGER_UNROLL
    for (int i = 0; i < kT; ++i) token[i] = RowAt(k[t + i < tokens ? t + i : tokens - 1]);
    for (int i = t; i < t + kT && i < fetched; ++i) PrefetchRow(ahead[i], lines);
    VecF dot[kLanes] = {};
    for (int c = 0; c < d; c += kLanes) {
      VecF x[kR];
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) x[r] = LoadF(q + size_t(r) * d + c);
      KVMANAGER_UNROLL
      for (int i = 0; i < kT; ++i) {
        const VecF y = Load16<kBFloat16>(token[i] + c);
        KVMANAGER_UNROLL
        for (int r = 0; r < kR; ++r) dot[r * kT + i] = MulAdd(x[r], y, dot[r * kT + i]);
      }
    }
    alignas(64) float s[kLanes];
    StoreF(s, SumEach(dot) * a.scale);
    if (__builtin_expect(tokens - t >= kT, 1)) {
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) __builtin_memcpy(&p[r * stride + t], s + r * kT, sizeof(float) * kT);
    } else {
      for (int r = 0; r < kR; ++r) {
        for (int i = 0; i < tokens - t; ++i) p[r * stride + t + i] = s[r * kT + i];
      }
    }
  }
}

/// acc [kR][head_dim] += p * V for kC vectors of channels from c on.
template <bool kBFloat16, int kR, int kC>
KVMANAGER_INLINE void RowAccumulate(const RowArguments& a, int row, const uint8_t* const* v, int tokens,
                                    const uint8_t* const* ahead, int fetched, const float* p, size_t stride, int c) {
  const int d = a.head_dim, lines = (d * 2 + 63) / 64;
  float* out = a.acc + size_t(row) * d + c;
  VecF acc[kR][kC];
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    KVMANAGER_UNROLL
    for (int i = 0; i < kC; ++i) acc[r][i] = LoadF(out + size_t(r) * d + i * kLanes);
  }
  for (int t = 0; t < tokens; ++t) {
    if (t < fetched) PrefetchRow(ahead[t], lines);
    const uint16_t* at = RowAt(v[t]) + c;
    VecF weight[kR];
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) weight[r] = SetF(p[r * stride + t]);
    KVMANAGER_UNROLL
    for (int i = 0; i < kC; ++i) {
      const VecF x = Load16<kBFloat16>(at + i * kLanes);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) acc[r][i] = MulAdd(weight[r], x, acc[r][i]);
    }
  }
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    KVMANAGER_UNROLL
    for (int i = 0; i < kC; ++i) StoreF(out + size_t(r) * d + i * kLanes, acc[r][i]);
  }
}

/// Row's scores become exp(score - max), max being the running one; its state is rescaled if that grew.
KVMANAGER_INLINE void RowSoftmax(const RowArguments& a, int row, int tokens, float* p) {
  const int padded = (tokens + kLanes - 1) / kLanes * kLanes;
  for (int t = tokens; t < padded; ++t) p[t] = -__builtin_inff();
  VecF top = SetF(-__builtin_inff());
  for (int t = 0; t < padded; t += kLanes) top = MaxF(top, LoadF(p + t));
  const float block_max = ReduceMax(top);
  if (block_max > a.max[row]) {
    const float factor = ExpNegativeScalar(a.max[row] - block_max);
    a.max[row] = block_max;
    a.sum[row] *= factor;
    float* acc = a.acc + size_t(row) * a.head_dim;
    for (int c = 0; c < a.head_dim; c += kLanes) StoreF(acc + c, LoadF(acc + c) * factor);
  }
  VecF sum{};
  for (int t = 0; t < padded; t += kLanes) {
    const VecF x = ExpNegative(LoadF(p + t) - a.max[row]);
    StoreF(p + t, x);
    sum += x;
  }
  a.sum[row] += ReduceAdd(sum);
}

template <bool kBFloat16, int kR>
__attribute__((noinline)) void AttendTile(const RowArguments& a, int row, size_t begin, int tokens, bool fetch) {
  constexpr size_t kStride = kBlockTokens + kLanes;
  alignas(64) float p[kR * kStride];
  const uint8_t *const *k = a.k + begin, *const *v = a.v + begin;
  const size_t rest = a.tokens - begin;
  int fetched = fetch && rest > kAhead ? int(rest - kAhead < size_t(tokens) ? rest - kAhead : size_t(tokens)) : 0;
  RowScores<kBFloat16, kR>(a, row, k, tokens, k + kAhead, fetched, p, kStride);
  for (int r = 0; r < kR; ++r) RowSoftmax(a, row + r, tokens, p + r * kStride);
  constexpr int kC = kLanes == 16 ? (kR > 2 ? 4 : 8) : (kR > 2 ? 2 : 4);
  int c = 0;
  for (; c + kC * kLanes <= a.head_dim; c += kC * kLanes, fetched = 0) {
    RowAccumulate<kBFloat16, kR, kC>(a, row, v, tokens, v + kAhead, fetched, p, kStride, c);
  }
  for (; c < a.head_dim; c += kLanes, fetched = 0) {
    RowAccumulate<kBFloat16, kR, 1>(a, row, v, tokens, v + kAhead, fetched, p, kStride, c);
  }
}

template <bool kBFloat16>
void AttendRowsOf(const RowArguments& a) {
  const int lines = (a.head_dim * 2 + 63) / 64;
  for (size_t t = 0; t < a.tokens && t < kAhead; ++t) {
    PrefetchRow(a.k[t], lines);
    PrefetchRow(a.v[t], lines);
  }
  for (size_t begin = 0; begin < a.tokens; begin += kBlockTokens) {
    const int tokens = int(a.tokens - begin < size_t(kBlockTokens) ? a.tokens - begin : size_t(kBlockTokens));
    for (int row = 0; row < a.rows; row += kTileRows) {
      // The first tile fetches for all: later ones find the tokens in the cache.
      switch (a.rows - row) {
        case 1:
          AttendTile<kBFloat16, 1>(a, row, begin, tokens, row == 0);
          break;
        case 2:
          AttendTile<kBFloat16, 2>(a, row, begin, tokens, row == 0);
          break;
        case 3:
          AttendTile<kBFloat16, 3>(a, row, begin, tokens, row == 0);
          break;
        default:
          AttendTile<kBFloat16, 4>(a, row, begin, tokens, row == 0);
          break;
      }
    }
  }
}

void AttendRows(const RowArguments& a) {
  if (a.bfloat16) {
    AttendRowsOf<true>(a);
  } else {
    AttendRowsOf<false>(a);
  }
}

template <bool kBFloat16>
void ScoreRowsOf(const RowArguments& a, float* scores, size_t stride) {
  for (size_t begin = 0; begin < a.tokens; begin += kBlockTokens) {
    const int tokens = int(a.tokens - begin < size_t(kBlockTokens) ? a.tokens - begin : size_t(kBlockTokens));
    for (int row = 0; row < a.rows; ++row) {
      RowScores<kBFloat16, 1>(a, row, a.k + begin, tokens, nullptr, 0, scores + row * stride + begin, 0);
    }
  }
}

void ScoreRows(const RowArguments& a, float* scores, size_t stride) {
  if (a.bfloat16) {
    ScoreRowsOf<true>(a, scores, stride);
  } else {
    ScoreRowsOf<false>(a, scores, stride);
  }
}

}  // namespace
}  // namespace kvmanager::pq
