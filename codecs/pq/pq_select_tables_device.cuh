// Tables of sparse selection on a GPU: a query's products with the centroids as 16-bit entries, in shared memory.
//
// An entry is a vector of the group's rows, which one look-up reads; it stands there so often that lanes that look up
// together never meet in a bank: 128 bytes of a centroid, where they fit. This is part of pq_select_cuda.cu.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_kernels.h"

namespace kvmanager::pq {
namespace {

constexpr unsigned kAll = 0xffffffffu;
// Static memory takes some of 227 KiB.
constexpr uint32_t kSharedMax = 216 * 1024;
constexpr int kSubspacesMax = 32;

// selection.cc
constexpr float kUnitsPerNat = kUnitsPerOctave * 1.44269504f;
constexpr float kPartLimit = kSumMax - kSubspacesAtOnce;
constexpr float kTotalLimit = UINT16_MAX - kSubspacesMax;

/// Where tables lie in shared memory.
struct TableLayout {
  uint32_t q, values, entries, bytes;
  uint32_t row_shift;  // of a centroid's copies
  bool wide;           // Tables
  uint32_t reach;      // how far a look-up goes, whatever byte stands in the place of a code
  __host__ __device__ TableLayout(const DeviceShape& shape, int pairs) {
    const uint32_t centroids = shape.m * shape.count(), rows = 2 * pairs;
    q = 0;
    values = q + shape.head_dim * rows * 4;
    entries = (values + centroids * rows * 4 + 127) / 128 * 128;
    // 128 bytes of zeros at the end.
    const auto end = [&]() { return entries + (centroids << row_shift) + 128; };
    row_shift = 7;
    while (1u << (row_shift - 2) > uint32_t(pairs) && end() > kSharedMax) --row_shift;
    wide = row_shift == 7 && shape.m <= kCodesOfWord;
    bytes = end();
    const uint32_t codes = 256u << row_shift, last = (shape.m - 1) * (uint32_t(shape.count()) << row_shift);
    reach = wide && shape.m < kCodesOfWord ? bytes - 128 + codes : entries + last + codes;
    if (reach < bytes) reach = bytes;
  }
};

/// Threads of a block: as many as registers allow, since most of what they do waits for what they did before.
__host__ __device__ constexpr int ThreadsFor(int pairs) { return pairs > 2 ? 512 : 1024; }

/// Pairs of rows that tables are made of at once.
__host__ __device__ inline int PairsOf(const DeviceShape& shape) {
  int pairs = shape.group() <= 2 ? 1 : shape.group() <= 4 ? 2 : 4;
  while (pairs > 1 && TableLayout(shape, pairs).reach > kSharedMax) pairs /= 2;
  return pairs;
}

/// An entry of the table of indexes.
__device__ __forceinline__ const uint8_t* InIndex(const SelectParams& p, uint32_t at) {
  static_assert(kRowUnitBytes == 1 << 6);
  const uint32_t* const slot = p.index.slots + at;
  return p.index.pool + (static_cast<uint64_t>(__ldg(slot)) << 6);
}

template <int kPairs>
struct alignas(4 * kPairs) Packed {
  uint32_t of[kPairs];  // rows 2 i in the low half, 2 i + 1 in the high
};

struct Unit {
  float inverse;
  int shift;
};

__device__ __forceinline__ bool Finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

/// UnitOf of selection.cc.
__device__ Unit UnitOf(const float (*ranges)[2], int stride, int m) {
  float total = 0, widest = 0;
  for (int s = 0; s < m; s += kSubspacesAtOnce) {
    float part = 0;
    for (int i = s; i < min(s + kSubspacesAtOnce, m); ++i) part += ranges[i * stride][1] - ranges[i * stride][0];
    total += part;
    widest = part > widest ? part : widest;
  }
  if (!Finite(total)) return {0, 0};
  Unit unit{kUnitsPerNat, 0};
  for (; unit.shift < kShiftMax && (widest * unit.inverse > kPartLimit || total * unit.inverse > kTotalLimit);
       unit.inverse /= 2) {
    ++unit.shift;
  }
  if (total > 0) unit.inverse = fminf(fminf(unit.inverse, kPartLimit / widest), kTotalLimit / total);
  return unit;
}

template <int kPairs>
struct Rows {
  static constexpr int kRows = 2 * kPairs;
  float ranges[kSubspacesMax][kRows][2];
  Unit units[kRows];
};

/// Tables of rows first .. first + 2 kPairs - 1 of the group; rows beyond it are zero. meanwhile() is called by all
/// threads once the centroids are read.
template <int kPairs, typename Meanwhile>
__device__ void MakeTables(const SelectParams& p, const DeviceSelect& query, int head, int first,
                           const TableLayout& layout, uint8_t* shared, Rows<kPairs>& rows, Meanwhile meanwhile) {
  constexpr int kRows = 2 * kPairs, kThreads = ThreadsFor(kPairs), kWarps = kThreads / 32;
  const DeviceShape& shape = p.shape;
  const int d = shape.head_dim, count = shape.count(), width = shape.width(), centroids = shape.m * count;
  float* const q = reinterpret_cast<float*>(shared + layout.q);
  float* const values = reinterpret_cast<float*>(shared + layout.values);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < d * kRows; i += kThreads) {
    const int r = i / d, c = i % d;
    float x = 0;
    if (first + r < shape.group()) {
      const size_t row = size_t(query.token) * shape.query_heads + head * shape.group() + first + r;
      const uint16_t bits = static_cast<const uint16_t*>(p.q)[row * d + c];
      x = shape.bfloat16 ? __uint_as_float(uint32_t{bits} << 16) : __half2float(__ushort_as_half(bits));
    }
    q[c * kRows + r] = x;
  }
  __syncthreads();
  const float* const book = reinterpret_cast<const float*>(InIndex(p, query.index)) + size_t(head) * d * count;
  for (int at = threadIdx.x; at < centroids; at += kThreads) {
    const int s = at >> shape.bits, c = at & (count - 1);
    const float* from = book + size_t(s) * width * count + c;
    const float* x = q + s * width * kRows;
    float dot[kRows] = {};
#pragma unroll 16
    for (int j = 0; j < width; ++j, from += count, x += kRows) {
      const float y = __ldcs(from);
#pragma unroll
      for (int r = 0; r < kRows; ++r) dot[r] = dot[r] + x[r] * y;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) values[at * kRows + r] = dot[r] * p.scale;
  }
  meanwhile();
  __syncthreads();
  for (int i = warp; i < shape.m * kRows; i += kWarps) {
    const int s = i / kRows, r = i % kRows;
    float low = __builtin_huge_valf(), high = -low;
#pragma unroll 4
    for (int c = lane; c < count; c += 32) {
      const float x = values[((s << shape.bits) + c) * kRows + r];
      low = fminf(low, x), high = fmaxf(high, x);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      low = fminf(low, __shfl_xor_sync(kAll, low, mask)), high = fmaxf(high, __shfl_xor_sync(kAll, high, mask));
    }
    if (lane == 0) rows.ranges[s][r][0] = low, rows.ranges[s][r][1] = high;
  }
  __syncthreads();
  if (threadIdx.x < kRows) rows.units[threadIdx.x] = UnitOf(&rows.ranges[0][threadIdx.x], kRows, shape.m);
  __syncthreads();
  const int copies = (1 << layout.row_shift) / (4 * kPairs);
  for (int at = threadIdx.x; at < centroids; at += kThreads) {
    const int s = at >> shape.bits;
    Packed<kPairs> entry;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint32_t two[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = 2 * i + h;
        const float inverse = rows.units[r].inverse;
        const float x = fminf((rows.ranges[s][r][1] - values[at * kRows + r]) * inverse, float(kSumMax));
        two[h] = inverse == 0 ? 0 : __float2int_rn(x);
      }
      entry.of[i] = two[0] | two[1] << 16;
    }
    auto* const to = reinterpret_cast<Packed<kPairs>*>(shared + layout.entries + (at << layout.row_shift));
    for (int i = 0; i < copies; ++i) to[(i + lane) & (copies - 1)] = entry;  // lanes in different banks
  }
  if (threadIdx.x < 32) reinterpret_cast<uint32_t*>(shared + layout.bytes - 128)[threadIdx.x] = 0;
  __syncthreads();
}

/// This lane's entries. kWide: of one word of codes at most, copied to 128 bytes; codes of sub-vectors that there are
/// not are 0, and look up zeros.
template <int kPairs, bool kWide>
struct Tables {
  const uint8_t* at;
  uint32_t sub_bytes;  // of a sub-vector's
  uint32_t row_shift;
  uint32_t zeros;
  int m;

  __device__ __forceinline__ Tables(const DeviceShape& shape, const TableLayout& layout, const uint8_t* shared) {
    const int copies = (1 << layout.row_shift) / (4 * kPairs);
    at = shared + layout.entries + (threadIdx.x % copies) * (4 * kPairs);
    row_shift = kWide ? 7 : layout.row_shift;
    sub_bytes = uint32_t(shape.count()) << row_shift;
    zeros = layout.bytes - 128 - layout.entries;
    m = shape.m;
  }
  template <int kSub>
  __device__ __forceinline__ void Add(uint32_t word, uint32_t sub_at, Packed<kPairs>& sum) const {
    uint32_t offset;
    if constexpr (kWide) {
      offset = (8 * kSub >= 7 ? word >> (8 * kSub - 7) : word << 7) & 0x7f80;
    } else {
      offset = (word >> (8 * kSub) & 255) << row_shift;
    }
    const auto entry = *reinterpret_cast<const Packed<kPairs>*>(at + sub_at + offset);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) sum.of[i] += entry.of[i];  // sums fit their halves
  }
  /// Of sub-vectors first .. first + 3.
  __device__ __forceinline__ void AddWord(uint32_t word, int first, Packed<kPairs>& sum) const {
    if constexpr (kWide) {
      Add<0>(word, 0, sum);
      Add<1>(word, m > 1 ? sub_bytes : zeros, sum);
      Add<2>(word, m > 2 ? 2 * sub_bytes : zeros, sum);
      Add<3>(word, m > 3 ? 3 * sub_bytes : zeros, sum);
    } else {
      Add<0>(word, first * sub_bytes, sum);
      if (first + 1 < m) Add<1>(word, (first + 1) * sub_bytes, sum);
      if (first + 2 < m) Add<2>(word, (first + 2) * sub_bytes, sum);
      if (first + 3 < m) Add<3>(word, (first + 3) * sub_bytes, sum);
    }
  }
};

}  // namespace
}  // namespace kvmanager::pq
