// The kernels of attention on MILLION pages, written once over simd_inl.h's vectors and compiled per instruction set.
//
// Once per call, q is folded with the steps of K's codebook and rounded to 16 bits, kept as two signed bytes. Per strip
// of 64 tokens: K's codes are looked up, and multiplied by both bytes of every row; softmax; P is rounded to 8 bits of
// the strip's largest; V's codes are looked up, and multiplied by P.
//
// Invariants: 1. integer sums are exact; 2. a row's fp32 operations do not depend on the rows beside it; 3. the
// accumulator is rescaled only when the row's maximum grows.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/million/million_attention_kernel.h"

namespace kvmanager::million {
namespace {

constexpr float kNegligible = 0x1p-100f;  // as in ReferenceAttend
constexpr float kQueryLevels = 32512;     // 127 * 256: the high byte stays in -127..127
constexpr int kTokens = kStripTokens;
// Vectors of tokens (K), and of channels (V), that share a row's broadcast; rows that share their loads.
constexpr int kKVectors = kLanes == 16 ? 4 : 2;
constexpr int kVVectors = kLanes == 16 ? 4 : 2;
constexpr int kKRows = 2;
constexpr int kVRows = kLanes == 16 ? 4 : 2;

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

/// run(Count<n>, first row) for all rows, kMax (1, 2 or 4) at a time.
template <int kMax, typename Run>
KVMANAGER_INLINE void ForRows(int rows, Run run) {
  int row = 0;
  for (; row + kMax <= rows; row += kMax) run(Count<kMax>(), row);
  if constexpr (kMax > 2) {
    if (rows - row == 3) run(Count<3>(), row);
    if (rows - row == 2) run(Count<2>(), row);
  }
  if (rows - row == 1) run(Count<1>(), row);
}

KVMANAGER_INLINE VecU Broadcast4(const void* p) {
  uint32_t word;
  __builtin_memcpy(&word, p, 4);
  return SetU(word);
}

/// Lines of what is read next, prefetched a few at a time in the loops over rows: look-ups themselves need every miss
/// that L1 can have under way for tables that come from L2.
struct Ahead {
  const uint8_t* at;
  int left;
  int step_lines;
};

KVMANAGER_INLINE Ahead MakeAhead(const uint8_t* at, uint32_t bytes, int steps) {
  const int lines = at == nullptr ? 0 : int(bytes / 64);
  return {at, lines, (lines + steps - 1) / steps};
}

KVMANAGER_INLINE void PrefetchStep(Ahead& ahead) {
  for (int i = 0; i < ahead.step_lines && ahead.left > 0; ++i, --ahead.left, ahead.at += 64) {
    __builtin_prefetch(ahead.at);
  }
}

// score = scale (sum_c q_c mid_c + sum_c q_c step_c code_c), the second sum in integers.
void FoldQueries(const MillionArguments& a) {
  const MillionScratch& s = a.scratch;
  const float* steps = a.k_table->step;
  const float* mids = a.k_table->mid;
  const int d = a.head_dim;
  for (int r = 0; r < a.rows; ++r) {
    const float* q = a.q + size_t(r) * d;
    VecF largest{}, offset{};
    for (int c = 0; c < d; c += kLanes) {
      const VecF x = LoadF(q + c);
      largest = MaxF(largest, AbsF(x * LoadF(steps + c)));
      offset = MulAdd(x, LoadF(mids + c), offset);
    }
    const float top = ReduceMax(largest);
    const VecF inverse = SetF(top > kNegligible ? kQueryLevels / top : 0.0f);
    VecI total{};
    for (int c = 0; c < d; c += kLanes) {
      const VecI x = RoundToInt(LoadF(q + c) * LoadF(steps + c) * inverse);
      const VecI high = (x + 128) >> 8;
      StoreBytes(s.q_high + size_t(r) * d + c, high);
      StoreBytes(s.q_low + size_t(r) * d + c, x - (high << 8));
      total += x;
    }
    int32_t sum = 0;
    KVMANAGER_UNROLL
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    s.q_start[r] = -128 * sum;
    s.q_unit[r] = top * (1 / kQueryLevels) * a.scale;
    s.q_offset[r] = ReduceAdd(offset) * a.scale;
  }
}

/// Scores of a strip, kR rows from `row` on.
template <int kR>
KVMANAGER_INLINE void Scores(const MillionArguments& a, int row, Ahead& ahead) {
  const MillionScratch s = a.scratch;
  const int d = a.head_dim;
  for (int t = 0; t < kTokens; t += kKVectors * kLanes) {
    VecI high[kR][kKVectors] = {}, low[kR][kKVectors] = {};
    const uint32_t* words = s.words + t;
    const int8_t* q_high = s.q_high + size_t(row) * d;
    const int8_t* q_low = s.q_low + size_t(row) * d;
    for (int c = 0; c < d; c += 4, words += kTokens) {
      PrefetchStep(ahead);
      VecU code[kKVectors];
      KVMANAGER_UNROLL
      for (int v = 0; v < kKVectors; ++v) code[v] = LoadU(words + v * kLanes);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        const VecU q1 = Broadcast4(q_high + size_t(r) * d + c), q0 = Broadcast4(q_low + size_t(r) * d + c);
        KVMANAGER_UNROLL
        for (int v = 0; v < kKVectors; ++v) {
          high[r][v] = Dot4(high[r][v], code[v], q1);
          low[r][v] = Dot4(low[r][v], code[v], q0);
        }
      }
    }
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const VecF unit = SetF(s.q_unit[row + r]), offset = SetF(s.q_offset[row + r]);
      const VecU start = SetU(uint32_t(s.q_start[row + r]));
      KVMANAGER_UNROLL
      for (int v = 0; v < kKVectors; ++v) {
        // The sum fits 32 bits; with codes less 128 it is at most 256 * 128 * 32640.
        const VecI dot = (VecI)(((VecU)high[r][v] << 8) + (VecU)low[r][v] + start);
        StoreF(s.scores + size_t(row + r) * kTokens + t + v * kLanes, MulAdd(ToF(dot), unit, offset));
      }
    }
  }
}

/// The running maxima of kR rows after this strip, its own in p_unit, and the state rescaled where a maximum grew.
template <int kR>
KVMANAGER_INLINE void RaiseMaximum(const MillionArguments& a, int row) {
  VecF top[4] = {};
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    const float* score = a.scratch.scores + size_t(row + r) * kTokens;
    top[r] = LoadF(score);
    KVMANAGER_UNROLL
    for (int t = kLanes; t < kTokens; t += kLanes) top[r] = MaxF(top[r], LoadF(score + t));
  }
  const Vec4 strip_max = ReduceMaxRows(top);
  StoreRows<kR>(a.scratch.p_unit + row, strip_max);
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    if (__builtin_expect(strip_max[r] > a.max[row + r], 0)) {
      const float factor = ExpNegativeScalar(a.max[row + r] - strip_max[r]);
      a.max[row + r] = strip_max[r];
      a.sum[row + r] *= factor;
      float* acc = a.acc + size_t(row + r) * a.head_dim;
      for (int c = 0; c < a.head_dim; c += kLanes) StoreF(acc + c, LoadF(acc + c) * factor);
    }
  }
}

/// Probabilities of kR rows, rounded to 8 bits of the strip's largest.
template <int kR>
KVMANAGER_INLINE void Softmax(const MillionArguments& a, int row) {
  const MillionScratch s = a.scratch;
  const Vec4 max = LoadRows<kR>(a.max + row);
  // The same function of the same score, so that it is the largest probability to the bit.
  const Vec4 p_max = NarrowRows(ExpNegative(WidenRows(LoadRows<kR>(s.p_unit + row) - max)));
  const Vec4 inverse = p_max > kNegligible ? 255.0f / p_max : Vec4{};
  StoreRows<kR>(s.p_unit + row, p_max * (1 / 255.0f));
  VecF sum[4] = {}, totals[4] = {};
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    const float* score = s.scores + size_t(row + r) * kTokens;
    uint8_t* p8 = s.p8 + size_t(row + r) * kTokens;
    const VecF row_max = SetF(max[r]), row_inverse = SetF(inverse[r]);
    VecI total{};
    auto probabilities = [&](int t) {
      const VecF x = ExpNegative(LoadF(score + t) - row_max);
      const VecI x8 = RoundToInt(x * row_inverse);
      sum[r] += x;
      total += x8;
      return x8;
    };
    KVMANAGER_UNROLL
    for (int t = 0; t < kTokens; t += 4 * kLanes) {
      const VecI x0 = probabilities(t), x1 = probabilities(t + kLanes), x2 = probabilities(t + 2 * kLanes),
                 x3 = probabilities(t + 3 * kLanes);
      StoreBytes4<false>(p8 + t, x0, x1, x2, x3);
    }
    totals[r] = ToF(total);
  }
  StoreRows<kR>(s.p_sum + row, ReduceAddRows(totals));
  StoreRows<kR>(a.sum + row, LoadRows<kR>(a.sum + row) + ReduceAddRows(sum));
}

/// acc += p (mid + step * code) over a strip, for kR rows from `row` on and kC vectors of channels from `channel` on.
template <int kR, int kC>
KVMANAGER_INLINE void AddValues(const MillionArguments& a, int row, int channel, Ahead& ahead) {
  const MillionScratch s = a.scratch;
  const int d = a.head_dim;
  const uint32_t* words = s.words + channel;
  const uint8_t* p8 = s.p8 + size_t(row) * kTokens;
  VecI dot[kR][kC] = {};
  KVMANAGER_UNROLL
  for (int j = 0; j < kTokens / 4; ++j, words += d) {
    PrefetchStep(ahead);
    VecU code[kC];
    KVMANAGER_UNROLL
    for (int v = 0; v < kC; ++v) code[v] = LoadU(words + v * kLanes);
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const VecU p = Broadcast4(p8 + r * kTokens + 4 * j);
      KVMANAGER_UNROLL
      for (int v = 0; v < kC; ++v) dot[r][v] = Dot4(dot[r][v], p, code[v]);
    }
  }
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    const VecF unit = SetF(s.p_unit[row + r]), sum = SetF(s.p_sum[row + r]);
    float* acc = a.acc + size_t(row + r) * d + channel;
    KVMANAGER_UNROLL
    for (int v = 0; v < kC; ++v) {
      const int c = v * kLanes;
      const VecF x =
          MulAdd(LoadF(a.v_table->step + channel + c), ToF(dot[r][v]), LoadF(a.v_table->mid + channel + c) * sum);
      StoreF(acc + c, MulAdd(x, unit, LoadF(acc + c)));
    }
  }
}

template <int kR>
KVMANAGER_INLINE void AddChannels(const MillionArguments& a, int row, Ahead& ahead) {
  int c = 0;
  for (; c + kVVectors * kLanes <= a.head_dim; c += kVVectors * kLanes) AddValues<kR, kVVectors>(a, row, c, ahead);
  for (; c < a.head_dim; c += kLanes) AddValues<kR, 1>(a, row, c, ahead);
}

void Attend(const MillionArguments& a) {
  FoldQueries(a);
  const int k_steps = (a.rows + kKRows - 1) / kKRows * (a.head_dim / 4);
  const int v_steps = (a.rows + kVRows - 1) / kVRows * kTokens / 4;
  for (size_t i = 0; i < a.page_count; ++i) {
    const uint8_t* record = a.pages[i] + a.record_offset;
    const uint8_t* next = i + 1 < a.page_count ? a.pages[i + 1] + a.record_offset : a.next_record;
    for (int strip = 0; strip < a.strips; ++strip) {
      const uint8_t* k = record + a.k->offset + size_t(strip) * a.k->strip_bytes;
      const uint8_t* v = record + a.v->offset + size_t(strip) * a.v->strip_bytes;
      const bool last = strip + 1 == a.strips;
      const uint8_t* k_ahead = !last ? k + a.k->strip_bytes : next != nullptr ? next + a.k->offset : nullptr;
      const uint8_t* v_ahead = !last ? v + a.v->strip_bytes : next != nullptr ? next + a.v->offset : nullptr;
      Ahead k_next = MakeAhead(k_ahead, a.k->strip_bytes, k_steps),
            v_next = MakeAhead(v_ahead, a.v->strip_bytes, v_steps);
      a.look_up_k(*a.k, *a.k_table, a.head_dim, k, a.scratch.words);
      ForRows<kKRows>(a.rows, [&](auto count, int row) { Scores<count.value>(a, row, k_next); });
      // Before the softmax, which needs it not: its loads overlap the waiting for maxima.
      a.look_up_v(*a.v, *a.v_table, a.head_dim, v, a.scratch.words);
      ForRows<4>(a.rows, [&](auto count, int row) { RaiseMaximum<count.value>(a, row); });
      ForRows<4>(a.rows, [&](auto count, int row) { Softmax<count.value>(a, row); });
      ForRows<kVRows>(a.rows, [&](auto count, int row) { AddChannels<count.value>(a, row, v_next); });
    }
  }
}

}  // namespace

#if defined(KVMANAGER_ISA_AVX512)
void (*const kMillionAttendAvx512)(const MillionArguments&) = Attend;
#elif defined(KVMANAGER_ISA_AVX2)
void (*const kMillionAttendAvx2)(const MillionArguments&) = Attend;
#else
void (*const kMillionAttendPortable)(const MillionArguments&) = Attend;
#endif

}  // namespace kvmanager::million
