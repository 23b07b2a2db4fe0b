// The kernels of attention on MILLION pages, written once over simd_inl.h's vectors and compiled per instruction set.
//
// Once per call, q is folded with the steps of K's codebook and rounded to one signed byte, two where channels are
// outliers. Per group of a few strips of 64 tokens: K's codes are looked up, some channels at a time, and multiplied by
// every row's bytes; per strip softmax, P rounded to 8 bits of the strip's largest; V's codes are looked up, some
// channels at a time, and multiplied by P.
//
// Invariants: 1. integer sums are exact; 2. a row's fp32 operations do not depend on the rows beside it, nor on which
// strips are a group; 3. the accumulator is rescaled only when the row's maximum grows.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/million/million_attention_kernel.h"

namespace kvmanager::million {
namespace {

constexpr float kNegligible = 0x1p-100f;  // as in ReferenceAttend
constexpr float kQueryLevels = 127;       // of one byte
constexpr int kWideShiftMin = 2;          // an outlier is more than 2^this above the others
constexpr int kWideShiftMax = 8;          // 127 * 256: the high byte stays in -127..127
constexpr int kTokens = kStripTokens;
constexpr int kKVectors = kLanes == 16 ? 4 : 2;  // vectors of tokens that share a row's broadcast
// Rows that share their loads.
constexpr int kKRows = kLanes == 16 ? 4 : 2;
constexpr int kVRows = kLanes == 16 ? 4 : 1;
constexpr int kVVectors = kTokens / kLanes;  // of a strip's codes of four channels
constexpr int kQuarters = kLanes / 4;

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

/// Lines of what is read next, prefetched to L2 a few at a time in the loops over rows: look-ups themselves need every
/// miss that L1 can have under way for tables that come from L2, and L1's room is for their results.
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
    __builtin_prefetch(ahead.at, 0, 2);
  }
}

/// How many elements of a exceed `limit`.
KVMANAGER_INLINE int CountAbove(VecF a, VecF limit) {
#if defined(KVMANAGER_ISA_AVX512)
  return CountBits(_mm512_cmp_ps_mask(a, limit, _CMP_GT_OQ));
#elif defined(KVMANAGER_ISA_AVX2)
  return __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(a, limit, _CMP_GT_OQ)));
#else
  const VecI above = a > limit;
  return -(above[0] + above[1] + above[2] + above[3]);
#endif
}

/// The shift of million_attention.h, of |q_c step_c| whose largest is `top`.
int WideShift(const float* q, const float* steps, int d, float top) {
  int shift = 0;
  for (int wider = kWideShiftMin; wider <= kWideShiftMax; ++wider) {
    const VecF limit = SetF(top / float(1 << wider));
    int above = 0;
    for (int c = 0; c < d; c += kLanes) above += CountAbove(AbsF(LoadF(q + c) * LoadF(steps + c)), limit);
    if (above > kWideMax) break;
    shift = wider;
  }
  return shift;
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
    const int shift = top > kNegligible ? WideShift(q, steps, d, top) : 0;
    const float levels = kQueryLevels * float(1 << shift);
    const VecF inverse = SetF(top > kNegligible ? levels / top : 0.0f);
    int8_t* q_high = s.q_high + size_t(r) * d;
    VecI total{};
    for (int c = 0; c < d; c += kLanes) {
      const VecI x = RoundToInt(LoadF(q + c) * LoadF(steps + c) * inverse);
      const VecI high = (x + 128) >> 8;
      StoreBytes(q_high + c, high);
      StoreBytes(s.q_low + size_t(r) * d + c, x - (high << 8));
      total += x;
    }
    int wides = 0;
    for (int c = 0; shift > 0 && c < d; c += 4) {
      uint32_t word;
      __builtin_memcpy(&word, q_high + c, 4);
      if (word != 0) s.q_wide[r * kWideMax + wides++] = c;
    }
    s.q_wides[r] = wides;
    int32_t sum = 0;
    KVMANAGER_UNROLL
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    s.q_start[r] = -128 * sum;
    s.q_unit[r] = top / levels * a.scale;
    s.q_offset[r] = ReduceAdd(offset) * a.scale;
  }
}

/// Channels first .. first + a.k_channels - 1 of the scores of a strip with codes `words`, kR rows from `row` on: to
/// scores [rows][64], which hold the sums of the channels before them.
template <int kR>
KVMANAGER_INLINE void Scores(const MillionArguments& a, int first, const uint32_t* words, float* scores, int row,
                             Ahead& ahead) {
  const MillionScratch s = a.scratch;
  const int d = a.head_dim, end = first + a.k_channels;
  const int8_t* q_high = s.q_high + size_t(row) * d;
  const int8_t* q_low = s.q_low + size_t(row) * d;
  for (int t = 0; t < kTokens; t += kKVectors * kLanes) {
    float* out = scores + size_t(row) * kTokens + t;
    VecI dot[kR][kKVectors] = {};
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const int wides = s.q_wides[row + r];
      if (__builtin_expect(wides == 0, 1)) continue;
      for (int i = 0; i < wides; ++i) {
        const int c = s.q_wide[(row + r) * kWideMax + i];
        if (c < first || c >= end) continue;
        const VecU q1 = Broadcast4(q_high + size_t(r) * d + c);
        KVMANAGER_UNROLL
        for (int v = 0; v < kKVectors; ++v) {
          dot[r][v] = Dot4(dot[r][v], LoadU(words + size_t(c - first) / 4 * kTokens + t + v * kLanes), q1);
        }
      }
      KVMANAGER_UNROLL
      for (int v = 0; v < kKVectors; ++v) dot[r][v] = (VecI)((VecU)dot[r][v] << 8);
    }
    if (first > 0) {
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        KVMANAGER_UNROLL
        for (int v = 0; v < kKVectors; ++v) dot[r][v] += (VecI)LoadF(out + r * kTokens + v * kLanes);
      }
    }
    const uint32_t* at = words + t;
    for (int c = first; c < end; c += 4, at += kTokens) {
      PrefetchStep(ahead);
      VecU code[kKVectors];
      KVMANAGER_UNROLL
      for (int v = 0; v < kKVectors; ++v) code[v] = LoadU(at + v * kLanes);
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) {
        const VecU q0 = Broadcast4(q_low + size_t(r) * d + c);
        KVMANAGER_UNROLL
        for (int v = 0; v < kKVectors; ++v) dot[r][v] = Dot4(dot[r][v], code[v], q0);
      }
    }
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const VecF unit = SetF(s.q_unit[row + r]), offset = SetF(s.q_offset[row + r]);
      const VecU start = SetU(uint32_t(s.q_start[row + r]));
      KVMANAGER_UNROLL
      for (int v = 0; v < kKVectors; ++v) {
        // The sum fits 32 bits: at most 128 * (256 * 127 + 4 * 32512).
        const VecI sum = (VecI)((VecU)dot[r][v] + start);
        StoreF(out + r * kTokens + v * kLanes, end < d ? (VecF)dot[r][v] : MulAdd(ToF(sum), unit, offset));
      }
    }
  }
}

/// The running maxima of kR rows after strip `strip` of the group, its own in p_unit, and what growth does to the
/// state.
template <int kR>
KVMANAGER_INLINE void RaiseMaximum(const MillionArguments& a, int strip, int row) {
  const size_t at = size_t(strip) * a.rows + row;
  VecF top[4] = {};
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    const float* score = a.scratch.scores + (at + r) * kTokens;
    top[r] = LoadF(score);
    KVMANAGER_UNROLL
    for (int t = kLanes; t < kTokens; t += kLanes) top[r] = MaxF(top[r], LoadF(score + t));
  }
  const Vec4 strip_max = ReduceMaxRows(top);
  StoreRows<kR>(a.scratch.p_unit + at, strip_max);
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    float factor = 1;
    if (__builtin_expect(strip_max[r] > a.max[row + r], 0)) {
      factor = ExpNegativeScalar(a.max[row + r] - strip_max[r]);
      a.max[row + r] = strip_max[r];
      a.sum[row + r] *= factor;
    }
    a.scratch.rescale[at + r] = factor;
  }
}

/// Probabilities of kR rows, rounded to 8 bits of the strip's largest.
template <int kR>
KVMANAGER_INLINE void Softmax(const MillionArguments& a, int strip, int row) {
  const MillionScratch s = a.scratch;
  const size_t at = size_t(strip) * a.rows + row;
  const Vec4 max = LoadRows<kR>(a.max + row);
  // The same function of the same score, so that it is the largest probability to the bit.
  const Vec4 p_max = NarrowRows(ExpNegative(WidenRows(LoadRows<kR>(s.p_unit + at) - max)));
  const Vec4 inverse = p_max > kNegligible ? 255.0f / p_max : Vec4{};
  StoreRows<kR>(s.p_unit + at, p_max * (1 / 255.0f));
  VecF sum[4] = {}, totals[4] = {};
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    const float* score = s.scores + (at + r) * kTokens;
    uint8_t* p8 = s.p8 + (at + r) * kTokens;
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
  StoreRows<kR>(s.p_sum + at, ReduceAddRows(totals));
  StoreRows<kR>(a.sum + row, LoadRows<kR>(a.sum + row) + ReduceAddRows(sum));
}

/// Vector v of a strip's probabilities as V's codes lie: every word of four tokens once for each of four channels.
KVMANAGER_INLINE VecU SpreadP(const uint8_t* p8, int v) {
#if defined(KVMANAGER_ISA_AVX512)
  const __m512i order =
      _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_set1_epi32(4 * v));
  return (VecU)_mm512_permutexvar_epi32(order, _mm512_load_si512(p8));
#elif defined(KVMANAGER_ISA_AVX2)
  const VecU low = Broadcast4(p8 + 8 * v), high = Broadcast4(p8 + 8 * v + 4);
  return (VecU)_mm256_blend_epi32((__m256i)low, (__m256i)high, 0xf0);
#else
  return Broadcast4(p8 + 4 * v);
#endif
}

/// Half of a sum of quarters, four lanes each: the first half of the result is of a, the other of b.
KVMANAGER_INLINE VecI SumHalves(VecI a, VecI b) {
#if defined(KVMANAGER_ISA_AVX512)
  return (VecI)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88) +
         (VecI)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd);
#elif defined(KVMANAGER_ISA_AVX2)
  return (VecI)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x20) +
         (VecI)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x31);
#else
  return a;
#endif
}

/// acc += p (mid + step * code) over channels first .. first + a.v_channels - 1 of a strip with codes `words`, for kR
/// rows from `row` on.
template <int kR>
KVMANAGER_INLINE void AddValues(const MillionArguments& a, int first, const uint32_t* words, int strip, int row,
                                Ahead& ahead) {
  const MillionScratch s = a.scratch;
  const int d = a.head_dim, end = first + a.v_channels;
  const size_t at = size_t(strip) * a.rows + row;
  VecU p[kR][kVVectors];
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    const float factor = s.rescale[at + r];
    if (__builtin_expect(factor != 1, 0)) {
      float* acc = a.acc + size_t(row + r) * d;
      for (int c = first; c < end; c += kLanes) StoreF(acc + c, LoadF(acc + c) * factor);
    }
    KVMANAGER_UNROLL
    for (int v = 0; v < kVVectors; ++v) p[r][v] = SpreadP(s.p8 + (at + r) * kTokens, v);
  }
  // Quarters' sums of kLanes / 4 groups of four channels become one vector of kLanes channels, as soon as there are
  // two.
  for (int c = first; c < end; c += kLanes) {
    PrefetchStep(ahead);
    VecI sum[kR][2];
    KVMANAGER_UNROLL
    for (int half = 0; half < (kQuarters + 1) / 2; ++half) {
      VecI dot[2][kR] = {};
      KVMANAGER_UNROLL
      for (int i = 0; i < (kQuarters > 1 ? 2 : 1); ++i, words += kTokens) {
        KVMANAGER_UNROLL
        for (int v = 0; v < kVVectors; ++v) {
          const VecU code = LoadU(words + v * kLanes);
          KVMANAGER_UNROLL
          for (int r = 0; r < kR; ++r) dot[i][r] = Dot4(dot[i][r], p[r][v], code);
        }
      }
      KVMANAGER_UNROLL
      for (int r = 0; r < kR; ++r) sum[r][half] = SumHalves(dot[0][r], dot[1][r]);
    }
    const VecF step = LoadF(a.v_table->step + c), mid = LoadF(a.v_table->mid + c);
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      float* acc = a.acc + size_t(row + r) * d + c;
      const VecI total = kQuarters > 2 ? SumHalves(sum[r][0], sum[r][1]) : sum[r][0];
      const VecF x = MulAdd(step, ToF(total), mid * s.p_sum[at + r]);
      StoreF(acc, MulAdd(x, SetF(s.p_unit[at + r]), LoadF(acc)));
    }
  }
}

/// Record in which strip `i` lies of these pages, or of what comes after them; nullptr: unknown.
KVMANAGER_INLINE const uint8_t* RecordOf(const MillionArguments& a, size_t i) {
  const size_t page = i / a.strips;
  if (page < a.page_count) return a.pages[page] + a.record_offset;
  return page - a.page_count < a.next_count ? a.next_pages[page - a.page_count] + a.next_offset : nullptr;
}

/// Strip `i` of a side; nullptr: unknown.
KVMANAGER_INLINE const uint8_t* StripAt(const MillionArguments& a, const SideLayout& side, size_t i) {
  const uint8_t* record = RecordOf(a, i);
  return record == nullptr ? nullptr : record + side.offset + i % a.strips * side.strip_bytes;
}

void AttendGroup(const MillionArguments& a, size_t first, int count) {
  const int k_steps = (a.rows + kKRows - 1) / kKRows * (a.head_dim / 4) * (kTokens / (kKVectors * kLanes));
  const int v_steps = (a.rows + kVRows - 1) / kVRows * (a.head_dim / kLanes);
  const uint8_t *k[kGroupStrips], *v[kGroupStrips];
  Ahead next_k[kGroupStrips], next_v[kGroupStrips];
  for (int i = 0; i < count; ++i) {
    k[i] = StripAt(a, *a.k, first + i);
    v[i] = StripAt(a, *a.v, first + i);
    next_k[i] = MakeAhead(StripAt(a, *a.k, first + count + i), a.k->strip_bytes, k_steps);
    next_v[i] = MakeAhead(StripAt(a, *a.v, first + count + i), a.v->strip_bytes, v_steps);
  }
  for (int c = 0; c < a.head_dim; c += a.k_channels) {
    const uint32_t* words = a.scratch.words;
    a.look_up_k(*a.k, *a.k_table, c, a.k_channels, k, count, a.scratch.words);
    for (int i = 0; i < count; ++i, words += StripWords(a.k_channels)) {
      float* scores = a.scratch.scores + size_t(i) * a.rows * kTokens;
      ForRows<kKRows>(a.rows, [&](auto rows, int row) { Scores<rows.value>(a, c, words, scores, row, next_k[i]); });
    }
  }
  for (int i = 0; i < count; ++i) {
    ForRows<4>(a.rows, [&](auto rows, int row) { RaiseMaximum<rows.value>(a, i, row); });
    ForRows<4>(a.rows, [&](auto rows, int row) { Softmax<rows.value>(a, i, row); });
  }
  for (int c = 0; c < a.head_dim; c += a.v_channels) {
    const uint32_t* words = a.scratch.words;
    a.look_up_v(*a.v, *a.v_table, c, a.v_channels, v, count, a.scratch.words);
    for (int i = 0; i < count; ++i, words += StripWords(a.v_channels)) {
      ForRows<kVRows>(a.rows, [&](auto rows, int row) { AddValues<rows.value>(a, c, words, i, row, next_v[i]); });
    }
  }
}

void Attend(const MillionArguments& a) {
  FoldQueries(a);
  const size_t strips = a.page_count * a.strips;
  for (size_t i = 0; i < strips; i += kGroupStrips) {
    AttendGroup(a, i, strips - i < kGroupStrips ? int(strips - i) : kGroupStrips);
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
