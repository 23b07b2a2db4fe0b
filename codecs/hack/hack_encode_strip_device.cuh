// Encoding of one side of one head of a page where a page is one strip and one partition of 64 tokens: the common case.
//
// A block has a thread per channel. Twice it divides the elements otherwise:
//   - as *tasks*, the 32 codes that make whole words (Words), two per thread: it reads its 64 elements into registers
//     at once, finds the ranges from them, and codes and packs them. K: 8 channels of tokens 16 i + 2 rr + {0, 1}, 16
//     bytes per load; V: 2 channels of tokens 16 i + 8 h + {0..7}, whole rows per warp.
//   - a channel each, for metadata, and for sums whose order matters (least squares, means).
// Where rows are rotated or have norms (kInRows), they become floats in shared memory first, from where ranges and
// codes are read: a channel's range is then found by its thread. The encoded side is put together in shared memory and
// leaves in rows of 16 bytes.
#pragma once

#include "codecs/hack/hack_codes_device.cuh"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/hack/hack_fit_device.cuh"
#include "codecs/hack/hack_rows_device.cuh"

namespace kvmanager::hack::device {

template <int kDim>
struct StripMemory {
  static constexpr int kWarps = kDim / 32;
  uint32_t least[kWarps][kDim / 2];  // of pairs of channels
  uint32_t largest[kWarps][kDim / 2];
  uint32_t tops[2][kWarps];
  float minimum[kDim];
  float inverse[kDim];
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

/// Metadata of this thread's channel, into the record and into memory; norm_top: of norms that are stored. false: the
/// page is declined (all threads of the block agree).
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
__device__ __forceinline__ bool EncodeRows(const HackDeviceShape& shape, const HackDeviceSide& side, const uint8_t* raw,
                                           uint8_t* to, uint8_t* record, float* rows, StripMemory<kDim>& memory,
                                           FitMemory<kDim>* fit) {
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
  const auto element = [&](int task, int i, int k) { return x[kIsV ? 2 * (8 * i + k) + task : 32 * task + 8 * i + k]; };
  PackSide<kDim, kIsV>(side, tasks, element, memory, record, to);
  return true;
}

/// Blocks: [item][side of `sides` from first_side on][head]. Shared memory: with kInRows rows first; a side's record.
template <int kDim, bool kBFloat16, bool kFit, bool kInRows>
__global__ void __launch_bounds__(kDim, (kInRows ? 512
                                         : kFit  ? 768
                                                 : 1024) /
                                            kDim)
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
    encoded = side == 0 ? EncodeRows<kDim, kBFloat16, kFit, false>(shape, layout, raw, to, record, rows, memory, fit)
                        : EncodeRows<kDim, kBFloat16, kFit, true>(shape, layout, raw, to, record, rows, memory, fit);
  } else {
    encoded = side == 0 ? EncodeStrip<kDim, kBFloat16, kFit, false>(shape, layout, raw, to, dynamic, memory, fit)
                        : EncodeStrip<kDim, kBFloat16, kFit, true>(shape, layout, raw, to, dynamic, memory, fit);
  }
  if (!encoded && threadIdx.x == 0) declined[item] = 1;
}

}  // namespace kvmanager::hack::device
