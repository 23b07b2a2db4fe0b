// Encoding of one side of one head for every set of parameters: plain and exact, through fp32 rows in shared memory.
//
// Words: an entry has its own step and minimum in each partition (hack_reference.h). A block takes a *chunk*: where
// partitions run along tokens, max(64, partition) tokens, whose metadata stands alone; where they run along channels,
// the whole side, whose entries share a pair of tops, 64 tokens at a time and read once per pass.
#pragma once

#include <algorithm>

#include "codecs/hack/hack_codes_device.cuh"
#include "codecs/hack/hack_encode_cuda.h"

namespace kvmanager::hack::device {

inline constexpr int kGeneralThreads = 256;

/// Sizes of a chunk and of what lies in shared memory; host and device agree on them.
struct GeneralShape {
  bool along_tokens;
  int chunks;       // of a page; each a block
  int tokens;       // of a block
  int tile_tokens;  // of these in shared memory at once
  int partitions;   // of a block
  int entries;      // per partition
  int pitch;        // of a row: odd, so that columns are free of bank conflicts

  __host__ __device__ GeneralShape(const HackDeviceShape& shape, int side)
      : along_tokens(side == 1 || shape.k_along_tokens) {
    const int strip_tokens = shape.partition > kStripTokens ? shape.partition : kStripTokens;
    tokens = along_tokens ? strip_tokens : shape.page_tokens;
    chunks = shape.page_tokens / tokens;
    tile_tokens = along_tokens ? tokens : kStripTokens;
    partitions = (along_tokens ? tokens : shape.head_dim) / shape.partition;
    entries = along_tokens ? shape.head_dim : shape.page_tokens;
    pitch = shape.head_dim + 1;
  }
  __host__ __device__ int metas() const { return partitions * entries; }
  __host__ __device__ size_t shared_bytes() const {
    return (size_t(tile_tokens) * pitch + 2 * metas()) * sizeof(float);
  }
};

/// x <- H x / sqrt(n), by one warp.
__device__ __forceinline__ void RotateRow(float* row, int n, float norm) {
  const int lane = threadIdx.x % 32;
  for (int stage = 0; 1 << stage < n; ++stage) {
    const int half = 1 << stage;
    __syncwarp();
    for (int b = lane; b < n / 2; b += 32) {
      const int i = (b >> stage << (stage + 1)) + (b & (half - 1));
      const float low = row[i], high = row[i + half];
      row[i] = low + high, row[i + half] = low - high;
    }
  }
  __syncwarp();
  for (int i = lane; i < n; i += 32) row[i] *= norm;
  __syncwarp();
}

/// Zeros the padding between and behind a side's arrays.
__device__ __forceinline__ void ZeroPadding(const HackDeviceShape& shape, const HackDeviceSide& side, bool along_tokens,
                                            uint8_t* record) {
  const uint32_t strips = shape.page_tokens / kStripTokens, bytes = shape.meta8 ? 1 : 2;
  const uint32_t page_partitions = (along_tokens ? shape.page_tokens : shape.head_dim) / shape.partition;
  const uint32_t metas = page_partitions * (along_tokens ? shape.head_dim : shape.page_tokens);
  const auto zero = [&](uint32_t from, uint32_t to) {
    for (uint32_t at = from + threadIdx.x; at < to; at += blockDim.x) record[at] = 0;
  };
  const uint32_t codes_end = side.codes + strips * side.strip_bytes, minima_end = side.minima + bytes * metas;
  const uint32_t tops_bytes = (shape.meta8 ? 4 * (along_tokens ? page_partitions : 1) : 0) + (side.norms != 0 ? 2 : 0);
  zero(codes_end, tops_bytes != 0 ? side.tops : side.steps);
  if (tops_bytes != 0) zero(side.tops + tops_bytes, side.steps);
  zero(side.steps + bytes * metas, side.minima);
  if (side.sums != 0) {  // K's alone
    zero(minima_end, side.sums);
    zero(side.sums + 2 * metas, side.end);
  } else if (side.norms != 0) {  // V's alone
    zero(minima_end, side.norms);
    zero(side.norms + shape.page_tokens, side.end);
  } else {
    zero(minima_end, side.end);
  }
}

/// Blocks: [item][head][chunk] of one side.
template <bool kBFloat16>
__global__ void __launch_bounds__(kGeneralThreads)
    EncodeGeneralKernel(const HackDeviceShape shape, const HackDeviceHead* __restrict__ table,
                        const DeviceEncodeItem* __restrict__ items, uint32_t* declined, int side_index) {
  extern __shared__ __align__(16) float rows[];           // [tile_tokens][pitch], then lo, hi [partitions][entries]
  __shared__ uint32_t try_tops[RangeGrid::kTries][2][2];  // [try][group][step, minimum], as bits
  __shared__ uint32_t tops[2][2];                         // [group]
  __shared__ uint32_t seeds[2 * kStripTokens];
  __shared__ uint32_t largest;  // of V's magnitudes in the page, as bits
  const GeneralShape g(shape, side_index);
  float* const lo = rows + g.tile_tokens * g.pitch;  // the minimum, once it is made
  float* const hi = lo + g.metas();                  // the step, and then its inverse, likewise
  const int chunk = blockIdx.x % g.chunks;
  const int head = blockIdx.x / g.chunks % shape.kv_heads;
  const uint32_t index = blockIdx.x / g.chunks / shape.kv_heads;
  const DeviceEncodeItem item = items[index];
  const HackDeviceHead* const heads = shape.heads_of(table, item.layer);
  const HackDeviceSide& side = heads[head].side[side_index];
  uint8_t* const record = item.encoded + heads[head].offset;
  const int d = shape.head_dim, part = shape.partition;
  const int first_token = chunk * g.tokens;  // of the block, in the page
  const int first_partition = chunk * (g.along_tokens ? g.partitions : 0);
  const int tiles = g.tokens / g.tile_tokens, tile_metas = g.along_tokens ? g.metas() : g.partitions * kStripTokens;
  const uint8_t* const page = item.raw + shape.raw_offset(side_index, head);
  const bool has_norms = side.norms != 0;

  // Rows from `token` on, rotated where they are. false: some are not finite.
  const auto load_rows = [&](int token) {
    bool finite = true;
    __syncthreads();
    const uint32_t* const from = reinterpret_cast<const uint32_t*>(page) + size_t(token) * d / 2;
    for (int t = threadIdx.x / 32; t < g.tile_tokens; t += kGeneralThreads / 32) {
      float* const row = rows + t * g.pitch;
      for (int pair = threadIdx.x % 32; pair < d / 2; pair += 32) {
        const float2 two = Pair<kBFloat16>::ToFloats(from[t * d / 2 + pair]);
        row[2 * pair] = two.x + 0.f, row[2 * pair + 1] = two.y + 0.f;
        finite &= IsFinite(two.x) && IsFinite(two.y);
      }
      __syncwarp();
      if (!shape.hadamard) continue;
      RotateRow(row, d, shape.rotation_norm);
      for (int c = threadIdx.x % 32; c < d; c += 32) finite &= IsFinite(row[c]);
    }
    __syncthreads();
    return finite;
  };
  const auto largest_of = [&](const float* row) {
    float found = 0;
    for (int c = threadIdx.x % 32; c < d; c += 32) found = fmaxf(found, fabsf(row[c]));
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(found)));
  };
  float norm_top = 0;
  if (has_norms) {
    if (threadIdx.x == 0) largest = 0;
    bool finite = true;
    for (int token = 0; token < shape.page_tokens; token += g.tile_tokens) {
      finite &= load_rows(token);
      for (int t = threadIdx.x / 32; t < g.tile_tokens; t += kGeneralThreads / 32) {
        const float of_row = largest_of(rows + t * g.pitch);
        if (threadIdx.x % 32 == 0) atomicMax(&largest, __float_as_uint(of_row));
      }
    }
    bool bad = __syncthreads_or(!finite);
    const uint16_t top = RoundUpToHalf(__uint_as_float(largest));
    norm_top = HalfBitsToFloat(top);
    bad |= !IsFinite(norm_top);
    if (bad) {
      if (threadIdx.x == 0) declined[index] = 1;
      return;
    }
    if (chunk == 0 && threadIdx.x == 0) *reinterpret_cast<uint16_t*>(record + side.norm_top) = top;
  }
  // Rows of a tile, without their norms where those are stored.
  const auto load = [&](int tile) {
    const int token = first_token + tile * g.tile_tokens;
    const bool finite = load_rows(token);
    if (!has_norms) return finite;
    for (int t = threadIdx.x / 32; t < g.tile_tokens; t += kGeneralThreads / 32) {
      float* const row = rows + t * g.pitch;
      const TokenNorm norm = MakeNorm(largest_of(row), norm_top);
      if (threadIdx.x % 32 == 0) record[side.norms + token + t] = uint8_t(norm.stored);
      for (int c = threadIdx.x % 32; c < d; c += 32) row[c] = row[c] * norm.inverse + 0.f;
    }
    __syncthreads();
    return finite;
  };
  // Place n of a tile's metadata: its partition, its entry, where it is in lo and hi, its first element's address and
  // the elements' stride.
  struct Place {
    int partition, m, stride, segment;
    const float* x;
  };
  const auto place_of = [&](int tile, int n) {
    Place p;
    if (g.along_tokens) {
      p.partition = n / d;
      const int entry = n % d;
      p.m = n, p.x = rows + p.partition * part * g.pitch + entry, p.stride = g.pitch,
      p.segment = entry / kSegmentChannels;
    } else {
      p.partition = n / kStripTokens;
      const int t = n % kStripTokens;
      p.m = p.partition * g.entries + tile * kStripTokens + t, p.x = rows + t * g.pitch + p.partition * part;
      p.stride = 1, p.segment = p.partition * part / kSegmentChannels;
    }
    return p;
  };
  const auto width_of = [&](int m) {
    return int(side.segment_bits[(g.along_tokens ? m % d : m / g.entries * part) / kSegmentChannels]);
  };
  // Which pair of tops an entry of the block shares.
  const auto group_of = [&](int m) { return g.along_tokens ? m / d : 0; };

  // Ranges; the mean, where the width is 0.
  bool finite = true;
  for (int tile = 0; tile < tiles; ++tile) {
    finite &= load(tile);
    for (int n = threadIdx.x; n < tile_metas; n += kGeneralThreads) {
      const Place p = place_of(tile, n);
      float least = p.x[0], largest = p.x[0], sum = 0;
      for (int i = 0; i < part; ++i) {
        const float x = p.x[i * p.stride];
        least = fminf(least, x), largest = fmaxf(largest, x), sum += x;
      }
      const bool constant = side.segment_bits[p.segment] == 0;
      lo[p.m] = constant ? sum / float(part) : least;
      hi[p.m] = largest;
    }
  }
  for (int i = threadIdx.x; i < RangeGrid::kTries * 4; i += kGeneralThreads) (&try_tops[0][0][0])[i] = 0;
  if (threadIdx.x < 4) (&tops[0][0])[threadIdx.x] = 0;
  if (__syncthreads_or(!finite)) {
    if (threadIdx.x == 0) declined[index] = 1;
    return;
  }

  const auto try_of = [&](int k, int m, int width, bool* bad) {
    const float mid = (lo[m] + hi[m]) / 2.f, half = (hi[m] - lo[m]) / 2.f;
    return RoundBounds(width, width == 0 ? lo[m] : mid + half * kRangeGrid.below[k], mid + half * kRangeGrid.above[k],
                       bad);
  };
  if (side.least_squares != 0) {
    for (int m = threadIdx.x; m < g.metas(); m += kGeneralThreads) {
      const int width = width_of(m);
      for (int k = 0; k < RangeGrid::kTries; ++k) {
        bool bad = false;
        const Meta meta = try_of(k, m, width, &bad);
        uint32_t* const top = try_tops[k][group_of(m)];
        atomicMax(top, bad ? kInfinityBits : __float_as_uint(meta.step));
        atomicMax(top + 1, bad ? 0 : __float_as_uint(fabsf(meta.minimum)));
      }
    }
    __syncthreads();
    for (int tile = 0; tile < tiles; ++tile) {
      if (tiles > 1) load(tile);
      for (int n = threadIdx.x; n < tile_metas; n += kGeneralThreads) {
        const Place p = place_of(tile, n);
        if (!(side.least_squares >> p.segment & 1)) continue;
        const int width = side.segment_bits[p.segment];
        const float levels = Levels(width);
        float best = __uint_as_float(kInfinityBits);
        int found = -1;
        for (int k = 0; k < RangeGrid::kTries; ++k) {
          const uint32_t* const top = try_tops[k][group_of(p.m)];
          if (top[0] >= kInfinityBits) continue;
          bool bad = false;
          Meta meta = try_of(k, p.m, width, &bad);
          if (shape.meta8) RoundToTops(width, __uint_as_float(top[0]), __uint_as_float(top[1]), &meta);
          const float inverse = Inverse(meta.step);
          float error = 0;
          for (int i = 0; i < part; ++i) {
            const float x = p.x[i * p.stride];
            const float code = Level(x, inverse, meta.minimum, levels) + kRoundToInteger - kRoundToInteger;
            const float off = code * meta.step + meta.minimum - x;
            error += off * off;
          }
          if (error < best) best = error, found = k;
        }
        if (found >= 0) {
          const float mid = (lo[p.m] + hi[p.m]) / 2.f, half = (hi[p.m] - lo[p.m]) / 2.f;
          lo[p.m] = mid + half * kRangeGrid.below[found], hi[p.m] = mid + half * kRangeGrid.above[found];
        }
      }
    }
    __syncthreads();
  }

  bool bad = false;
  for (int m = threadIdx.x; m < g.metas(); m += kGeneralThreads) {
    const Meta meta = RoundBounds(width_of(m), lo[m], hi[m], &bad);
    lo[m] = meta.minimum, hi[m] = meta.step;
    atomicMax(&tops[group_of(m)][0], __float_as_uint(meta.step));
    atomicMax(&tops[group_of(m)][1], __float_as_uint(fabsf(meta.minimum)));
  }
  if (__syncthreads_or(bad)) {
    if (threadIdx.x == 0) declined[index] = 1;
    return;
  }
  const int first_meta = first_partition * g.entries;
  for (int m = threadIdx.x; m < g.metas(); m += kGeneralThreads) {
    Meta meta = {hi[m], lo[m]};
    const int at = first_meta + m;
    if (shape.meta8) {
      const uint32_t* const top = tops[group_of(m)];
      const StoredMeta stored = RoundToTops(width_of(m), __uint_as_float(top[0]), __uint_as_float(top[1]), &meta);
      record[side.steps + at] = uint8_t(stored.step), record[side.minima + at] = uint8_t(stored.minimum);
    } else {
      reinterpret_cast<uint16_t*>(record + side.steps)[at] = ToHalfBits(meta.step);
      reinterpret_cast<uint16_t*>(record + side.minima)[at] = ToHalfBits(meta.minimum);
    }
    lo[m] = meta.minimum, hi[m] = Inverse(meta.step);
  }
  const int groups = g.along_tokens ? g.partitions : 1;
  if (shape.meta8 && threadIdx.x < groups) {
    uint16_t* const to = reinterpret_cast<uint16_t*>(record + side.tops) + 2 * (first_partition + threadIdx.x);
    to[0] = ToHalfBits(__uint_as_float(tops[threadIdx.x][0])),
    to[1] = ToHalfBits(__uint_as_float(tops[threadIdx.x][1]));
  }
  if (chunk == 0) ZeroPadding(shape, side, g.along_tokens, record);

  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) load(tile);
    if (shape.stochastic && threadIdx.x < g.tile_tokens) {
      seeds[threadIdx.x] =
          NoiseSeed(item.layer, head, side_index, item.first_token + first_token + tile * g.tile_tokens + threadIdx.x);
    }
    __syncthreads();
    // t: in the tile.
    const auto code_of = [&](int t, int c, int width) {
      const int m = g.along_tokens ? t / part * d + c : c / part * g.entries + tile * kStripTokens + t;
      const float levels = Levels(width);
      const float level = Level(rows[t * g.pitch + c], hi[m], lo[m], levels);
      if (!shape.stochastic) return __float_as_uint(level + kRoundToInteger);
      return kRoundToIntegerBits + min(int(level + Noise(seeds[t], c)), (1 << width) - 1);
    };
    const int tasks = g.tile_tokens / kStripTokens * d * 2;  // [strip][segment][h][r]
    for (int n = threadIdx.x; n < tasks; n += kGeneralThreads) {
      const int r = n % 16, h = n / 16 % 2, segment = n / 32 % (d / kSegmentChannels), strip = n / (2 * d);
      const int page_strip = (first_token + tile * g.tile_tokens) / kStripTokens + strip;
      uint8_t* const to = record + side.codes + page_strip * side.strip_bytes + side.segment_offset[segment];
      const bool is_v = side_index == 1;
      WithWidth(side.segment_bits[segment], [&](auto w) {
        constexpr int kWidth = decltype(w)::value;
        if constexpr (kWidth > 0) {
          const Words<kWidth> words = Pack<kWidth>([&](int i, int k) {
            const int t = strip * kStripTokens + 16 * i + (is_v ? 8 * h + k : r);
            const int c = segment * kSegmentChannels + (is_v ? r : 8 * h + k);
            return code_of(t, c, kWidth);
          });
          const uint32_t flip = is_v && kWidth == 8 ? 0x80808080u : 0u;
          ForEachWord<kWidth>(h, r,
                              [&](int at, auto word) { *reinterpret_cast<uint32_t*>(to + at) = word(words) ^ flip; });
        }
      });
    }
    if (side.sums == 0) continue;
    for (int n = threadIdx.x; n < g.partitions * kStripTokens; n += kGeneralThreads) {
      const int partition = n / kStripTokens, t = n % kStripTokens;
      const int width = side.segment_bits[partition * part / kSegmentChannels];
      uint32_t sum = 0;
      for (int c = partition * part; c < (partition + 1) * part; ++c) sum += code_of(t, c, width) - kRoundToIntegerBits;
      reinterpret_cast<uint16_t*>(record + side.sums)[partition * g.entries + tile * kStripTokens + t] = uint16_t(sum);
    }
  }
}

}  // namespace kvmanager::hack::device
