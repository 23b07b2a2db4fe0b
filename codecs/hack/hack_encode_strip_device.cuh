// Encoding of one side of one head of a page where a page is one strip and one partition of 64 tokens: the common case.
//
// A block has a thread per channel. Twice it divides the elements otherwise:
//   - as *tasks*, the 32 codes that make whole words (Words), two per thread: it reads its 64 elements into registers
//   at
//     once, finds the ranges from them, and codes and packs them. K: 8 channels of tokens 16 i + 2 rr + {0, 1}, 16
//     bytes per load; V: 2 channels of tokens 16 i + 8 h + {0..7}, whole rows per warp.
//   - a channel each, for metadata, and for sums whose order matters (least squares, means).
// Where rows are rotated or have norms (kInRows), they become floats in shared memory first, from where ranges and codes
// are read: a channel's range is then found by its thread.
// The encoded side is put together in shared memory and leaves in rows of 16 bytes.
#pragma once

#include "codecs/hack/hack_codes_device.cuh"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/hack/hack_rows_device.cuh"

namespace kvmanager::hack::device {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kTokens = kStripTokens;
/// Elements of a channel per turn of a loop of the least-squares fit.
inline constexpr int kFitUnroll = 16;

template <int kDim>
struct StripMemory {
  static constexpr int kWarps = kDim / 32;
  uint32_t least[kWarps][kDim / 2];  // of pairs of channels
  uint32_t largest[kWarps][kDim / 2];
  uint32_t tops[2][kWarps];
  float minimum[kDim];
  float inverse[kDim];
};
/// Of the 60 tries of the least-squares grid.
template <int kDim>
struct FitMemory {
  uint32_t metas[RangeGrid::kTries][kDim];  // a channel's fp16 minimum and step; later the estimate of its least error
  float2 tops[RangeGrid::kTries];           // step, minimum; infinite: the try does not fit
  /// 255 / top step, 127 / top minimum, top step / 255, top minimum / 127. Not numbers where the try does not fit.
  float4 scales[RangeGrid::kTries];
};

/// How a thread's tasks lie, for either side.
template <int kDim, bool kIsV>
struct Tasks {
  static constexpr int kRanges = kIsV ? 2 : kDim / 32;  // partial ranges per channel
  int segment, h, r;                                    // of the first task; the second has r + 1
  int pair;                                             // first pair of channels
  int group;                                            // which partial range this thread's warp gives
  int token;                                            // K: r; V: 8 h

  __device__ __forceinline__ Tasks() {
    const int t = threadIdx.x;
    if constexpr (kIsV) {
      pair = t % (kDim / 2), h = t / (kDim / 2);
      segment = pair / 8, r = pair % 8 * 2, group = h, token = 8 * h;
    } else {
      const int eight = t % (kDim / 8);
      pair = 4 * eight, segment = eight / 2, h = eight % 2, r = t / (kDim / 8) * 2, group = t / 32, token = r;
    }
  }
};

/// V: [i][k], pairs of channels. K: [q][i][pair of 8 channels].
template <int kDim, bool kIsV>
__device__ __forceinline__ void LoadTasks(const uint8_t* raw, const Tasks<kDim, kIsV>& tasks, uint32_t (&x)[32]) {
  const uint8_t* from = raw + (tasks.token * kDim + 2 * tasks.pair) * 2;
  if constexpr (kIsV) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      x[n] = *reinterpret_cast<const uint32_t*>(from + (n / 8 * 16 + n % 8) * kDim * 2);
    }
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + (n % 4 * 16 + n / 4) * kDim * 2);
      x[4 * n] = v.x, x[4 * n + 1] = v.y, x[4 * n + 2] = v.z, x[4 * n + 3] = v.w;
    }
  }
}

/// Partial ranges of the thread's channels, to shared memory.
template <int kDim, bool kBFloat16, bool kIsV>
__device__ __forceinline__ void FindRanges(const Tasks<kDim, kIsV>& tasks, const uint32_t (&x)[32],
                                           StripMemory<kDim>& memory) {
  using P = Pair<kBFloat16>;
  constexpr int kPairs = kIsV ? 1 : 4;
  uint32_t lo[kPairs], hi[kPairs];
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    lo[c] = hi[c] = x[c];
#pragma unroll
    for (int n = c + kPairs; n < 32; n += kPairs) lo[c] = P::Min(lo[c], x[n]), hi[c] = P::Max(hi[c], x[n]);
#pragma unroll
    for (int lanes = kIsV ? 32 : kDim / 8; lanes < 32; lanes *= 2) {
      lo[c] = P::Min(lo[c], __shfl_xor_sync(kAllLanes, lo[c], lanes));
      hi[c] = P::Max(hi[c], __shfl_xor_sync(kAllLanes, hi[c], lanes));
    }
  }
  if (kIsV || threadIdx.x % 32 < kDim / 8) {
#pragma unroll
    for (int c = 0; c < kPairs; ++c) {
      memory.least[tasks.group][tasks.pair + c] = lo[c];
      memory.largest[tasks.group][tasks.pair + c] = hi[c];
    }
  }
}

/// This thread's channel from the partial ranges.
template <int kDim, bool kBFloat16, int kRanges>
__device__ __forceinline__ void ReadRange(const StripMemory<kDim>& memory, float* lo, float* hi) {
  using P = Pair<kBFloat16>;
  const int channel = threadIdx.x;
  uint32_t least = reinterpret_cast<const uint16_t*>(memory.least[0])[channel];
  uint32_t largest = reinterpret_cast<const uint16_t*>(memory.largest[0])[channel];
#pragma unroll
  for (int n = 1; n < kRanges; ++n) {
    least = P::Min(least, reinterpret_cast<const uint16_t*>(memory.least[n])[channel]);
    largest = P::Max(largest, reinterpret_cast<const uint16_t*>(memory.largest[n])[channel]);
  }
  *lo = P::ToFloat(uint16_t(least)) + 0.f, *hi = P::ToFloat(uint16_t(largest)) + 0.f;
}

/// A channel's elements, for sums whose order matters.
template <int kDim, bool kBFloat16>
struct RawElements {
  const uint16_t* x;
  __device__ __forceinline__ float operator[](int i) const { return Pair<kBFloat16>::ToFloat(x[i * kDim]); }
};
template <int kDim>
struct RowElements {
  const float* x;
  __device__ __forceinline__ float operator[](int i) const { return x[i * StripRows<kDim>::kPitch]; }
};

/// An exact error is found only for tries that may be the best. For 1 bit, codes are split at a threshold that lies
/// near mid + half * shift for every width, so that counts and sums about 5 thresholds give the error of 60 tries, up
/// to what elements near the threshold and rounding can change: a try whose error is above another's by more than that
/// is not the best.
struct OneBitEstimate {
  static constexpr int kShifts = 5;
  float threshold[kShifts];
  float sum[kShifts];    // of x - mid above the threshold
  float count[kShifts];  // of elements above it, and kNear for each within `reach` of it
  float reach;
  float total, squares;  // of x - mid, of all elements
  float mid;
  float size;   // |x - mid|, and the distances from mid of a try's two values, are at most this
  float slack;  // what rounding can change in an error, here and where it is computed exactly
  static constexpr float kNear = 256;

  template <class Elements>
  __device__ __forceinline__ void Make(const Elements& x, float mid_, float half, float reach_) {
    mid = mid_, reach = reach_;
    total = squares = 0;
#pragma unroll
    for (int s = 0; s < kShifts; ++s) {
      // The middles of the grid's last row.
      const int k = RangeGrid::kTries - kShifts + s;
      threshold[s] = mid + half * (0.5f * (kRangeGrid.below[k] + kRangeGrid.above[k]));
      sum[s] = count[s] = 0;
    }
#pragma unroll kFitUnroll
    for (int i = 0; i < kTokens; ++i) {
      const float value = x[i], y = value - mid;
      total += y, squares = __fmaf_rn(y, y, squares);
#pragma unroll
      for (int s = 0; s < kShifts; ++s) {
        const float above = value - threshold[s];
        if (above > 0) sum[s] += y, count[s] += 1;
        if (fabsf(above) <= reach) count[s] += kNear;
      }
    }
    // Twice each for sums of 64 terms of at most size^2, a metadata value within 2^-21 of itself, and a code whose
    // level is within rounding of 1/2.
    size = 1.2f * half + 4 * reach;
    const float magnitude = 2 * fabsf(mid) + 4 * size;
    slack = 0x1p-8f * size * size + 0x1p-11f * size * magnitude + 0x1p-33f * magnitude * magnitude + 0x1p-130f;
  }

  /// Of a try with shift s and metadata within 2^-21 of m: its error is at most `error` + slack and at least *least -
  /// slack, unless this returns false.
  __device__ __forceinline__ bool Bound(int s, const Meta& m, float* error, float* least) const {
    const float near = floorf(count[s] * (1 / kNear)), above = count[s] - kNear * near;
    const float lower = m.minimum - mid, upper = lower + m.step;
    const float below = __fmaf_rn(kTokens - above, lower, -2 * (total - sum[s]));
    *error = __fmaf_rn(lower, below, __fmaf_rn(upper, __fmaf_rn(above, upper, -2 * sum[s]), squares));
    // Elements between the two thresholds are nearer to the other value than was counted, by at most 2 step * gap.
    const float gap = fabsf(__fmaf_rn(0.5f, m.step, m.minimum) - threshold[s]);
    *least = __fmaf_rn(near * -2.02f * m.step, gap, *error);
    return gap <= 0.98f * reach && fmaxf(fabsf(lower), fabsf(upper)) <= size;
  }
};

/// Bounds of try k.
__device__ __forceinline__ Meta TryOf(int k, int width, float mid, float half, float mean, bool* bad) {
  const float lo = width == 0 ? mean : mid + half * kRangeGrid.below[k];
  return RoundBounds(width, lo, mid + half * kRangeGrid.above[k], bad);
}

/// Fills all of memory. All threads of the block; the caller synchronises.
template <int kDim>
__device__ __forceinline__ void MakeTries(int width, float mid, float half, float mean, FitMemory<kDim>& memory) {
  constexpr uint32_t kHalfInfinity = 0x7c00;
  constexpr int kWarps = kDim / 32, kTries = RangeGrid::kTries;
  const int channel = threadIdx.x, warp = channel / 32, lane = channel % 32;
  const auto store = [&](int k, const Meta& m, bool bad) {
    memory.metas[k][channel] = ToHalfBits(m.minimum) | (bad ? kHalfInfinity : ToHalfBits(m.step)) << 16;
  };
  if (__all_sync(kAllLanes, width == 1)) {
#pragma unroll 4
    for (int k = 0; k < kTries; ++k) {
      bool bad = false;
      const Meta m = TryOf(k, 1, mid, half, mean, &bad);
      store(k, m, bad);
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < kTries; ++k) {
      bool bad = false;
      const Meta m = TryOf(k, width, mid, half, mean, &bad);
      store(k, m, bad);
    }
  }
  __syncthreads();
  for (int k = warp; k < kTries; k += kWarps) {
    __half2 tops = __float2half2_rn(0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      tops = __hmax2_nan(tops, __habs2(Pair<false>::As(memory.metas[k][32 * w + lane])));
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      tops = __hmax2_nan(tops, Pair<false>::As(__shfl_xor_sync(kAllLanes, Pair<false>::Bits(tops), lanes)));
    }
    if (lane == 0) memory.tops[k] = {__high2float(tops), __low2float(tops)};
  }
  __syncthreads();
  if (channel < kTries) {
    const float infinity = __uint_as_float(kInfinityBits), not_a_number = __uint_as_float(0x7fc00000);
    const float step = memory.tops[channel].x, minimum = memory.tops[channel].y;
    if (step < infinity && minimum < infinity) {
      memory.scales[channel] = {step > 0 ? 255.f / step : 0.f, minimum > 0 ? 127.f / minimum : 0.f, step / 255.f,
                                minimum / 127.f};
    } else {
      memory.tops[channel] = {infinity, infinity};
      memory.scales[channel] = {not_a_number, not_a_number, not_a_number, not_a_number};
    }
  }
}

/// The least-squares range of this thread's channel, if it takes one: *lo, *hi, which come as the whole range. All
/// threads of the block; x: the channel's elements.
template <int kDim, class Elements>
__device__ __forceinline__ void FitRange(const HackDeviceShape& shape, const HackDeviceSide& side, const Elements& x,
                                         int width, float mean, FitMemory<kDim>& memory, float* lo, float* hi) {
  constexpr int kTries = RangeGrid::kTries, kShifts = OneBitEstimate::kShifts;
  const int channel = threadIdx.x;
  const bool wanted = side.least_squares >> (channel / kSegmentChannels) & 1;
  const float mid = (*lo + *hi) / 2.f, half = (*hi - *lo) / 2.f;
  const float infinity = __uint_as_float(kInfinityBits);
  MakeTries(width, mid, half, mean, memory);
  __syncthreads();
  if (!__any_sync(kAllLanes, wanted)) return;

  const bool one_bit = __all_sync(kAllLanes, !wanted || width == 1);
  uint64_t open = wanted ? (uint64_t{1} << kTries) - 1 : 0;
  if (one_bit) {
    // How far rounding to the tops may move a threshold; the last row's tops are the largest, but for rounding.
    const float2 tops = memory.tops[kTries - kShifts];
    const float reach = shape.meta8 ? 1.3f * (tops.y / 254.f + tops.x / 1020.f) : 0x1p-9f * (fabsf(mid) + half);
    OneBitEstimate estimate;
    estimate.Make(x, mid, half, reach);
    float best = infinity;
#pragma unroll 1
    for (int row = 0; row < kTries; row += kShifts) {
#pragma unroll
      for (int s = 0; s < kShifts; ++s) {
        const uint32_t bits = memory.metas[row + s][channel];
        Meta m = {HalfBitsToFloat(bits >> 16), HalfBitsToFloat(bits & 0xffff)};
        bool sure = true;
        if (shape.meta8) {
          // As RoundToTops, by products: unsure where those are too near to the middle between two integers.
          const float4 scale = memory.scales[row + s];
          const float u8 = m.step * scale.x, s8 = m.minimum * scale.y;
          const float u8_rounded = (u8 + 0x1.8p23f) - 0x1.8p23f, s8_rounded = (s8 + 0x1.8p23f) - 0x1.8p23f;
          sure = fmaxf(fabsf(u8 - u8_rounded), fabsf(s8 - s8_rounded)) < 0.5f - 0x1p-13f;
          m.step = fmaxf(1.f, u8_rounded) * scale.z, m.minimum = s8_rounded * scale.w;
        }
        float error, least;
        sure &= estimate.Bound(s, m, &error, &least);
        best = sure ? fminf(best, error) : best;
        memory.metas[row + s][channel] = __float_as_uint(sure ? least : -infinity);
      }
    }
    // Bounds that are not numbers close nothing.
    best += 2 * estimate.slack;
    uint32_t closed[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < kTries; ++k) {
      if (__uint_as_float(memory.metas[k][channel]) > best) closed[k / 32] |= 1u << (k % 32);
    }
    open &= ~(uint64_t{closed[1]} << 32 | closed[0]);
  }

  float best = infinity;
  int found = -1;
  while (__any_sync(kAllLanes, open != 0)) {
    if (open == 0) continue;
    const int k = __ffsll(open) - 1;
    open &= open - 1;
    const float2 tops = memory.tops[k];
    if (!(tops.x < infinity)) continue;
    bool bad = false;
    Meta m = TryOf(k, width, mid, half, mean, &bad);
    if (shape.meta8) RoundToTops(width, tops.x, tops.y, &m);
    const float inverse = Inverse(m.step);
    float error = 0;
    if (one_bit) {
      const float upper = m.step + m.minimum;
#pragma unroll kFitUnroll
      for (int i = 0; i < kTokens; ++i) {
        const float value = x[i], above = value - m.minimum;
        const float off = above * inverse > 0.5f ? value - upper : above;
        error += off * off;
      }
    } else {
      const float levels = Levels(width);
#pragma unroll kFitUnroll
      for (int i = 0; i < kTokens; ++i) {
        const float value = x[i];
        const float code = Level(value, inverse, m.minimum, levels) + kRoundToInteger - kRoundToInteger;
        const float off = code * m.step + m.minimum - value;
        error += off * off;
      }
    }
    if (error < best) best = error, found = k;
  }
  if (found >= 0) {
    *lo = mid + half * kRangeGrid.below[found];
    *hi = mid + half * kRangeGrid.above[found];
  }
}

/// Metadata of this thread's channel, into the record and into memory; norm_top: of norms that are stored. false: the page is declined (all threads of the
/// block agree).
template <int kDim>
__device__ __forceinline__ bool MakeMeta(const HackDeviceShape& shape, const HackDeviceSide& side, int width, float lo,
                                         float hi, uint32_t norm_top, uint8_t* record, StripMemory<kDim>& memory) {
  const int channel = threadIdx.x;
  bool bad = !IsFinite(lo) || !IsFinite(hi);
  Meta m = RoundBounds(width, lo, hi, &bad);
  const uint32_t step = __reduce_max_sync(kAllLanes, __float_as_uint(m.step));
  const uint32_t minimum = __reduce_max_sync(kAllLanes, __float_as_uint(fabsf(m.minimum)));
  if (channel % 32 == 0) memory.tops[0][channel / 32] = step, memory.tops[1][channel / 32] = minimum;
  if (__syncthreads_or(bad)) return false;
  uint8_t* const steps = record + side.steps - side.begin;
  uint8_t* const minima = record + side.minima - side.begin;
  if (shape.meta8) {
    uint32_t top_step = memory.tops[0][0], top_minimum = memory.tops[1][0];
#pragma unroll
    for (int w = 1; w < kDim / 32; ++w) {
      top_step = max(top_step, memory.tops[0][w]), top_minimum = max(top_minimum, memory.tops[1][w]);
    }
    const float tops[2] = {__uint_as_float(top_step), __uint_as_float(top_minimum)};
    const StoredMeta stored = RoundToTops(width, tops[0], tops[1], &m);
    steps[channel] = uint8_t(stored.step), minima[channel] = uint8_t(stored.minimum);
    if (channel == 0) {
      *reinterpret_cast<uint4*>(record + side.tops - side.begin) = {
          uint32_t(ToHalfBits(tops[0])) | uint32_t(ToHalfBits(tops[1])) << 16, norm_top, 0, 0};
    }
  } else {
    reinterpret_cast<uint16_t*>(steps)[channel] = ToHalfBits(m.step);
    reinterpret_cast<uint16_t*>(minima)[channel] = ToHalfBits(m.minimum);
    if (side.norms != 0 && channel == 0) {
      *reinterpret_cast<uint4*>(record + side.tops - side.begin) = {norm_top, 0, 0, 0};
    }
  }
  memory.minimum[channel] = m.minimum;
  memory.inverse[channel] = Inverse(m.step);
  // The padding of the record's end, if it is this side's.
  const uint32_t minima_end = side.minima - side.begin + kDim * (shape.meta8 ? 1 : 2);
  const uint32_t end = side.norms != 0 ? side.norms - side.begin + kTokens : minima_end;
  const uint32_t bytes = side.end - side.begin;
  if (end + 4 * channel < bytes) *reinterpret_cast<uint32_t*>(record + end + 4 * channel) = 0;
  return true;
}

/// Codes of the thread's tasks, packed into the record. x(task, i, k): an element of a task (Words).
template <int kDim, bool kIsV, int kWidth, class Element>
__device__ __forceinline__ void PackTasks(const Tasks<kDim, kIsV>& tasks, const Element& x,
                                          const StripMemory<kDim>& memory, uint8_t* segment) {
  if constexpr (kWidth > 0) {
    constexpr int kChannels = kIsV ? 2 : 8;
    float minimum[kChannels], inverse[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      minimum[c] = memory.minimum[2 * tasks.pair + c], inverse[c] = memory.inverse[2 * tasks.pair + c];
    }
    const auto code = [&](int task, int i, int k) {
      const int channel = kIsV ? task : k;
      return __float_as_uint(Level(x(task, i, k), inverse[channel], minimum[channel], Levels(kWidth)) +
                             kRoundToInteger);
    };
    const Words<kWidth> first = Pack<kWidth>([&](int i, int k) { return code(0, i, k); });
    const Words<kWidth> second = Pack<kWidth>([&](int i, int k) { return code(1, i, k); });
    const uint32_t flip = kIsV && kWidth == 8 ? 0x80808080u : 0u;
    ForEachWord<kWidth>(tasks.h, tasks.r, [&](int at, auto word) {
      *reinterpret_cast<uint2*>(segment + at) = {word(first) ^ flip, word(second) ^ flip};
    });
  }
}

/// Packs all tasks and stores the side.
template <int kDim, bool kIsV, class Element>
__device__ __forceinline__ void PackSide(const HackDeviceSide& side, const Tasks<kDim, kIsV>& tasks, const Element& x,
                                         const StripMemory<kDim>& memory, uint8_t* record, uint8_t* to) {
  uint8_t* const segment = record + side.segment_offset[tasks.segment];
  WithWidth(side.segment_bits[tasks.segment],
            [&](auto w) { PackTasks<kDim, kIsV, decltype(w)::value>(tasks, x, memory, segment); });
  __syncthreads();
  const uint32_t bytes = side.end - side.begin;
  for (uint32_t at = 16 * threadIdx.x; at < bytes; at += 16 * kDim) {
    *reinterpret_cast<uint4*>(to + side.begin + at) = *reinterpret_cast<const uint4*>(record + at);
  }
}

template <int kDim, bool kBFloat16, bool kFit, bool kIsV>
__device__ __forceinline__ bool EncodeStrip(const HackDeviceShape& shape, const HackDeviceSide& side,
                                            const uint8_t* raw, uint8_t* to, uint8_t* record, StripMemory<kDim>& memory,
                                            FitMemory<kDim>* fit) {
  const Tasks<kDim, kIsV> tasks;
  uint32_t x[32];
  LoadTasks(raw, tasks, x);
  const int channel = threadIdx.x;
  const int width = side.segment_bits[channel / kSegmentChannels];
  FindRanges<kDim, kBFloat16>(tasks, x, memory);
  __syncthreads();
  float lo, hi;
  ReadRange<kDim, kBFloat16, Tasks<kDim, kIsV>::kRanges>(memory, &lo, &hi);
  const RawElements<kDim, kBFloat16> elements = {reinterpret_cast<const uint16_t*>(raw) + channel};
  float mean = 0;
  if (width == 0) {
    for (int i = 0; i < kTokens; ++i) mean += elements[i] + 0.f;
    mean /= float(kTokens);
  }
  if constexpr (kFit) {
    if (side.least_squares != 0) FitRange<kDim>(shape, side, elements, width, mean, *fit, &lo, &hi);
  }
  // A mean of elements that are not finite is not: the range of width 0 needs no look of its own.
  if (!MakeMeta(shape, side, width, width == 0 ? mean : lo, width == 0 ? mean : hi, 0, record, memory)) return false;
  __syncthreads();
  if constexpr (kFit) LoadTasks(raw, tasks, x);
  const auto element = [&](int task, int i, int k) {
    const float2 two = Pair<kBFloat16>::ToFloats(kIsV ? x[8 * i + k] : x[16 * task + 4 * i + k / 2]);
    return (kIsV ? task : k) % 2 ? two.y : two.x;
  };
  PackSide<kDim, kIsV>(side, tasks, element, memory, record, to);
  return true;
}

/// The side's rows into shared memory: rotated where they are, and without their norms where those are stored. false:
/// the page is declined (all threads of the block agree). *norm_top: fp16 bits. The caller synchronises.
template <int kDim, bool kBFloat16>
__device__ __forceinline__ bool MakeRows(const HackDeviceShape& shape, const HackDeviceSide& side, const uint8_t* raw,
                                         float* rows, uint8_t* record, StripMemory<kDim>& memory, uint32_t* norm_top) {
  using Rows = StripRows<kDim>;
  const Rows place;
  float x[Rows::kGroups][16], largest[Rows::kGroups];
  bool bad = false;
#pragma unroll
  for (int group = 0; group < Rows::kGroups; ++group) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint2 four = *reinterpret_cast<const uint2*>(raw + (place.Token(group) * kDim + place.Channel(j)) * 2);
      const float2 a = Pair<kBFloat16>::ToFloats(four.x), b = Pair<kBFloat16>::ToFloats(four.y);
      x[group][4 * j] = a.x + 0.f, x[group][4 * j + 1] = a.y + 0.f;
      x[group][4 * j + 2] = b.x + 0.f, x[group][4 * j + 3] = b.y + 0.f;
    }
  }
#pragma unroll
  for (int group = 0; group < Rows::kGroups; ++group) {
    if (shape.hadamard) Rows::Rotate(x[group], shape.rotation_norm);
    largest[group] = 0;
#pragma unroll
    for (const float value : x[group]) bad |= !IsFinite(value), largest[group] = fmaxf(largest[group], fabsf(value));
  }
  if (side.norms != 0) {
    float of_warp = 0;
#pragma unroll
    for (float& of_row : largest) of_row = Rows::MaxOfRow(of_row), of_warp = fmaxf(of_warp, of_row);
    const uint32_t bits = __reduce_max_sync(kAllLanes, __float_as_uint(of_warp));
    if (threadIdx.x % 32 == 0) memory.tops[0][threadIdx.x / 32] = bits;
    __syncthreads();
    uint32_t of_page = memory.tops[0][0];
#pragma unroll
    for (int w = 1; w < kDim / 32; ++w) of_page = max(of_page, memory.tops[0][w]);
    *norm_top = RoundUpToHalf(__uint_as_float(of_page));
    const float top = HalfBitsToFloat(*norm_top);
    bad |= !IsFinite(top);
    uint8_t* const norms = record + side.norms - side.begin;
#pragma unroll
    for (int group = 0; group < Rows::kGroups; ++group) {
      const TokenNorm norm = MakeNorm(largest[group], top);
      if (place.lane == 0) norms[place.Token(group)] = uint8_t(norm.stored);
#pragma unroll
      for (float& value : x[group]) value = value * norm.inverse + 0.f;
    }
  }
#pragma unroll
  for (int group = 0; group < Rows::kGroups; ++group) place.Write(x[group], place.Token(group), rows);
  return !__syncthreads_or(bad);
}

template <int kDim, bool kBFloat16, bool kFit, bool kIsV>
__device__ __forceinline__ bool EncodeRows(const HackDeviceShape& shape, const HackDeviceSide& side,
                                           const uint8_t* raw, uint8_t* to, uint8_t* record, float* rows,
                                           StripMemory<kDim>& memory, FitMemory<kDim>* fit) {
  constexpr int kPitch = StripRows<kDim>::kPitch;
  uint32_t norm_top = 0;
  if (!MakeRows<kDim, kBFloat16>(shape, side, raw, rows, record, memory, &norm_top)) return false;
  const int channel = threadIdx.x;
  const int width = side.segment_bits[channel / kSegmentChannels];
  const RowElements<kDim> elements = {rows + channel};
  float lo = elements[0], hi = lo, mean = 0;
#pragma unroll 16
  for (int i = 0; i < kTokens; ++i) {
    const float value = elements[i];
    lo = fminf(lo, value), hi = fmaxf(hi, value), mean += value;
  }
  mean /= float(kTokens);
  if constexpr (kFit) {
    if (side.least_squares != 0) FitRange<kDim>(shape, side, elements, width, mean, *fit, &lo, &hi);
  }
  if (!MakeMeta(shape, side, width, width == 0 ? mean : lo, width == 0 ? mean : hi, norm_top, record, memory)) {
    return false;
  }
  __syncthreads();
  const Tasks<kDim, kIsV> tasks;
  const float* const from = rows + tasks.token * kPitch + 2 * tasks.pair;
  float x[64];
  if constexpr (kIsV) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(from + (n / 8 * 16 + n % 8) * kPitch);
      x[2 * n] = two.x, x[2 * n + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int n = 0; n < 16; ++n) {  // [q][i][four of 8 channels]
      const float4 four = *reinterpret_cast<const float4*>(from + (n / 2 % 4 * 16 + n / 8) * kPitch + n % 2 * 4);
      x[4 * n] = four.x, x[4 * n + 1] = four.y, x[4 * n + 2] = four.z, x[4 * n + 3] = four.w;
    }
  }
  const auto element = [&](int task, int i, int k) {
    return x[kIsV ? 2 * (8 * i + k) + task : 32 * task + 8 * i + k];
  };
  PackSide<kDim, kIsV>(side, tasks, element, memory, record, to);
  return true;
}

/// Blocks: [item][side of `sides` from first_side on][head]. Shared memory: with kInRows rows first; a side's record.
template <int kDim, bool kBFloat16, bool kFit, bool kInRows>
__global__ void __launch_bounds__(kDim, (kInRows ? 512 : kFit ? 768 : 1024) / kDim)
    EncodeStripKernel(const HackDeviceShape shape, const HackDeviceHead* __restrict__ table,
                      const DeviceEncodeItem* __restrict__ items, uint32_t* declined, int first_side, int sides) {
  extern __shared__ __align__(16) uint8_t dynamic[];
  __shared__ StripMemory<kDim> memory;
  FitMemory<kDim>* fit = nullptr;
  if constexpr (kFit) {
    __shared__ FitMemory<kDim> fit_memory;
    fit = &fit_memory;
  }
  const uint32_t head = blockIdx.x % shape.kv_heads, rest = blockIdx.x / shape.kv_heads;
  const int side = first_side + rest % sides;
  const uint32_t item = rest / sides;
  const HackDeviceHead* const heads = shape.heads_of(table, items[item].layer);
  const uint8_t* const raw = items[item].raw + shape.raw_offset(side, head);
  uint8_t* const to = items[item].encoded + heads[head].offset;
  const HackDeviceSide& layout = heads[head].side[side];
  bool encoded;
  if constexpr (kInRows) {
    float* const rows = reinterpret_cast<float*>(dynamic);
    uint8_t* const record = dynamic + sizeof(float) * StripRows<kDim>::kFloats;
    encoded = side == 0
                  ? EncodeRows<kDim, kBFloat16, kFit, false>(shape, layout, raw, to, record, rows, memory, fit)
                  : EncodeRows<kDim, kBFloat16, kFit, true>(shape, layout, raw, to, record, rows, memory, fit);
  } else {
    encoded = side == 0 ? EncodeStrip<kDim, kBFloat16, kFit, false>(shape, layout, raw, to, dynamic, memory, fit)
                        : EncodeStrip<kDim, kBFloat16, kFit, true>(shape, layout, raw, to, dynamic, memory, fit);
  }
  if (!encoded && threadIdx.x == 0) declined[item] = 1;
}

}  // namespace kvmanager::hack::device
