// The kernels of raw attention, written once over simd_inl.h's vectors and compiled per instruction set.
//
// Per page, for tiles of up to four rows: scores of all tokens (each K vector is converted once for the tile), softmax
// of the page against the running maximum, then V with a block of channels in registers over all tokens.
//
// Invariants: 1. a row's additions happen in an order that depends on its own tokens alone, not on tile or neighbours;
// 2. no token at or beyond what a row of the tile sees is read.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/raw/raw_attention_kernel.h"

namespace kvmanager {
namespace {

constexpr int kPageTokens = 256;  // PageLayout::kPageTokensMax
constexpr int kTileRows = 4;

struct Tile {
  const float* q[kTileRows];
  float* acc[kTileRows];
  int seen[kTileRows];  // tokens of the page that the row sees, 0..page_tokens
  int tokens;           // the most of any row
  alignas(64) float p[kTileRows][kPageTokens + kLanes];
};

/// Issues prefetches of a page's K, its V, then the next page's, a few lines per step of the loops, so that the memory
/// is asked for the same number of lines all the time, kLeadLines (a page's, if those are fewer) before they are
/// needed.
struct Ahead {
  static constexpr int kLeadLines = 256;
  static constexpr int kRuns = 4;
  const uint8_t* run[kRuns];
  int lines[kRuns];
  const uint8_t* at;
  int left;  // lines of the current run
  int next;  // run; kRuns: nothing is left

  KVMANAGER_INLINE void Start(Ahead& a) {
    a.at = a.run[0];
    a.left = a.lines[0];
    a.next = 1;
  }
  KVMANAGER_INLINE void Issue(Ahead& a, int count) {
    if (__builtin_expect(a.left < count, 0)) {
      PrefetchLines(a.at, a.left);
      a.left = 0;
      if (a.next == kRuns || a.run[a.next] == nullptr) return;
      a.at = a.run[a.next];
      a.left = a.lines[a.next++];
      return;
    }
    PrefetchLines(a.at, count);
    a.at += size_t{64} * count;
    a.left -= count;
  }

  /// The first `count` lines were issued before.
  KVMANAGER_INLINE void Skip(Ahead& a, int count) {
    while (count > a.left) {
      count -= a.left;
      a.left = 0;
      if (a.next == kRuns || a.run[a.next] == nullptr) return;
      a.at = a.run[a.next];
      a.left = a.lines[a.next++];
    }
    a.at += size_t{64} * count;
    a.left -= count;
  }

  /// The next `count` lines, for the caller to prefetch `*step` bytes apart; `*step` is 0 when there are none.
  KVMANAGER_INLINE const uint8_t* Take(Ahead& a, int count, size_t* step) {
    if (__builtin_expect(a.left < count, 0)) Issue(a, count);
    if (__builtin_expect(a.left < count, 0)) {
      *step = 0;
      return reinterpret_cast<const uint8_t*>(&a);
    }
    const uint8_t* at = a.at;
    a.at += size_t{64} * count;
    a.left -= count;
    *step = 64;
    return at;
  }
};

/// Scores of kT tokens from t on, for kR rows; kT * (kR rounded up to a power of two) = kLanes, so that one transposed
/// reduction yields one vector of scores. Tokens beyond the last repeat it.
template <bool kBFloat16, int kR>
KVMANAGER_INLINE void Scores(const RawAttentionArguments& a, const uint16_t* k, Ahead& ahead, Tile& tile) {
  constexpr int kRows2 = kR == 3 ? 4 : kR;
  constexpr int kT = kLanes / kRows2;
  const int d = a.k_dim;
  // The block's share of prefetches, spread over its channels.
  constexpr int kStepLines = (kT * kLanes * 2 + 63) / 64;
  const int block_lines = d / kLanes * kStepLines;
  for (int t = 0; t < tile.tokens; t += kT) {
    const uint16_t* token[kT];
    KVMANAGER_UNROLL
    for (int i = 0; i < kT; ++i) token[i] = k + size_t(t + i < tile.tokens ? t + i : tile.tokens - 1) * d;
    size_t line_bytes;
    const uint8_t* line = Ahead::Take(ahead, block_lines, &line_bytes);
    VecF dot[kLanes] = {};
    for (int c = 0; c < d; c += kLanes) {
      KVMANAGER_UNROLL
      for (int i = 0; i < kStepLines; ++i, line += line_bytes) __builtin_prefetch(line, 0, 3);
      VecF q[kR];
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) q[r] = LoadF(tile.q[r] + c);
      KVMANAGER_UNROLL
      for (int i = 0; i < kT; ++i) {
        const VecF x = Load16<kBFloat16>(token[i] + c);
        KVMANAGER_UNROLL
        for (int r = 0; r < kR; ++r) dot[r * kT + i] += q[r] * x;
      }
    }
    alignas(64) float s[kLanes];
    StoreF(s, SumEach(dot) * a.scale);
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) __builtin_memcpy(&tile.p[r][t], s + r * kT, sizeof(float) * kT);
  }
}

/// Row r's running maximum after this page; its state is rescaled if that grew. Scores of tokens beyond those it sees
/// become -infinity.
KVMANAGER_INLINE void RaiseMaximum(const RawAttentionArguments& a, Tile& tile, int r, int row) {
  float* p = tile.p[r];
  const int seen = tile.seen[r];
  const VecF none = SetF(-__builtin_inff());
  VecF top = none;
  int t = 0;
  for (; t + kLanes <= seen; t += kLanes) top = MaxF(top, LoadF(p + t));
  if (t < tile.tokens) {
    const VecI lane = Iota();
    for (; t < tile.tokens; t += kLanes) {
      const VecF s = lane < seen - t ? LoadF(p + t) : none;
      StoreF(p + t, s);
      top = MaxF(top, s);
    }
  }
  const float page_max = ReduceMax(top);
  if (page_max > a.max[row]) {
    const float factor = ExpNegativeScalar(a.max[row] - page_max);
    a.max[row] = page_max;
    a.sum[row] *= factor;
    for (int c = 0; c < a.v_dim; c += kLanes) StoreF(tile.acc[r] + c, LoadF(tile.acc[r] + c) * factor);
  }
}

/// Turns row r's scores into exp(score - max).
KVMANAGER_INLINE void Softmax(const RawAttentionArguments& a, Tile& tile, int r, int row) {
  float* p = tile.p[r];
  const bool sees_any = tile.seen[r] > 0;  // else its maximum may still be -infinity
  const VecF max = SetF(sees_any ? a.max[row] : 0.0f);
  VecF sum{};
  for (int t = 0; t < tile.tokens; t += kLanes) {
    const VecF x = ExpNegative(LoadF(p + t) - max);
    StoreF(p + t, x);
    sum += x;
  }
  a.sum[row] += ReduceAdd(sum);
}

/// acc += p * V for kC vectors of channels from c on.
template <bool kBFloat16, int kR, int kC>
KVMANAGER_INLINE void Accumulate(const RawAttentionArguments& a, const uint16_t* v, Ahead& ahead, Tile& tile, int c) {
  const int d = a.v_dim;
  VecF acc[kR][kC];
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    KVMANAGER_UNROLL
    for (int i = 0; i < kC; ++i) acc[r][i] = LoadF(tile.acc[r] + c + i * kLanes);
  }
  const uint16_t* at = v + c;
  for (int t = 0; t < tile.tokens; ++t, at += d) {
    Ahead::Issue(ahead, (kC * kLanes * 2 + 63) / 64);
    VecF p[kR];
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) p[r] = SetF(tile.p[r][t]);
    KVMANAGER_UNROLL
    for (int i = 0; i < kC; ++i) {
      const VecF x = Load16<kBFloat16>(at + i * kLanes);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) acc[r][i] += p[r] * x;
    }
  }
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    KVMANAGER_UNROLL
    for (int i = 0; i < kC; ++i) StoreF(tile.acc[r] + c + i * kLanes, acc[r][i]);
  }
}

/// How many vectors of channels Accumulate takes next, `left` being left: as many accumulators as hide the latency of a
/// multiply-add and still fit the registers; few passes, since each broadcasts all weights again.
template <int kR>
KVMANAGER_INLINE int PassVectors(int left) {
  if constexpr (kLanes == 16) {
    constexpr int kRest[8] = {0, 1, 2, 3, 4, 5, 3, 4};
    return left < 8 ? kRest[left] : kR > 2 ? 4 : 8;
  }
  constexpr int kMost = kR > 2 ? 2 : 4;
  return left >= kMost ? kMost : left >= 2 ? 2 : 1;
}

/// One tile of rows over one page.
template <bool kBFloat16, int kR>
__attribute__((noinline)) void AttendTile(const RawAttentionArguments& a, int row, int first_token, const uint8_t* page,
                                          Ahead& ahead) {
  Tile tile;
  tile.tokens = 0;
  for (int r = 0; r < kR; ++r) {
    tile.q[r] = a.q + size_t(row + r) * a.row_floats;
    tile.acc[r] = a.acc + size_t(row + r) * a.row_floats;
    int seen = a.visible == nullptr ? a.page_tokens : a.visible[row + r] - first_token;
    seen = seen < 0 ? 0 : seen > a.page_tokens ? a.page_tokens : seen;
    tile.seen[r] = seen;
    if (seen > tile.tokens) tile.tokens = seen;
  }
  if (tile.tokens == 0) return;
  Scores<kBFloat16, kR>(a, reinterpret_cast<const uint16_t*>(page + a.k_offset), ahead, tile);
  for (int r = 0; r < kR; ++r) RaiseMaximum(a, tile, r, row + r);
  for (int r = 0; r < kR; ++r) Softmax(a, tile, r, row + r);
  const uint16_t* v = reinterpret_cast<const uint16_t*>(page + a.v_offset);
  for (int c = 0, left = a.v_dim / kLanes; left > 0;) {
    const int count = PassVectors<kR>(left);
    switch (count) {
      case 1:
        Accumulate<kBFloat16, kR, 1>(a, v, ahead, tile, c);
        break;
      case 2:
        Accumulate<kBFloat16, kR, 2>(a, v, ahead, tile, c);
        break;
      case 3:
        Accumulate<kBFloat16, kR, 3>(a, v, ahead, tile, c);
        break;
      case 4:
        Accumulate<kBFloat16, kR, 4>(a, v, ahead, tile, c);
        break;
      case 5:
        Accumulate<kBFloat16, kR, 5>(a, v, ahead, tile, c);
        break;
      default:
        Accumulate<kBFloat16, kR, 8>(a, v, ahead, tile, c);
        break;
    }
    c += count * kLanes;
    left -= count;
  }
}

template <bool kBFloat16>
void AttendPages(const RawAttentionArguments& a) {
  Ahead ahead;
  ahead.lines[0] = ahead.lines[2] = a.page_tokens * a.k_dim * 2 / 64;
  ahead.lines[1] = ahead.lines[3] = a.page_tokens * a.v_dim * 2 / 64;
  const int lead = a.lead_lines;
  for (size_t i = 0; i < a.page_count; ++i) {
    const uint8_t* page = a.pages[i];
    const int first_token = int(i) * a.page_tokens;
    // The first tile fetches for all: later ones find the page in the cache.
    ahead.run[0] = page + a.k_offset;
    ahead.run[1] = page + a.v_offset;
    if (i + 1 < a.page_count) {
      ahead.run[2] = a.pages[i + 1] + a.k_offset;
      ahead.run[3] = a.pages[i + 1] + a.v_offset;
    } else {
      ahead.run[2] = a.next_k;
      ahead.run[3] = a.next_v;
      ahead.lines[2] = a.page_tokens * a.next_k_dim * 2 / 64;
      ahead.lines[3] = a.page_tokens * a.next_v_dim * 2 / 64;
    }
    Ahead::Start(ahead);
    if (i == 0 && !a.announced) {
      const int of_k = lead < ahead.lines[0] ? lead : ahead.lines[0];
      Ahead::Issue(ahead, of_k);
      if (lead > of_k) {
        Ahead::Issue(ahead, 1);  // on to V
        Ahead::Issue(ahead, lead - of_k);
      }
    } else {
      Ahead::Skip(ahead, lead);
    }
    for (int row = 0; row < a.rows;) {
      switch (a.rows - row) {
        case 1:
          AttendTile<kBFloat16, 1>(a, row, first_token, page, ahead);
          break;
        case 2:
          AttendTile<kBFloat16, 2>(a, row, first_token, page, ahead);
          break;
        case 3:
          AttendTile<kBFloat16, 3>(a, row, first_token, page, ahead);
          break;
        default:
          AttendTile<kBFloat16, 4>(a, row, first_token, page, ahead);
          break;
      }
      row += kTileRows;
      ahead.left = 0;
      ahead.next = Ahead::kRuns;
    }
  }
}

void Attend(const RawAttentionArguments& a) {
  if (a.bfloat16) {
    AttendPages<true>(a);
  } else {
    AttendPages<false>(a);
  }
}

template <bool kBFloat16>
void ToFloat(const uint16_t* from, size_t count, float* to) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreF(to + i, Load16<kBFloat16>(from + i));
  if (i == count) return;
  uint16_t rest[kLanes] = {};
  float out[kLanes];
  __builtin_memcpy(rest, from + i, (count - i) * 2);
  StoreF(out, Load16<kBFloat16>(rest));
  __builtin_memcpy(to + i, out, (count - i) * 4);
}

KVMANAGER_INLINE void StoreHalf(uint16_t* to, VecF x) {
#if defined(KVMANAGER_ISA_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(KVMANAGER_ISA_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const VecU bits = (VecU)x, rest = bits & 0x7fffffff;
  // Below 2^-14 the float unit rounds to a multiple of 2^-24.
  const VecU small = (VecU)((VecF)rest + 0.5f) - 0x3f000000;
  const VecU normal = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  VecU h = rest < 0x38800000 ? small : normal;
  h = rest >= 0x477ff000 ? SetU(0x7c00) : h;
  h = rest > 0x7f800000 ? SetU(0x7e00) : h;
  *reinterpret_cast<Loose16*>(to) = __builtin_convertvector(h | (bits >> 16 & 0x8000), Vec16);
#endif
}

KVMANAGER_INLINE void StoreBFloat16(uint16_t* to, VecF x) {
  const VecU bits = (VecU)x;
  const VecU rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const VecU nan = (bits >> 16) | 0x40;
  *reinterpret_cast<Loose16*>(to) = __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded, Vec16);
}

template <bool kBFloat16>
void FromFloat(const float* from, size_t count, uint16_t* to) {
  auto store = [](uint16_t* at, VecF x) { kBFloat16 ? StoreBFloat16(at, x) : StoreHalf(at, x); };
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, LoadF(from + i));
  if (i == count) return;
  float rest[kLanes] = {};
  uint16_t out[kLanes];
  __builtin_memcpy(rest, from + i, (count - i) * 4);
  store(out, LoadF(rest));
  __builtin_memcpy(to + i, out, (count - i) * 2);
}

}  // namespace

#if defined(KVMANAGER_ISA_AVX512)
#define KVMANAGER_RAW_KERNELS kRawKernelsAvx512
#elif defined(KVMANAGER_ISA_AVX2)
#define KVMANAGER_RAW_KERNELS kRawKernelsAvx2
#else
#define KVMANAGER_RAW_KERNELS kRawKernelsPortable
#endif

const RawKernels KVMANAGER_RAW_KERNELS = {Attend, ToFloat<false>, ToFloat<true>, FromFloat<false>, FromFloat<true>};

}  // namespace kvmanager
