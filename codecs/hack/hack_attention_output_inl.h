// The output of a HACK page: quantised P times V's codes (words of four tokens, a lane per channel), and V's minima.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/hack/hack_attention_kernel.h"
#include "codecs/hack/hack_attention_page_inl.h"
#include "codecs/hack/hack_attention_unpack_inl.h"

namespace kvmanager::hack {
namespace {

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

}  // namespace
}  // namespace kvmanager::hack
