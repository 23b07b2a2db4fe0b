// What the kernels of attention on HACK pages share: shapes that the compiler knows, loops over rows, the prefetch of
// what is read next, and a partition's metadata.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/hack/hack_attention_kernel.h"

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

}  // namespace
}  // namespace kvmanager::hack
