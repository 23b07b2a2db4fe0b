// The kernels of attention on HACK pages, written once over simd_inl.h's vectors and compiled per instruction set.
//
// Per page: each partition's metadata to fp32, q folded and quantised, dots with K's codes in 32-bit lanes (words of
// four channels, a lane per token), softmax, P quantised per partition of V, dots with V's codes (words of four tokens,
// a lane per channel). Codes are unpacked in registers only.
//
// Invariants: 1. integer sums are exact (no saturating instruction meets operands that could saturate); 2. a row's fp32
// additions happen in an order that does not depend on the rows beside it; 3. the accumulator is rescaled only when the
// row's maximum grows.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/hack/hack_attention_kernel.h"
#include "codecs/hack/hack_attention_unpack_inl.h"

namespace kvmanager::hack {
namespace {

/// Sizes that the compiler knows, or 0. The usual shape is compiled for itself: its loops unroll and values stay in
/// registers between passes.
template <int kDimIn, int kTokensIn>
struct Shape {
  static constexpr int kDim = kDimIn;        // head_dim
  static constexpr int kTokens = kTokensIn;  // of a page, which is one partition on both sides
};
using AnyShape = Shape<0, 0>;
using UsualShape = Shape<128, 64>;

constexpr float kNegligible = 0x1p-100f;  // as in ReferenceAttend
constexpr int kStrip = 64;
// Segments of V that share the broadcast probabilities, for one row: enough chains to hide the product's latency.
constexpr int kSharedSegmentsMax = kLanes == 16 ? 8 : 2;
constexpr int kSegment = 16;
// Rows that share an unpacked code: tiles * rows accumulators must fit the registers.
constexpr int kTileRows = kLanes == 16 ? 4 : 2;

/// Prefetches a few lines of the record that this head reads next.
KVMANAGER_INLINE void PrefetchStep(const HackArguments& a, int lines) {
  HackAhead& ahead = *a.ahead;
  const int n = ahead.left < lines ? ahead.left : lines;
  PrefetchLines(ahead.at, n);
  ahead.at += 64 * n;
  ahead.left -= n;
}

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

/// run(Count<n>, first row) for all rows, four at a time.
template <typename Run>
KVMANAGER_INLINE void ForRows(int rows, Run run) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) run(Count<4>(), row);
  if (rows - row == 3) run(Count<3>(), row);
  if (rows - row == 2) run(Count<2>(), row);
  if (rows - row == 1) run(Count<1>(), row);
}

KVMANAGER_INLINE float HalfAt(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
#if defined(KVMANAGER_ISA_AVX512) || defined(KVMANAGER_ISA_AVX2)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
  uint16_t half[kLanes] = {bits};
  return LoadHalf(half)[0];
#endif
}

/// Partition p's steps and minima as the page holds them: in units of the tops, which are 1 for fp16.
struct Metadata {
  const uint8_t* steps;
  const uint8_t* minima;
  float top_step, top_minimum;
  bool eight;
};

/// top: which pair of tops the partition uses.
KVMANAGER_INLINE Metadata MetadataOf(const HackArguments& a, const uint8_t* record, const HackSide& side, int p,
                                     int top) {
  const size_t at = size_t(p) * side.meta_entries * (a.meta8 ? 1 : 2);
  const uint8_t* tops = record + side.tops + 4 * top;
  Metadata m = {record + side.steps + at, record + side.minima + at, 1, 1, a.meta8};
  if (a.meta8) m.top_step = HalfAt(tops) * (1 / 255.0f), m.top_minimum = HalfAt(tops + 2) * (1 / 127.0f);
  return m;
}

KVMANAGER_INLINE VecF StepAt(const Metadata& m, int c) {
  return m.eight ? LoadU8(m.steps + c) : LoadHalf(reinterpret_cast<const uint16_t*>(m.steps) + c);
}

KVMANAGER_INLINE VecF MinimumAt(const Metadata& m, int c) {
  return m.eight ? LoadS8(m.minima + c) : LoadHalf(reinterpret_cast<const uint16_t*>(m.minima) + c);
}

/// Entries first .. end - 1 as fp32.
KVMANAGER_INLINE void LoadMetadata(const Metadata& m, int first, int end, float* steps, float* minima) {
  const VecF top_step = SetF(m.top_step), top_minimum = SetF(m.top_minimum);
  for (int e = first; e < end; e += kLanes) {
    StoreF(steps + e, StepAt(m, e) * top_step);
    StoreF(minima + e, MinimumAt(m, e) * top_minimum);
  }
}

// ---- scores -------------------------------------------------------------------------------------------------------

/// q of kR rows folded with the partition's steps and quantised; the constant of the score. Channels of no bits have
/// the constant alone.
template <typename S, int kR>
KVMANAGER_INLINE void FoldQueries(const HackArguments& a, const HackSide& side, const Metadata& m, int p, int row) {
  const HackScratch s = a.scratch;  // a copy: stores through floats may not change it
  const int d = S::kDim > 0 ? S::kDim : a.head_dim;
  const float* q = a.q + size_t(row) * d;
  int8_t* q8 = s.q8 + size_t(row) * d;
  VecF largest[4] = {}, constant[4] = {};
  for (int i = 0; i < side.run_count; ++i) {
    const int end = (side.runs[i].first + side.runs[i].count) * kSegment;
    for (int c = side.runs[i].first * kSegment; c < end; c += kLanes) {
      const VecF step = StepAt(m, c), minimum = MinimumAt(m, c);
      StoreF(s.steps + c, step);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        const VecF x = LoadF(q + size_t(r) * d + c);
        largest[r] = MaxF(largest[r], AbsF(x * step));
        constant[r] = MulAdd(x, minimum, constant[r]);
      }
    }
  }
  for (int i = 0; i < side.empty_count; ++i) {
    const int first = side.empty[i] * kSegment;
    KVMANAGER_UNROLL
    for (int c = first; c < first + kSegment; c += kLanes) {
      const VecF minimum = MinimumAt(m, c);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) constant[r] = MulAdd(LoadF(q + size_t(r) * d + c), minimum, constant[r]);
    }
  }
  const Vec4 amax = ReduceMaxRows(largest);
  const Vec4 inverse = amax > kNegligible ? 127.0f / amax : Vec4{};
  StoreRows<kR>(s.q_step + p * a.rows + row, amax * (1 / 127.0f) * (a.scale * m.top_step));
  for (int i = 0; i < side.run_count; ++i) {
    const int end = (side.runs[i].first + side.runs[i].count) * kSegment;
    for (int c = side.runs[i].first * kSegment; c < end; c += kLanes) {
      const VecF step = LoadF(s.steps + c);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        const size_t at = size_t(r) * d + c;
        StoreBytes(q8 + at, RoundToInt(LoadF(q + at) * step * SetF(inverse[r])));
      }
    }
  }
  StoreRows<kR>(s.q_min + p * a.rows + row, ReduceAddRows(constant) * (a.scale * m.top_minimum));
}

/// q quantised per partition of channels, once for all pages.
void QuantizeQueries(const HackArguments& a, const HackSide& side) {
  const HackScratch& s = a.scratch;
  const int n = side.partition;
  for (int p = 0; p < side.partitions; ++p) {
    for (int r = 0; r < a.rows; ++r) {
      const float* q = a.q + size_t(r) * a.head_dim + p * n;
      int8_t* q8 = s.q8 + size_t(r) * a.head_dim + p * n;
      VecF largest{}, low = LoadF(q), high = LoadF(q);
      for (int c = 0; c < n; c += kLanes) {
        const VecF x = LoadF(q + c);
        largest = MaxF(largest, AbsF(x));
        low = MinF(low, x);
        high = MaxF(high, x);
      }
      const float zero = a.asymmetric ? ReduceMin(low) : 0.0f;
      const float range = a.asymmetric ? ReduceMax(high) - zero : ReduceMax(largest);
      const float levels = a.asymmetric ? 255.0f : 127.0f;
      const float inverse = range > kNegligible ? levels / range : 0.0f;
      const float offset = a.asymmetric ? 128.0f : 0.0f;  // q8 is signed
      VecI total{};
      for (int c = 0; c < n; c += kLanes) {
        const VecI x = RoundToInt((LoadF(q + c) - zero) * inverse);
        total += x;
        StoreBytes(q8 + c, x - int32_t(offset));
      }
      // Sum of q k = step (q_step dot + zero sum k') + minimum (q_step sum q' + n zero), with dot = dot8 + offset sum
      // k'.
      const float q_step = range / levels;
      const size_t at = size_t(p) * a.rows + r;
      s.q_step[at] = q_step * a.scale;
      s.q_min[at] = (q_step * ReduceAdd(ToF(total)) + n * zero) * a.scale;
      s.q_sums[at] = (q_step * offset + zero) * a.scale;
    }
  }
}

/// scores of tiles kTile0 .. kTile0 + kTiles - 1 of a strip, for kR rows from `row` on: what the segments of `run` add.
template <int kBits, int kR, int kTile0, int kTiles, bool kAlongChannels>
void DotK(const HackArguments& a, const HackSide& side, const HackRun& run, const uint8_t* codes, int token, int p,
          int row, bool first) {
  const int d = a.head_dim, page_tokens = a.page_tokens;
  const int8_t* q8 = a.scratch.q8 + size_t(row) * d;
  const float* steps = a.scratch.steps;
  float* scores = a.scratch.scores + size_t(row) * page_tokens;
  float q_step[kR], q_min[kR];
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    q_step[r] = a.scratch.q_step[p * a.rows + row + r];
    q_min[r] = a.scratch.q_min[p * a.rows + row + r];
  }
  for (int w = 0; w < kSegment; w += kLanes) {
    VecI acc[kTiles][kR] = {};
    for (int s = run.first; s < run.first + run.count; ++s) {
      PrefetchStep(a, a.ahead->k_step_lines);
      const uint8_t* at = codes + side.segment_offset[s] + 4 * w;
      KVMANAGER_UNROLL
      for (int j = 0; j < 4; ++j) {
        VecU q[kR];
        KVMANAGER_UNROLL
        for (int r = 0; r < kR; ++r) {
          uint32_t word;
          __builtin_memcpy(&word, q8 + size_t(r) * d + s * kSegment + 4 * j, 4);
          q[r] = SetU(word);
        }
        KVMANAGER_UNROLL
        for (int i = 0; i < kTiles; ++i) {
          const VecU code = UnpackScaled<kBits>(at, j, kTile0 + i);
          KVMANAGER_UNROLL
          for (int r = 0; r < kR; ++r) acc[i][r] = DotCodes<kBits>(acc[i][r], code, q[r]);
        }
      }
    }
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      float* score = scores + size_t(r) * page_tokens;
      KVMANAGER_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        const int t = token + kSegment * (kTile0 + i) + w;
        const VecF dot = ToF(acc[i][r]) * (q_step[r] * TileUnit<kBits>(kTile0 + i));
        if constexpr (kAlongChannels) {
          StoreF(score + t, LoadF(score + t) + dot * LoadF(steps + t));
        } else {
          StoreF(score + t, dot + (first ? SetF(q_min[r]) : LoadF(score + t)));
        }
      }
    }
  }
}

template <int kBits, int kTile0, int kTiles, bool kAlongChannels>
KVMANAGER_INLINE void DotKRows(const HackArguments& a, const HackSide& side, const HackRun& run, const uint8_t* codes,
                               int token, int p, int row, bool first) {
  const int rows = a.rows - row;
  if constexpr (kTileRows == 4) {
    if (rows >= 4) return DotK<kBits, 4, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
    if (rows == 3) return DotK<kBits, 3, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
  }
  if (rows >= 2) return DotK<kBits, 2, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
  DotK<kBits, 1, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
}

template <int kTile0, int kTiles, bool kAlongChannels>
KVMANAGER_INLINE void DotKRun(const HackArguments& a, const HackSide& side, const HackRun& run, const uint8_t* codes,
                              int token, int p, int row, bool first) {
  switch (run.bits) {
    case 1:
      return DotKRows<1, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
    case 2:
      return DotKRows<2, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
    case 3:
      return DotKRows<3, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
    case 4:
      return DotKRows<4, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
    default:
      return DotKRows<8, kTile0, kTiles, kAlongChannels>(a, side, run, codes, token, p, row, first);
  }
}

/// acc [4 tiles][kR] += the dots of segments of one width.
template <int kBits, int kR>
KVMANAGER_INLINE void AddSegments(const HackArguments& a, const HackSide& side, const uint8_t* codes, int w, int row,
                                  VecI (&acc)[4][kR]) {
  const int8_t* q8 = a.scratch.q8 + size_t(row) * a.head_dim;
  const int d = a.head_dim;
  for (int n = 0; n < side.width_count[kBits]; ++n) {
    const int s = side.of_width[kBits][n];
    PrefetchStep(a, a.ahead->k_step_lines);
    const uint8_t* at = codes + side.segment_offset[s] + 4 * w;
    KVMANAGER_UNROLL
    for (int j = 0; j < 4; ++j) {
      VecU q[kR];
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        uint32_t word;
        __builtin_memcpy(&word, q8 + size_t(r) * d + s * kSegment + 4 * j, 4);
        q[r] = SetU(word);
      }
      KVMANAGER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const VecU code = UnpackScaled<kBits>(at, j, i);
        KVMANAGER_UNROLL
        for (int r = 0; r < kR; ++r) acc[i][r] = DotCodes<kBits>(acc[i][r], code, q[r]);
      }
    }
  }
}

/// DotK of all widths at once, for a strip inside one partition along tokens: codes that stay in place are scaled by
/// 1, 1, 16, 16 (widths 3 and 4), 1, 2, 16, 32 (width 1) or 1, 4, 16, 64 (width 2) in tiles 0..3, so that one shift of
/// the odd tiles leads from each to the next, and the sums are converted and added to the scores once. Sums stay below
/// 2^31: 256 channels * 128 * 15 * 64.
template <int kR>
void DotKMixed(const HackArguments& a, const HackSide& side, const uint8_t* codes, int token, int p, int row) {
  float* scores = a.scratch.scores + size_t(row) * a.page_tokens;
  for (int w = 0; w < kSegment; w += kLanes) {
    VecI acc[4][kR] = {};
    auto shift_odd_tiles = [&] {
      if constexpr (kInPlace) {
        KVMANAGER_UNROLL
        for (int r = 0; r < kR; ++r) acc[1][r] <<= 1, acc[3][r] <<= 1;
      }
    };
    AddSegments<4, kR>(a, side, codes, w, row, acc);
    AddSegments<3, kR>(a, side, codes, w, row, acc);
    shift_odd_tiles();
    AddSegments<1, kR>(a, side, codes, w, row, acc);
    shift_odd_tiles();
    AddSegments<2, kR>(a, side, codes, w, row, acc);
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const float q_step = a.scratch.q_step[p * a.rows + row + r], q_min = a.scratch.q_min[p * a.rows + row + r];
      KVMANAGER_UNROLL
      for (int i = 0; i < 4; ++i) {
        StoreF(scores + size_t(r) * a.page_tokens + token + kSegment * i + w,
               ToF(acc[i][r]) * (q_step * TileUnit<2>(i)) + q_min);
      }
    }
  }
}

KVMANAGER_INLINE void DotKMixedRows(const HackArguments& a, const HackSide& side, const uint8_t* codes, int token,
                                    int p, int row) {
  const int rows = a.rows - row;
  if constexpr (kTileRows == 4) {
    if (rows >= 4) return DotKMixed<4>(a, side, codes, token, p, row);
    if (rows == 3) return DotKMixed<3>(a, side, codes, token, p, row);
  }
  if (rows >= 2) return DotKMixed<2>(a, side, codes, token, p, row);
  DotKMixed<1>(a, side, codes, token, p, row);
}

/// K partitioned along tokens: all scores of a page.
template <typename S>
KVMANAGER_INLINE void ScoresAlongTokens(const HackArguments& a, const uint8_t* record) {
  const HackSide& side = a.head->k;
  const uint8_t* codes = record + side.codes;
  for (int p = 0; p < side.partitions; ++p) {
    const Metadata metadata = MetadataOf(a, record, side, p, p);
    ForRows(a.rows, [&](auto count, int row) { FoldQueries<S, count.value>(a, side, metadata, p, row); });
    const int begin = p * side.partition, end = begin + side.partition;
    if (side.run_count == 0) {  // every channel is its minimum alone
      for (int r = 0; r < a.rows; ++r) {
        for (int t = begin; t < end; ++t)
          a.scratch.scores[size_t(r) * a.page_tokens + t] = a.scratch.q_min[p * a.rows + r];
      }
    }
    for (int token = begin / kStrip * kStrip; token < end; token += kStrip) {
      const uint8_t* strip = codes + size_t(token / kStrip) * side.strip_bytes;
      for (int row = 0; row < a.rows; row += kTileRows) {
        if (side.mixes && side.partition >= kStrip) {
          DotKMixedRows(a, side, strip, token, p, row);
          continue;
        }
        for (int i = 0; i < side.run_count; ++i) {
          const HackRun& run = side.runs[i];
          if (side.partition >= kStrip) {
            DotKRun<0, 4, false>(a, side, run, strip, token, p, row, i == 0);
          } else if (begin % kStrip == 0) {
            DotKRun<0, 2, false>(a, side, run, strip, token, p, row, i == 0);
          } else {
            DotKRun<2, 2, false>(a, side, run, strip, token, p, row, i == 0);
          }
        }
      }
    }
  }
}

/// K partitioned along channels: all scores of a page.
void ScoresAlongChannels(const HackArguments& a, const uint8_t* record) {
  const HackSide& side = a.head->k;
  const HackScratch& s = a.scratch;
  for (int p = 0; p < side.partitions; ++p) {
    LoadMetadata(MetadataOf(a, record, side, p, 0), 0, side.meta_entries, a.scratch.steps, a.scratch.minima);
    if (a.asymmetric) {
      const uint16_t* sums = reinterpret_cast<const uint16_t*>(record + side.sums) + size_t(p) * a.page_tokens;
      for (int t = 0; t < a.page_tokens; ++t) s.sums[t] = sums[t];
    }
    for (int r = 0; r < a.rows; ++r) {
      const size_t at = size_t(p) * a.rows + r;
      float* scores = s.scores + size_t(r) * a.page_tokens;
      for (int t = 0; t < a.page_tokens; t += kLanes) {
        VecF x = p == 0 ? VecF{} : LoadF(scores + t);
        x += LoadF(s.minima + t) * s.q_min[at];
        if (a.asymmetric) x += LoadF(s.steps + t) * LoadF(s.sums + t) * s.q_sums[at];
        StoreF(scores + t, x);
      }
    }
    for (int token = 0; token < a.page_tokens; token += kStrip) {
      const uint8_t* strip = record + side.codes + size_t(token / kStrip) * side.strip_bytes;
      for (int row = 0; row < a.rows; row += kTileRows) {
        for (int i = 0; i < side.run_count; ++i) {
          if (side.runs[i].partition == p) DotKRun<0, 4, true>(a, side, side.runs[i], strip, token, p, row, false);
        }
      }
    }
  }
}

// ---- softmax ------------------------------------------------------------------------------------------------------

/// The running maxima of kR rows after this page, the largest score of each partition of V on the way (in p_step), and
/// the state rescaled where a maximum grew.
template <typename S, int kR>
KVMANAGER_INLINE void RaiseMaximum(const HackArguments& a, int row) {
  const int tokens = S::kTokens > 0 ? S::kTokens : a.page_tokens;
  const int partition = S::kTokens > 0 ? S::kTokens : a.head->v.partition;
  const float* p = a.scratch.scores + size_t(row) * tokens;
  Vec4 page_max = Vec4{} - __builtin_inff();
  for (int begin = 0, part = 0; begin < tokens; begin += partition, ++part) {
    VecF top[4] = {};
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const float* score = p + size_t(r) * tokens + begin;
      top[r] = LoadF(score);
      KVMANAGER_UNROLL
      for (int t = kLanes; t < partition; t += kLanes) top[r] = MaxF(top[r], LoadF(score + t));
    }
    const Vec4 part_max = ReduceMaxRows(top);
    StoreRows<kR>(a.scratch.p_step + size_t(part) * a.rows + row, part_max);
    page_max = part_max > page_max ? part_max : page_max;
  }
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    if (__builtin_expect(page_max[r] > a.max[row + r], 0)) {
      const float factor = ExpNegativeScalar(a.max[row + r] - page_max[r]);
      const int d = a.head_dim;
      a.max[row + r] = page_max[r];
      a.sum[row + r] *= factor;
      float* acc = a.acc + size_t(row + r) * d;
      for (int c = 0; c < d; c += kLanes) StoreF(acc + c, LoadF(acc + c) * factor);
    }
  }
}

/// Probabilities of kR rows, quantised per partition of V.
template <typename S, int kR>
KVMANAGER_INLINE void Softmax(const HackArguments& a, int row) {
  const HackScratch s = a.scratch;
  const int rows = a.rows;
  const int tokens = S::kTokens > 0 ? S::kTokens : a.page_tokens;
  const int partition = S::kTokens > 0 ? S::kTokens : a.head->v.partition;
  const Vec4 max = LoadRows<kR>(a.max + row);
  Vec4 sum = LoadRows<kR>(a.sum + row);
  for (int begin = 0, part = 0; begin < tokens; begin += partition, ++part) {
    const size_t at = size_t(part) * rows + row;
    // Relative to the partition's own maximum, so that the largest probability is 1 and p8 waits for nothing else.
    const Vec4 top = LoadRows<kR>(s.p_step + at);
    const Vec4 weight = NarrowRows(ExpNegative(WidenRows(top - max)));
    StoreRows<kR>(s.p_step + at, weight * (1 / 255.0f));
    VecF totals[4] = {}, part_sum[4] = {};
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const float* score = s.scores + size_t(row + r) * tokens + begin;
      uint8_t* p8 = s.p8 + size_t(row + r) * tokens + begin;
      const VecF row_top = SetF(top[r]);
      VecI total{};
      auto probabilities = [&](int t) {
        const VecF x = ExpNegative(LoadF(score + t) - row_top);
        const VecI x8 = RoundToInt(x * 255.0f);
        part_sum[r] += x;
        total += x8;
        return x8;
      };
      if constexpr (S::kTokens > 0) {
        KVMANAGER_UNROLL
        for (int t = 0; t < partition; t += 4 * kLanes) {
          const VecI x0 = probabilities(t), x1 = probabilities(t + kLanes), x2 = probabilities(t + 2 * kLanes),
                     x3 = probabilities(t + 3 * kLanes);
          StoreBytes4<false>(p8 + t, x0, x1, x2, x3);
        }
      } else {
        for (int t = 0; t < partition; t += kLanes) StoreBytes(p8 + t, probabilities(t));
      }
      totals[r] = ToF(total);
    }
    StoreRows<kR>(s.p_sum + at, ReduceAddRows(totals));
    sum += weight * ReduceAddRows(part_sum);
  }
  StoreRows<kR>(a.sum + row, sum);
}

// ---- output -------------------------------------------------------------------------------------------------------

/// acc += P * V over one partition, for kS segments from `segment` on and kR rows from `row` on. Tiles kTile0 .. kTile0
/// + kTiles - 1 of each of the partition's strips.
template <int kBits, int kR, int kS, int kTile0, int kTiles>
void DotV(const HackArguments& a, const HackSide& side, const uint8_t* codes, int token, int strips, int p, int segment,
          int row) {
  const int page_tokens = a.page_tokens;
  const float* steps = a.scratch.v_steps + segment * kSegment;
  const float* minima = a.scratch.v_minima + segment * kSegment;
  const uint8_t* p8 = a.scratch.p8 + size_t(row) * page_tokens + token;
  const uint32_t strip_bytes = side.strip_bytes;
  const uint8_t* planes[kS];
  float p_step[kR], p_sum[kR];
  float* acc[kR];
  KVMANAGER_UNROLL
  for (int s = 0; s < kS; ++s) planes[s] = codes + side.segment_offset[segment + s];
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    p_step[r] = a.scratch.p_step[p * a.rows + row + r];
    p_sum[r] = a.scratch.p_sum[p * a.rows + row + r];
    acc[r] = a.acc + size_t(row + r) * a.head_dim + segment * kSegment;
  }
  for (int w = 0; w < kSegment; w += kLanes) {
    VecI dot[kS][kR] = {};
    for (int strip = 0; strip < strips; ++strip) {
      const size_t at = size_t(strip) * strip_bytes + 4 * w;
      KVMANAGER_UNROLL
      for (int j = 0; j < 4; ++j) {
        PrefetchStep(a, a.ahead->v_step_lines);
        KVMANAGER_UNROLL
        for (int i = kTile0; i < kTile0 + kTiles; ++i) {
          VecU p4[kR];
          KVMANAGER_UNROLL
          for (int r = 0; r < kR; ++r) {
            uint32_t word;
            __builtin_memcpy(&word, p8 + size_t(r) * page_tokens + strip * kStrip + kSegment * i + 4 * j, 4);
            p4[r] = SetU(word);
          }
          KVMANAGER_UNROLL
          for (int s = 0; s < kS; ++s) {
            const VecU code = Unpack<kBits>(planes[s] + at, j, i);
            KVMANAGER_UNROLL
            for (int r = 0; r < kR; ++r) dot[s][r] = DotCodes<kBits>(dot[s][r], p4[r], code);
          }
        }
      }
    }
    KVMANAGER_UNROLL
    for (int s = 0; s < kS; ++s) {
      const int c = s * kSegment + w;
      const VecF step = LoadF(steps + c), minimum = LoadF(minima + c);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        VecF x = ToF(dot[s][r]);
        if constexpr (kBits == 8) x += 128.0f * p_sum[r];  // the page stores code - 128
        StoreF(acc[r] + c, LoadF(acc[r] + c) + MulAdd(step, x, minimum * p_sum[r]) * p_step[r]);
      }
    }
  }
}

template <int kBits, int kR, int kTile0, int kTiles>
KVMANAGER_INLINE void DotVSegments(const HackArguments& a, const HackSide& side, const HackRun& run,
                                   const uint8_t* codes, int token, int strips, int p, int row) {
  constexpr int kS = kLanes == 16 && kR > 1 ? 4 : kSharedSegmentsMax;
  int s = run.first;
  const int end = run.first + run.count;
  for (; s + kS <= end; s += kS) DotV<kBits, kR, kS, kTile0, kTiles>(a, side, codes, token, strips, p, s, row);
  for (; s < end; ++s) DotV<kBits, kR, 1, kTile0, kTiles>(a, side, codes, token, strips, p, s, row);
}

template <int kBits, int kTile0, int kTiles>
KVMANAGER_INLINE void DotVRows(const HackArguments& a, const HackSide& side, const HackRun& run, const uint8_t* codes,
                               int token, int strips, int p, int row) {
  const int rows = a.rows - row;
  if constexpr (kTileRows == 4) {
    if (rows >= 4) return DotVSegments<kBits, 4, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
    if (rows == 3) return DotVSegments<kBits, 3, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
  }
  if (rows >= 2) return DotVSegments<kBits, 2, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
  DotVSegments<kBits, 1, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
}

template <int kTile0, int kTiles>
KVMANAGER_INLINE void DotVRun(const HackArguments& a, const HackSide& side, const HackRun& run, const uint8_t* codes,
                              int token, int strips, int p, int row) {
  switch (run.bits) {
    case 1:
      return DotVRows<1, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
    case 2:
      return DotVRows<2, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
    case 3:
      return DotVRows<3, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
    case 4:
      return DotVRows<4, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
    default:
      return DotVRows<8, kTile0, kTiles>(a, side, run, codes, token, strips, p, row);
  }
}

/// DotV of two segments of their own widths, which share the broadcast probabilities.
template <int kBitsA, int kBitsB, int kR>
void DotVPair(const HackArguments& a, const HackSide& side, const uint8_t* codes, int token, int strips, int p,
              const uint8_t (&segments)[2], int row) {
  const int page_tokens = a.page_tokens;
  const uint8_t* p8 = a.scratch.p8 + size_t(row) * page_tokens + token;
  const uint8_t* plane_a = codes + side.segment_offset[segments[0]];
  const uint8_t* plane_b = codes + side.segment_offset[segments[1]];
  for (int w = 0; w < kSegment; w += kLanes) {
    VecI dot[2][kR] = {};
    for (int strip = 0; strip < strips; ++strip) {
      const size_t at = size_t(strip) * side.strip_bytes + 4 * w;
      KVMANAGER_UNROLL
      for (int j = 0; j < 4; ++j) {
        PrefetchStep(a, a.ahead->v_step_lines);
        KVMANAGER_UNROLL
        for (int i = 0; i < 4; ++i) {
          const VecU code_a = Unpack<kBitsA>(plane_a + at, j, i), code_b = Unpack<kBitsB>(plane_b + at, j, i);
          KVMANAGER_UNROLL
          for (int r = 0; r < kR; ++r) {
            uint32_t word;
            __builtin_memcpy(&word, p8 + size_t(r) * page_tokens + strip * kStrip + kSegment * i + 4 * j, 4);
            const VecU p4 = SetU(word);
            dot[0][r] = DotCodes<kBitsA>(dot[0][r], p4, code_a);
            dot[1][r] = DotCodes<kBitsB>(dot[1][r], p4, code_b);
          }
        }
      }
    }
    KVMANAGER_UNROLL
    for (int s = 0; s < 2; ++s) {
      const int c = segments[s] * kSegment + w;
      const VecF step = LoadF(a.scratch.v_steps + c), minimum = LoadF(a.scratch.v_minima + c);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        const float p_step = a.scratch.p_step[p * a.rows + row + r], p_sum = a.scratch.p_sum[p * a.rows + row + r];
        float* acc = a.acc + size_t(row + r) * a.head_dim + c;
        StoreF(acc, LoadF(acc) + MulAdd(step, ToF(dot[s][r]), minimum * p_sum) * p_step);
      }
    }
  }
}

template <int kBitsA, int kBitsB>
KVMANAGER_INLINE void DotVPairRows(const HackArguments& a, const HackSide& side, const uint8_t* codes, int token,
                                   int strips, int p, const uint8_t (&segments)[2], int row) {
  const int rows = a.rows - row;
  if constexpr (kTileRows == 4) {
    if (rows >= 4) return DotVPair<kBitsA, kBitsB, 4>(a, side, codes, token, strips, p, segments, row);
    if (rows == 3) return DotVPair<kBitsA, kBitsB, 3>(a, side, codes, token, strips, p, segments, row);
  }
  if (rows >= 2) return DotVPair<kBitsA, kBitsB, 2>(a, side, codes, token, strips, p, segments, row);
  DotVPair<kBitsA, kBitsB, 1>(a, side, codes, token, strips, p, segments, row);
}

/// acc += P * V over one partition of whole strips whose segments differ in width.
KVMANAGER_INLINE void DotVMixed(const HackArguments& a, const HackSide& side, const uint8_t* codes, int token,
                                int strips, int p, int row) {
  for (int i = 0; i < side.quad_count; ++i) DotVRun<0, 4>(a, side, side.quads[i], codes, token, strips, p, row);
  for (int i = 0; i < side.pair_count; ++i) {
    const uint8_t(&pair)[2] = side.pairs[i];
    switch (side.bits[pair[0]] * 8 + side.bits[pair[1]]) {
#define KVMANAGER_PAIR(A, B)                                         \
  case A * 8 + B:                                                    \
    DotVPairRows<A, B>(a, side, codes, token, strips, p, pair, row); \
    break;
      KVMANAGER_PAIR(1, 1)
      KVMANAGER_PAIR(2, 1)
      KVMANAGER_PAIR(2, 2)
      KVMANAGER_PAIR(3, 1)
      KVMANAGER_PAIR(3, 2)
      KVMANAGER_PAIR(3, 3)
      KVMANAGER_PAIR(4, 1)
      KVMANAGER_PAIR(4, 2)
      KVMANAGER_PAIR(4, 3)
      KVMANAGER_PAIR(4, 4)
#undef KVMANAGER_PAIR
      default:
        break;
    }
  }
  if (side.last.count > 0) DotVRun<0, 4>(a, side, side.last, codes, token, strips, p, row);
}

/// V's steps and minima of the segments that have codes.
KVMANAGER_INLINE void LoadValueMetadata(const HackArguments& a, const Metadata& m) {
  const HackSide& side = a.head->v;
  for (int i = 0; i < side.run_count; ++i) {
    const int first = side.runs[i].first * kSegment;
    LoadMetadata(m, first, first + side.runs[i].count * kSegment, a.scratch.v_steps, a.scratch.v_minima);
  }
}

/// Adds the minima of segments of width 0.
template <int kR>
KVMANAGER_INLINE void AddMinima(const HackArguments& a, const HackSide& side, const Metadata& m, int p, int row) {
  const size_t d = a.head_dim;
  const Vec4 factors = LoadRows<kR>(a.scratch.p_sum + p * a.rows + row) *
                       LoadRows<kR>(a.scratch.p_step + p * a.rows + row) * m.top_minimum;
  float* acc = a.acc + row * d;
  for (int i = 0; i < side.empty_count; ++i) {
    const int first = side.empty[i] * kSegment;
    KVMANAGER_UNROLL
    for (int c = first; c < first + kSegment; c += kLanes) {
      const VecF minimum = MinimumAt(m, c);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        StoreF(acc + r * d + c, MulAdd(minimum, SetF(factors[r]), LoadF(acc + r * d + c)));
      }
    }
  }
}

/// metadata: of V's first partition, loaded.
KVMANAGER_INLINE void Outputs(const HackArguments& a, const uint8_t* record, Metadata metadata) {
  const HackSide& side = a.head->v;
  for (int p = 0; p < side.partitions; ++p) {
    if (p > 0) {
      metadata = MetadataOf(a, record, side, p, p);
      LoadValueMetadata(a, metadata);
    }
    const int begin = p * side.partition;
    const int token = begin / kStrip * kStrip;
    const uint8_t* codes = record + side.codes + size_t(token / kStrip) * side.strip_bytes;
    for (int row = 0; row < a.rows; row += kTileRows) {
      if (side.mixes && side.partition >= kStrip) {
        DotVMixed(a, side, codes, token, side.partition / kStrip, p, row);
        continue;
      }
      for (int i = 0; i < side.run_count; ++i) {
        const HackRun& run = side.runs[i];
        if (side.partition >= kStrip) {
          DotVRun<0, 4>(a, side, run, codes, token, side.partition / kStrip, p, row);
        } else if (begin % kStrip == 0) {
          DotVRun<0, 2>(a, side, run, codes, token, 1, p, row);
        } else {
          DotVRun<2, 2>(a, side, run, codes, token, 1, p, row);
        }
      }
    }
    ForRows(a.rows, [&](auto count, int row) { AddMinima<count.value>(a, side, metadata, p, row); });
  }
}

/// The record that is read `i` records after the first of this call, or nullptr.
KVMANAGER_INLINE const uint8_t* RecordAt(const HackArguments& a, size_t i) {
  if (i < a.page_count) return a.pages[i] + a.head->offset;
  return i - a.page_count < a.next_count ? a.next_pages[i - a.page_count] + a.next_offset : nullptr;
}

template <typename S>
void AttendPages(HackArguments& a) {
  HackAhead ahead;
  a.ahead = &ahead;
  const int lines = (a.head->v.end + 63) / 64;
  // Half of a record while K is read, a share per segment; half with V, a share per column of words.
  const int strips = a.page_tokens / kStrip, segments = a.head_dim / kSegment;
  int k_segments = segments, v_calls = (segments + kSharedSegmentsMax - 1) / kSharedSegmentsMax;
  if (a.head->k.mixes) {
    k_segments = 0;
    for (int count : a.head->k.width_count) k_segments += count;
  }
  if (a.head->v.mixes) {
    v_calls = a.head->v.pair_count + a.head->v.last.count;
    for (int i = 0; i < a.head->v.quad_count; ++i) {
      v_calls += (a.head->v.quads[i].count + kSharedSegmentsMax - 1) / kSharedSegmentsMax;
    }
  }
  const int k_steps = strips * k_segments;
  const int v_steps = strips * 4 * v_calls;
  ahead.k_step_lines = (lines / 2 + k_steps - 1) / k_steps;
  ahead.v_step_lines = (lines - lines / 2 + v_steps - 1) / v_steps;
  // Two records ahead: a record is attended to in less time than one core's outstanding misses take to bring the next.
  const size_t distance = a.page_count + a.next_count > 2 ? 2 : 1;
  for (size_t i = 0; i < a.page_count; ++i) {
    const uint8_t* record = RecordAt(a, i);
    ahead.at = RecordAt(a, i + distance);
    ahead.left = ahead.at == nullptr ? 0 : lines;
    if (a.along_channels) {
      ScoresAlongChannels(a, record);
    } else {
      ScoresAlongTokens<S>(a, record);
    }
    // Here, where the maxima are waited for.
    const Metadata v_metadata = MetadataOf(a, record, a.head->v, 0, 0);
    LoadValueMetadata(a, v_metadata);
    ForRows(a.rows, [&](auto count, int row) { RaiseMaximum<S, count.value>(a, row); });
    ForRows(a.rows, [&](auto count, int row) { Softmax<S, count.value>(a, row); });
    Outputs(a, record, v_metadata);
  }
}

void Attend(HackArguments& a) {
  if (a.along_channels) QuantizeQueries(a, a.head->k);
  const bool usual = a.head_dim == UsualShape::kDim && a.page_tokens == UsualShape::kTokens &&
                     a.head->v.partition == UsualShape::kTokens &&
                     (a.along_channels || a.head->k.partition == UsualShape::kTokens);
  if (usual) {
    AttendPages<UsualShape>(a);
  } else {
    AttendPages<AnyShape>(a);
  }
}

}  // namespace

#if defined(KVMANAGER_ISA_AVX512)
#define KVMANAGER_HACK_ATTEND kHackAttendAvx512
#elif defined(KVMANAGER_ISA_AVX2)
#define KVMANAGER_HACK_ATTEND kHackAttendAvx2
#else
#define KVMANAGER_HACK_ATTEND kHackAttendPortable
#endif

void (*const KVMANAGER_HACK_ATTEND)(HackArguments&) = Attend;

}  // namespace kvmanager::hack
