// Paged decode attention on a GPU: what every codec's kernel shares.
//
// A block of threads works through items (attend_params.h). Its warps take an item's *units* (what a warp attends to at
// once: a page's record of one head, or 16 tokens of a raw page) in turn. A unit comes in *pieces*, each loaded by
// asynchronous copies into a ring of the warp's own, which runs ahead across items: no barrier of the block stands
// between a warp and its next bytes. A warp keeps its own softmax state through all items of a tile, and then leaves it
// in shared memory. A few warps, others for each tile, wait for all states and merge them; the rest go on, and wait
// only if they are a whole tile ahead.
//
// `Pages` says how pages of one form are read; raw has one, and so has each codec:
//
//   kPieceBytes, kPieces: of a unit; bytes are a multiple of 16.
//
//   kRows: of the tiles that it serves, 4 or kTileRows.
//
//   Units(params, item), PageOf(params, item, unit).
//
//   Load(params, item, page, unit, piece, to, barrier): begins copies; every lane arrives at the barrier once.
//
//   Or, instead of PageOf and Load, and in one piece: Lead, what a warp keeps of an item that it loads: Open(params,
//   item), PageOf(unit), Load(page, unit, to, barrier).
//
//   Begin(params, item, scratch): reads the tile's q; scratch has kScratchBytes for this warp, 16-byte aligned. With
//   kSharesQueries it is given the block's RotatedQueries and the tile's number, too.
//
//   Attend<piece>(params, item, unit, bytes, state): adds to a WarpState in the form's own order of channels.
//
//   Or, with kPrepares, and in one piece: Prepare(params, bytes) of an item's first unit, and for each unit
//   Scores(params, bytes, state) and Outputs(params, bytes, next, state), which prepares the next unit's bytes
//   meanwhile (its own again where there is none).
//
//   Open(state, params), Close(state, params): from the plain order of channels to its own, and back;
//   Store<add>(state, to): acc as [kRows][kHeadDim], in place of what is there or added to it.
//
//   With kLaunchedIntoEnd its kernel begins while what was launched before it ends, and waits before it reads.
//
//   With kApart its outputs stand in a space of their own (attend_apart.cuh, attend_kernel.cuh): Open and Close concern
//   sums and maxima alone, and acc is empty then; ClearUnused(state), with kPrepares, says which of acc it has no use
//   for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "codecs/device/attend_params.h"

namespace kvmanager::device {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

// ---- instructions ----

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// An mbarrier: a phase ends when all have arrived that it waits for.
struct Barrier {
  uint32_t at;
  __device__ __forceinline__ void Init(uint32_t arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void Arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
  }
  /// Arrives; the phase then waits for `bytes` of bulk copies too.
  __device__ __forceinline__ void ArriveExpecting(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  }
  /// Arrives when this lane's copies (CopyAsync) are there.
  __device__ __forceinline__ void ArriveWithCopies() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
  }
  __device__ __forceinline__ void Wait(uint32_t parity) const {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again_%=;\n"
        "}" ::"r"(at),
        "r"(parity)
        : "memory");
  }
};

/// 16 bytes by one lane, past the first-level cache.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// A multiple of 16 bytes, by the copy engine.
__device__ __forceinline__ void CopyBulk(uint32_t to, const void* from, uint32_t bytes, Barrier barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier.at)
               : "memory");
}
/// What this thread wrote to shared memory comes before copies by the copy engine to the same place.
__device__ __forceinline__ void FenceForCopies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// Of kernels launched one into the other's end: the next may begin its blocks; what the last wrote is there.
__device__ __forceinline__ void LetNextBegin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void WaitForLast() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Of the 8 x 8 matrix of 16-bit elements whose row lane / 4 holds x in columns 2 (lane % 4) and + 1, the transposed.
__device__ __forceinline__ uint32_t Transpose8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float AsFloat(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ float AsFloat(int x) { return __int_as_float(x); }
__device__ __forceinline__ uint32_t AsBits(float x) { return __float_as_uint(x); }

// In a C fragment of a matrix instruction, lane (g = lane / 4, t = lane % 4) holds rows g and g + 8 of columns 2t and
// 2t + 1. Columns are the tile's rows of queries.

/// The largest, and the sum, of a column over the lanes that hold it.
__device__ __forceinline__ float MaxOfColumn(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 4));
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 8));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 16));
}
__device__ __forceinline__ float SumOfColumn(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 4);
  x += __shfl_xor_sync(kAllLanes, x, 8);
  return x + __shfl_xor_sync(kAllLanes, x, 16);
}

/// A warp's softmax state of query rows 2t and 2t + 1: acc is a C fragment per 16 channels (a segment). In the plain
/// order its rows g and g + 8 are the segment's channels g and g + 8.
template <int kHeadDim>
struct WarpState {
  static constexpr int kSegments = kHeadDim / 16;
  float acc[kSegments][4];
  float max[2];  // of scores * log2(e)
  float sum[2];  // of this lane's tokens

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[s][i] = 0;
    }
    max[0] = max[1] = kMinusInfinity;
    sum[0] = sum[1] = 0;
  }
  /// acc times its row's factor; skipped where no maximum changed.
  __device__ __forceinline__ void Scale(const float (&factor)[2]) {
    if (!__any_sync(kAllLanes, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[s][i] *= factor[i & 1];
    }
  }
  /// Its maxima become the largest of columns, where that is more.
  __device__ __forceinline__ void Raise(const float (&tops)[2]) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = fmaxf(max[h], MaxOfColumn(tops[h]));
      factor[h] = Exp2(max[h] - next);
      max[h] = next, sum[h] *= factor[h];
    }
    Scale(factor);
  }
};

/// For a row of floats whose largest is given: times `up` it fits float16 with few bits lost, the largest becoming 2^14
/// and more; `down` undoes that. Both are normal numbers.
struct PowerOfRow {
  float up, down;
  __device__ __forceinline__ explicit PowerOfRow(float largest) {
    const uint32_t exponent = min(max(AsBits(largest) >> 23, 15u), 254u);
    up = AsFloat((268 - exponent) << 23), down = AsFloat((exponent - 14) << 23);
  }
};

// ---- q and out ----

/// Two elements of q as floats, and back.
__device__ __forceinline__ float2 ToFloats(uint32_t two, bool bfloat16) {
  if (bfloat16) return make_float2(AsFloat(two << 16), AsFloat(two & 0xffff0000u));
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}
__device__ __forceinline__ uint32_t FromFloats(float a, float b, bool bfloat16) {
  if (bfloat16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&two);
  }
  const __half2 two = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&two);
}
/// Index of row `row` of the tile into [tokens][query_heads].
__device__ __forceinline__ size_t RowOf(const AttendParams& p, const AttendItem& item, int row) {
  const int group = p.query_heads / p.kv_heads, r = item.first_row + row;
  return static_cast<size_t>(item.first_token + r / group) * p.query_heads + item.kv_head * group + r % group;
}

// ---- the end of a tile ----

/// In what a warp's acc of a tile is, where forms may be rotated (attend_kernel.cuh).
enum StateSpace : uint8_t { kPlainSpace = 0, kRotatedSpace = 1 };

/// Where a block's warps leave their states of a tile.
template <int kHeadDim, int kWarps, int kRows>
struct TileStates {
  float acc[kWarps][kRows][kHeadDim];
  float2 state[kWarps][kRows];  // maximum and sum
  alignas(16) StateSpace space[(kWarps + 15) / 16 * 16];
};

struct NothingRotated {};

/// Four channels of a row of a tile, on their way to the output.
struct RowPart {
  float max = kMinusInfinity, sum = 0;
  float4 acc = {0, 0, 0, 0};

  /// A state's sum and acc, times `factor`.
  __device__ __forceinline__ void Add(float factor, float state_sum, const float4& v) {
    sum += factor * state_sum;
    acc.x += factor * v.x, acc.y += factor * v.y, acc.z += factor * v.z, acc.w += factor * v.w;
  }
  __device__ __forceinline__ void Merge(float2 state, const float4& v) {
    const float next = fmaxf(max, state.x), old = Exp2(max - next);
    max = next, sum *= old;
    acc.x *= old, acc.y *= old, acc.z *= old, acc.w *= old;
    Add(Exp2(state.x - next), state.y, v);
  }
  template <int kHeadDim>
  __device__ __forceinline__ void Write(const AttendParams& p, const AttendItem& item, int row, int channel) const {
    const size_t at = RowOf(p, item, row);
    const float n = 1.f / sum;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at * kHeadDim + channel) =
        make_uint2(FromFloats(acc.x * n, acc.y * n, p.bfloat16), FromFloats(acc.z * n, acc.w * n, p.bfloat16));
    if (channel == 0 && p.lse != nullptr) p.lse[at] = (max + __log2f(sum)) * 0.693147181f;
  }
};

/// This block's part of rows `index` (of a merger) is written: whether all others are too, and can be read.
__device__ __forceinline__ bool LastToArrive(const AttendParams& p, const AttendItem& item, int index) {
  const int lane = threadIdx.x % 32;
  __threadfence();
  __syncwarp();
  uint32_t before = 0;
  uint32_t* const arrived = p.arrived + static_cast<size_t>(item.first_part) * kTileRows + index;
  if (lane == 0) before = atomicAdd(arrived, 1);
  if (__shfl_sync(kAllLanes, before, 0) + 1 < item.parts) return false;
  if (lane == 0) *arrived = 0;  // for the next launch
  __threadfence();
  return true;
}

/// x times the normalised Walsh-Hadamard matrix: four channels to a lane, rows of kHeadDim / 4 lanes.
template <int kHeadDim>
__device__ __forceinline__ float4 RotateRow(const float4& x) {
  const float a = x.x + x.y, b = x.x - x.y, c = x.z + x.w, d = x.z - x.w;
  float v[4] = {a + c, b + d, a - c, b - d};
  const float norm = kHeadDim == 64 ? 0.125f : kHeadDim == 128 ? 0.088388348f : 0.0625f;
#pragma unroll
  for (int bit = 1; bit < kHeadDim / 4; bit *= 2) {
    const float sign = (threadIdx.x & bit) != 0 ? -1.f : 1.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = fmaf(v[j], sign, __shfl_xor_sync(kAllLanes, v[j], bit));
  }
  return make_float4(v[0] * norm, v[1] * norm, v[2] * norm, v[3] * norm);
}

/// A tile's q times the Walsh-Hadamard matrix: the first warps that come to the tile rotate a row each, for all. Two
/// tiles have a place: no warp is two tiles ahead of another, since it waited for the merging of the tile between.
template <int kHeadDim, int kRows>
struct RotatedQueries {
  alignas(16) float q[2][kRows][kHeadDim];
  alignas(8) uint64_t ready[2];  // barriers: the rows are there
  uint32_t asked[2];             // how often warps asked for a row

  __device__ __forceinline__ Barrier Ready(int tile) { return {SharedAddress(&ready[tile % 2])}; }
  static __device__ __forceinline__ bool HasChannels() { return threadIdx.x % 32 < kHeadDim / 4; }

  __device__ __forceinline__ void Init() {
    if (threadIdx.x < 2) asked[threadIdx.x] = 0, Ready(threadIdx.x).Init(32 * kRows);
  }
  /// The row that this warp is to Put; kRows and more: none. Each of the block's kWarps warps asks once for a tile.
  template <int kWarps>
  __device__ __forceinline__ int TakeRow(int tile) {
    uint32_t before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(&asked[tile % 2], 1);
    return __shfl_sync(kAllLanes, before, 0) % kWarps;
  }
  /// This lane's four channels of a row, as they stand in p.q; zeros where the tile has no such row.
  static __device__ __forceinline__ uint2 Read(const AttendParams& p, const AttendItem& item, int row) {
    if (row >= item.rows || !HasChannels()) return make_uint2(0, 0);
    return reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.q) +
                                          RowOf(p, item, row) * kHeadDim)[threadIdx.x % 32];
  }
  __device__ __forceinline__ void Put(const AttendParams& p, int tile, int row, const uint2& four) {
    const float2 a = ToFloats(four.x, p.bfloat16), b = ToFloats(four.y, p.bfloat16);
    const float4 rotated = RotateRow<kHeadDim>(make_float4(a.x, a.y, b.x, b.y));
    if (HasChannels()) reinterpret_cast<float4*>(q[tile % 2][row])[threadIdx.x % 32] = rotated;
    Ready(tile).Arrive();
  }
  /// This lane's channels of every row, once they are there.
  __device__ __forceinline__ void Take(int tile, float (&to)[kRows][4]) {
    Ready(tile).Wait(tile / 2 % 2);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4 four = make_float4(0, 0, 0, 0);
      if (HasChannels()) four = reinterpret_cast<const float4*>(q[tile % 2][r])[threadIdx.x % 32];
      to[r][0] = four.x, to[r][1] = four.y, to[r][2] = four.z, to[r][3] = four.w;
    }
  }
};

/// Merges what the block's warps left of a tile: the tile's output, or this block's part, and, if that is the last of
/// the tile's parts to come, the output from all of them. The `index`-th of kMergers warps has the index-th rows.
/// kMayRotate: memory.space says which states are rotated.
template <bool kMayRotate = false, int kHeadDim, int kWarps, int kRows>
__device__ __forceinline__ void MergeTile(const AttendParams& p, const AttendItem& item, int index,
                                          const TileStates<kHeadDim, kWarps, kRows>& memory) {
  constexpr int kLanes = kHeadDim / 4, kRowsAtOnce = 32 / kLanes;  // lanes of a row, rows of a warp
  const int lane = threadIdx.x % 32;
  const int row = index * kRowsAtOnce + lane / kLanes, channel = lane % kLanes * 4;
  if (index * kRowsAtOnce >= item.rows) return;
  const bool works = row < item.rows;
  RowPart part;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) part.max = fmaxf(part.max, memory.state[w][row].x);
  RowPart rotated;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    // A warp that saw nothing has a maximum of minus infinity, and zeros.
    const float2 one = memory.state[w][row];
    const float factor = Exp2(one.x - part.max);
    const float4 v = *reinterpret_cast<const float4*>(&memory.acc[w][row][channel]);
    if constexpr (kMayRotate) {
      const float turned = memory.space[w] == kRotatedSpace ? factor : 0.f;
      rotated.Add(turned, 0, v);
      part.Add(factor - turned, 0, v);
      part.sum += factor * one.y;
    } else {
      part.Add(factor, one.y, v);
    }
  }
  if constexpr (kMayRotate) {
    if (p.rotates) {
      const float4 v = RotateRow<kHeadDim>(rotated.acc);
      part.acc.x += v.x, part.acc.y += v.y, part.acc.z += v.z, part.acc.w += v.w;
    }
  }
  if (works) {
    if (item.parts == 1) {
      part.template Write<kHeadDim>(p, item, row, channel);
    } else {
      const size_t at = static_cast<size_t>(item.first_part + item.part) * kTileRows + row;
      __stcg(reinterpret_cast<float4*>(p.partial + at * kHeadDim + channel), part.acc);
      if (channel == 0) __stcg(reinterpret_cast<float2*>(p.partial_max) + at, make_float2(part.max, part.sum));
    }
  }
  if (item.parts == 1 || !LastToArrive(p, item, index) || !works) return;
  const size_t first = static_cast<size_t>(item.first_part) * kTileRows + row;
  const float2* const states = reinterpret_cast<const float2*>(p.partial_max) + first;
  const float* const accs = p.partial + first * kHeadDim + channel;
  RowPart whole;
  constexpr int kAtOnce = 8;  // loads under way
  for (int k = 0; k < item.parts; k += kAtOnce) {
    float2 one[kAtOnce];
    float4 acc[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = min(k + j, item.parts - 1) * kTileRows;
      one[j] = __ldcg(states + at);
      acc[j] = __ldcg(reinterpret_cast<const float4*>(accs + at * kHeadDim));
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (k + j < item.parts) whole.Merge(one[j], acc[j]);
    }
  }
  whole.template Write<kHeadDim>(p, item, row, channel);
}

/// Maximum and sums of this warp's state of a tile, for MergeTile.
template <int kHeadDim, int kWarps, int kRows>
__device__ __forceinline__ void LeaveSums(const WarpState<kHeadDim>& state,
                                          TileStates<kHeadDim, kWarps, kRows>& memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float sums[2] = {SumOfColumn(state.sum[0]), SumOfColumn(state.sum[1])};
  if (2 * lane < kRows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) memory.state[warp][2 * lane + h] = make_float2(state.max[h], sums[h]);
  }
}

}  // namespace kvmanager::device
