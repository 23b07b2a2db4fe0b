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
#include "codecs/hack/hack_attention_output_inl.h"
#include "codecs/hack/hack_attention_page_inl.h"
#include "codecs/hack/hack_attention_scores_inl.h"

namespace kvmanager::hack {
namespace {

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

/// Probabilities of kR rows, times the tokens' norms with kNorms, quantised per partition of V. norm_unit: what a norm
/// of 1 stands for.
template <typename S, int kR, bool kNorms>
KVMANAGER_INLINE void Softmax(const HackArguments& a, int row, float norm_unit) {
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
    // Probabilities times norms, between their maximum and their codes: in registers where those are enough.
    constexpr int kKept = S::kTokens > 0 && S::kTokens <= 4 * kLanes ? S::kTokens / kLanes : 0;
    VecF kept[4][kKept + 1];
    VecF totals[4] = {}, part_sum[4] = {};
    Vec4 to_p8 = Vec4{} + 255.0f, p_step = weight * (1 / 255.0f);
    if constexpr (kNorms) {
      VecF largest[4] = {};
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        float* score = s.scores + size_t(row + r) * tokens + begin;
        const VecF row_top = SetF(top[r]);
        KVMANAGER_UNROLL
        for (int t = 0; t < partition; t += kLanes) {
          const VecF x = ExpNegative(LoadF(score + t) - row_top), y = x * LoadF(s.v_norms + begin + t);
          part_sum[r] += x;
          largest[r] = t == 0 ? y : MaxF(largest[r], y);
          if constexpr (kKept > 0) {
            kept[r][t / kLanes] = y;
          } else {
            StoreF(score + t, y);
          }
        }
      }
      const Vec4 most = ReduceMaxRows(largest);
      to_p8 = most > kNegligible ? 255.0f / most : Vec4{};
      p_step *= most * norm_unit;
    }
    StoreRows<kR>(s.p_step + at, p_step);
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const float* score = s.scores + size_t(row + r) * tokens + begin;
      uint8_t* p8 = s.p8 + size_t(row + r) * tokens + begin;
      const VecF row_top = SetF(top[r]), row_to_p8 = SetF(to_p8[r]);
      VecI total{};
      auto probabilities = [&](int t) {
        VecF x;
        if constexpr (kNorms && kKept > 0) {
          x = kept[r][t / kLanes];
        } else if constexpr (kNorms) {
          x = LoadF(score + t);
        } else {
          x = ExpNegative(LoadF(score + t) - row_top);
          part_sum[r] += x;
        }
        const VecI x8 = RoundToInt(x * row_to_p8);
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

/// V's norms as stored; returns what a norm of 1 stands for.
KVMANAGER_INLINE float LoadNorms(const HackArguments& a, const uint8_t* record) {
  const HackSide& side = a.head->v;
  for (int t = 0; t < a.page_tokens; t += kLanes) StoreF(a.scratch.v_norms + t, LoadU8(record + side.norms + t));
  return HalfAt(record + side.norm_top) * (1 / 255.0f);
}

/// The record that is read `i` records after the first of this call, or nullptr.
KVMANAGER_INLINE const uint8_t* RecordAt(const HackArguments& a, size_t i) {
  if (i < a.page_count) return a.pages[i] + a.head->offset;
  return i - a.page_count < a.next_count ? a.next_pages[i - a.page_count] + a.next_offset : nullptr;
}

template <typename S>
void AttendPages(HackArguments& a) {
  HackAhead ahead[2];  // of records with an even and an odd number
  const int lines = (a.head->v.end + 63) / 64;
  // Half of a record while K is read, a share per segment; half with V, a share per column of words.
  const int strips = a.page_tokens / kStrip, segments = a.head_dim / kSegment;
  int k_segments = segments, v_calls = (segments + kSharedSegmentsMax - 1) / kSharedSegmentsMax;
  if (a.head->k.mixes) {
    k_segments = 0;
    for (int count : a.head->k.width_count) k_segments += count;
    for (int i = 0; i < a.head->k.wide_count; ++i) k_segments += a.head->k.wide[i].count;
  }
  if (a.head->v.mixes) {
    v_calls = a.head->v.pair_count + a.head->v.last.count;
    for (int i = 0; i < a.head->v.quad_count; ++i) {
      v_calls += (a.head->v.quads[i].count + kSharedSegmentsMax - 1) / kSharedSegmentsMax;
    }
  }
  const int k_steps = strips * k_segments;
  const int v_steps = strips * 4 * v_calls;
  for (HackAhead& each : ahead) {
    each.k_step_lines = (lines / 2 + k_steps - 1) / k_steps;
    each.v_step_lines = (lines - lines / 2 + v_steps - 1) / v_steps;
  }
  // Two records ahead: a record is attended to in less time than one core's outstanding misses take to bring the next.
  const size_t distance = a.page_count + a.next_count > 2 ? 2 : 1;
  // A page's scores come before the output of the page before it: each is work for the core while the other's maxima,
  // probabilities and codes of them are waited for.
  Metadata v_metadata = {};
  for (size_t i = 0; i <= a.page_count; ++i) {
    const uint8_t* record = i < a.page_count ? RecordAt(a, i) : nullptr;
    if (record != nullptr) {
      a.ahead = &ahead[i % 2];
      a.ahead->at = RecordAt(a, i + distance);
      a.ahead->left = a.ahead->at == nullptr ? 0 : lines;
      if (a.along_channels) {
        ScoresAlongChannels(a, record);
      } else {
        ScoresAlongTokens<S>(a, record);
      }
    }
    if (i > 0) {
      a.ahead = &ahead[(i - 1) % 2];
      Outputs(a, RecordAt(a, i - 1), v_metadata);
    }
    if (record == nullptr) break;
    // Here, where the maxima are waited for.
    v_metadata = MetadataOf(a, record, a.head->v, 0, 0);
    LoadValueMetadata(a, v_metadata);
    const float norm_unit = a.head->v.norms != 0 ? LoadNorms(a, record) : 1;
    ForRows(a.rows, [&](auto count, int row) { RaiseMaximum<S, count.value>(a, row); });
    if (a.head->v.norms != 0) {
      ForRows(a.rows, [&](auto count, int row) { Softmax<S, count.value, true>(a, row, norm_unit); });
    } else {
      ForRows(a.rows, [&](auto count, int row) { Softmax<S, count.value, false>(a, row, 1); });
    }
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

#if defined(__clang__)
// GCC's __builtin_shuffle, whose lanes need not be constants: tools/fuzz compiles with clang.
template <typename I>
KVMANAGER_INLINE VecF __builtin_shuffle(VecF v, I from) {
  VecF to = {};
  for (int i = 0; i < kLanes; ++i) to[i] = v[from[i] % kLanes];
  return to;
}
#endif

/// Sums and differences of lanes `half` apart, of which the transform is made.
KVMANAGER_INLINE VecF ButterflyLanes(VecF v, int half) {
  const VecU minus = (VecU)((Iota() & half) != 0) & 0x80000000u;
  return __builtin_shuffle(v, Iota() ^ half) + (VecF)((VecU)v ^ minus);
}

void Rotate(const float* x, int rows, int d, float* out) {
  const float norm = 1 / __builtin_sqrtf(float(d));
  for (int row = 0; row < rows; ++row, x += d, out += d) {
    for (int i = 0; i < d; i += kLanes) {
      VecF v = LoadF(x + i) * norm;
      KVMANAGER_UNROLL
      for (int half = 1; half < kLanes; half *= 2) v = ButterflyLanes(v, half);
      StoreF(out + i, v);
    }
    for (int half = kLanes; half < d; half *= 2) {
      for (int first = 0; first < d; first += 2 * half) {
        for (int i = first; i < first + half; i += kLanes) {
          const VecF a = LoadF(out + i), b = LoadF(out + i + half);
          StoreF(out + i, a + b);
          StoreF(out + i + half, a - b);
        }
      }
    }
  }
}

}  // namespace

#if defined(KVMANAGER_ISA_AVX512)
#define KVMANAGER_HACK_ATTEND kHackAttendAvx512
#define KVMANAGER_HACK_ROTATE kHackRotateAvx512
#elif defined(KVMANAGER_ISA_AVX2)
#define KVMANAGER_HACK_ATTEND kHackAttendAvx2
#define KVMANAGER_HACK_ROTATE kHackRotateAvx2
#else
#define KVMANAGER_HACK_ATTEND kHackAttendPortable
#define KVMANAGER_HACK_ROTATE kHackRotatePortable
#endif

void (*const KVMANAGER_HACK_ATTEND)(HackArguments&) = Attend;
void (*const KVMANAGER_HACK_ROTATE)(const float*, int, int, float*) = Rotate;

}  // namespace kvmanager::hack
