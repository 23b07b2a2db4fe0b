// Scores of a HACK page: q folded with K's steps and quantised, and dots with K's codes (words of four channels, a lane
// per token).
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/hack/hack_attention_kernel.h"
#include "codecs/hack/hack_attention_page_inl.h"
#include "codecs/hack/hack_attention_unpack_inl.h"

namespace kvmanager::hack {
namespace {

constexpr float kLowLevels = 254;  // of q's second byte in a unit of its first

/// The second bytes of kR rows of q in K's segments of 8 bits. inverse: what FoldQueries multiplied by.
template <int kR>
KVMANAGER_INLINE void FoldLowBytes(const HackArguments& a, const HackSide& side, int row, Vec4 inverse) {
  const HackScratch s = a.scratch;
  const float* q = a.q + size_t(row) * a.head_dim;
  int8_t* q_low = s.q_low + size_t(row) * a.head_dim;
  for (int i = 0; i < side.run_count; ++i) {
    if (side.runs[i].bits != 8) continue;
    const int end = (side.runs[i].first + side.runs[i].count) * kSegment;
    for (int c = side.runs[i].first * kSegment; c < end; c += kLanes) {
      const VecF step = LoadF(s.steps + c);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        const size_t at = size_t(r) * a.head_dim + c;
        const VecF folded = LoadF(q + at) * step, to_q8 = SetF(inverse[r]);
        const VecF high = ToF(RoundToInt(folded * to_q8));
        StoreBytes(q_low + at, RoundToInt(MulAdd(folded, to_q8, -high) * kLowLevels));
      }
    }
  }
}

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
  if (__builtin_expect(side.two_byte_q, 0)) FoldLowBytes<kR>(a, side, row, inverse);
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

/// DotK of segments of 8 bits along tokens, of which q has two bytes: two tiles at a time, as each has two sums.
template <int kR, int kTile0>
void DotKTwoBytes(const HackArguments& a, const HackSide& side, const HackRun& run, const uint8_t* codes, int token,
                  int p, int row, bool first) {
  const int d = a.head_dim, page_tokens = a.page_tokens;
  const int8_t* q8 = a.scratch.q8 + size_t(row) * d;
  const int8_t* q_low = a.scratch.q_low + size_t(row) * d;
  float* scores = a.scratch.scores + size_t(row) * page_tokens;
  for (int w = 0; w < kSegment; w += kLanes) {
    VecI high[2][kR] = {}, low[2][kR] = {};
    for (int s = run.first; s < run.first + run.count; ++s) {
      PrefetchStep(a, a.ahead->k_step_lines);
      const uint8_t* at = codes + side.segment_offset[s] + 4 * w;
      KVMANAGER_UNROLL
      for (int j = 0; j < 4; ++j) {
        const VecU code[2] = {Unpack<8>(at, j, kTile0), Unpack<8>(at, j, kTile0 + 1)};
        KVMANAGER_UNROLL
        for (int r = 0; r < kR; ++r) {
          uint32_t high_word, low_word;
          __builtin_memcpy(&high_word, q8 + size_t(r) * d + s * kSegment + 4 * j, 4);
          __builtin_memcpy(&low_word, q_low + size_t(r) * d + s * kSegment + 4 * j, 4);
          const VecU q_high4 = SetU(high_word), q_low4 = SetU(low_word);
          KVMANAGER_UNROLL
          for (int i = 0; i < 2; ++i) {
            high[i][r] = DotCodes<8>(high[i][r], code[i], q_high4);
            low[i][r] = DotCodes<8>(low[i][r], code[i], q_low4);
          }
        }
      }
    }
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      float* score = scores + size_t(r) * page_tokens;
      const float q_step = a.scratch.q_step[p * a.rows + row + r], q_min = a.scratch.q_min[p * a.rows + row + r];
      KVMANAGER_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int t = token + kSegment * (kTile0 + i) + w;
        const VecF dot = MulAdd(ToF(low[i][r]), SetF(1 / kLowLevels), ToF(high[i][r]));
        StoreF(score + t, MulAdd(dot, SetF(q_step), first ? SetF(q_min) : LoadF(score + t)));
      }
    }
  }
}

template <int kTile0, int kTiles>
KVMANAGER_INLINE void DotKTwoBytesRows(const HackArguments& a, const HackSide& side, const HackRun& run,
                                       const uint8_t* codes, int token, int p, int row, bool first) {
  if constexpr (kTiles == 4) {
    DotKTwoBytesRows<kTile0, 2>(a, side, run, codes, token, p, row, first);
    DotKTwoBytesRows<kTile0 + 2, 2>(a, side, run, codes, token, p, row, first);
  } else {
    const int rows = a.rows - row;
    if constexpr (kTileRows == 4) {
      if (rows >= 4) return DotKTwoBytes<4, kTile0>(a, side, run, codes, token, p, row, first);
      if (rows == 3) return DotKTwoBytes<3, kTile0>(a, side, run, codes, token, p, row, first);
    }
    if (rows >= 2) return DotKTwoBytes<2, kTile0>(a, side, run, codes, token, p, row, first);
    DotKTwoBytes<1, kTile0>(a, side, run, codes, token, p, row, first);
  }
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
      if constexpr (!kAlongChannels) {
        if (side.two_byte_q) return DotKTwoBytesRows<kTile0, kTiles>(a, side, run, codes, token, p, row, first);
      }
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
          for (int i = 0; i < side.wide_count; ++i) {
            DotKTwoBytesRows<0, 4>(a, side, side.wide[i], strip, token, p, row, false);
          }
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

}  // namespace
}  // namespace kvmanager::hack
