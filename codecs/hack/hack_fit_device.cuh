// Least-squares ranges of a strip's channels, a thread to each: the reference's choice among the grid's tries, most of
// which need not be tried.
#pragma once

#include "codecs/hack/hack_codes_device.cuh"
#include "codecs/hack/hack_rows_device.cuh"

namespace kvmanager::hack::device {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kTokens = kStripTokens;
/// Elements of a channel per turn of a loop of the least-squares fit.
inline constexpr int kFitUnroll = 16;

/// Of the 60 tries of the least-squares grid.
template <int kDim>
struct FitMemory {
  uint32_t metas[RangeGrid::kTries][kDim];  // a channel's fp16 minimum and step; later the estimate of its least error
  float2 tops[RangeGrid::kTries];           // step, minimum; infinite: the try does not fit
  /// 255 / top step, 127 / top minimum, top step / 255, top minimum / 127. Not numbers where the try does not fit.
  float4 scales[RangeGrid::kTries];
};

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

}  // namespace kvmanager::hack::device
