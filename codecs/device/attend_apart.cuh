// Attention where encoded pages stand in a space of their own (rotated, say) beside raw pages in the model's.
//
// Scores are the same in either space, so one softmax runs over both, but outputs are two vectors until the end: a warp
// parks what it has of one space when it goes on to a page of the other, and the end of a tile leaves two rows for each
// query. One small kernel maps q before, and one brings the two rows together behind (MapKernel, ExpandKernel). Each is
// launched while the kernel before it ends, and loads its factor meanwhile.
#pragma once

#include <cuda_runtime.h>

#include "codecs/device/attend_device.cuh"

namespace kvmanager::device {

inline constexpr int kMapRows = 4, kMapParts = 4;  // of a block: rows of a head; parts of a sum

/// The index of row `row` of a KV head's rows in [tokens][query_heads].
__device__ __forceinline__ size_t RowOfHead(const AttendParams& p, int kv_head, int row) {
  const int group = p.query_heads / p.kv_heads;
  return static_cast<size_t>(row / group) * p.query_heads + kv_head * group + row % group;
}
template <int kHeadDim>
__device__ __forceinline__ float* MappedRow(const AttendParams& p, int area, size_t row) {
  return p.mapped + (static_cast<size_t>(area) * p.tokens * p.query_heads + row) * kHeadDim;
}

/// A row of q in pairs of channels, as it was given or as it was mapped.
template <int kHeadDim, bool kMapped>
struct QueryPairs {
  const uint32_t* given;
  const float2* mapped;
  bool bfloat16;

  __device__ __forceinline__ QueryPairs(const AttendParams& p, size_t row)
      : given(static_cast<const uint32_t*>(p.q) + row * (kHeadDim / 2)),
        mapped(reinterpret_cast<const float2*>(MappedRow<kHeadDim>(p, 0, row))),
        bfloat16(p.bfloat16) {}
  __device__ __forceinline__ float2 operator[](int pair) const {
    if constexpr (kMapped) return __ldcg(mapped + pair);
    return ToFloats(given[pair], bfloat16);
  }
};

/// Products of up to kMapRows rows with the block's factor; its sum's part of column threadIdx.x % kHeadDim.
template <int kHeadDim>
struct MapBlock {
  static constexpr int kThreads = kMapParts * kHeadDim, kDepth = kHeadDim / kMapParts;
  struct Memory {
    alignas(16) float x[kMapRows][kHeadDim];
    float parts[kMapParts][kMapRows][kHeadDim];
  };
  float factor[kDepth];

  __device__ __forceinline__ void Load(const float* of_head) {
    const int part = threadIdx.x / kHeadDim, column = threadIdx.x % kHeadDim;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) factor[i] = of_head[(part * kDepth + i) * kHeadDim + column];
  }
  /// memory.x is there behind a barrier; so are the parts then.
  __device__ __forceinline__ void Multiply(Memory& memory) const {
    const int part = threadIdx.x / kHeadDim, column = threadIdx.x % kHeadDim;
#pragma unroll
    for (int r = 0; r < kMapRows; ++r) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kDepth; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(&memory.x[r][part * kDepth + i]);
        sum = fmaf(x.x, factor[i], sum), sum = fmaf(x.y, factor[i + 1], sum);
        sum = fmaf(x.z, factor[i + 2], sum), sum = fmaf(x.w, factor[i + 3], sum);
      }
      memory.parts[part][r][column] = sum;
    }
    __syncthreads();
  }
  static __device__ __forceinline__ float Sum(const Memory& memory, int row, int column) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kMapParts; ++part) sum += memory.parts[part][row][column];
    return sum;
  }
};

/// q into the space. Blocks: [kv_head][rows of the head / kMapRows].
template <int kHeadDim>
__global__ void __launch_bounds__(MapBlock<kHeadDim>::kThreads) MapKernel(const __grid_constant__ AttendParams p) {
  using Block = MapBlock<kHeadDim>;
  __shared__ typename Block::Memory memory;
  const int rows = static_cast<int>(p.tokens) * (p.query_heads / p.kv_heads), first = blockIdx.y * kMapRows;
  Block block;
  block.Load(static_cast<const MappedSpace*>(p.codec)->query + size_t{blockIdx.x} * kHeadDim * kHeadDim);
  WaitForLast();  // whatever that is: what the next kernel reads before this one ends was there before
  LetNextBegin();
  for (int i = threadIdx.x; i < kMapRows * kHeadDim / 2; i += Block::kThreads) {
    const int row = i / (kHeadDim / 2), pair = i % (kHeadDim / 2);
    uint32_t two = 0;
    if (first + row < rows) {
      two = static_cast<const uint32_t*>(p.q)[RowOfHead(p, blockIdx.x, first + row) * (kHeadDim / 2) + pair];
    }
    *reinterpret_cast<float2*>(&memory.x[row][2 * pair]) = ToFloats(two, p.bfloat16);
  }
  __syncthreads();
  block.Multiply(memory);
  for (int i = threadIdx.x; i < kMapRows * kHeadDim; i += Block::kThreads) {
    const int row = i / kHeadDim, column = i % kHeadDim;
    if (first + row >= rows) continue;
    MappedRow<kHeadDim>(p, 0, RowOfHead(p, blockIdx.x, first + row))[column] = Block::Sum(memory, row, column);
  }
}

/// The outputs of encoded and raw pages, brought into one space. Blocks: as MapKernel's.
template <int kHeadDim>
__global__ void __launch_bounds__(MapBlock<kHeadDim>::kThreads) ExpandKernel(const __grid_constant__ AttendParams p) {
  using Block = MapBlock<kHeadDim>;
  __shared__ typename Block::Memory memory;
  const int rows = static_cast<int>(p.tokens) * (p.query_heads / p.kv_heads), first = blockIdx.y * kMapRows;
  const MappedSpace space = *static_cast<const MappedSpace*>(p.codec);
  Block block;
  block.Load(space.output + size_t{blockIdx.x} * kHeadDim * kHeadDim);
  LetNextBegin();
  const int multiplied = space.folds != 0 ? 2 : 1, as_it_is = 3 - multiplied;
  WaitForLast();
  for (int i = threadIdx.x; i < kMapRows * kHeadDim; i += Block::kThreads) {
    const int row = i / kHeadDim, column = i % kHeadDim;
    memory.x[row][column] =
        first + row < rows ? MappedRow<kHeadDim>(p, multiplied, RowOfHead(p, blockIdx.x, first + row))[column] : 0;
  }
  __syncthreads();
  block.Multiply(memory);
  for (int i = threadIdx.x; i < kMapRows * kHeadDim / 2; i += Block::kThreads) {
    const int row = i / (kHeadDim / 2), column = 2 * (i % (kHeadDim / 2));
    if (first + row >= rows) continue;
    const size_t at = RowOfHead(p, blockIdx.x, first + row);
    const float2 other = *reinterpret_cast<const float2*>(MappedRow<kHeadDim>(p, as_it_is, at) + column);
    static_cast<uint32_t*>(p.out)[(at * kHeadDim + column) / 2] = FromFloats(
        Block::Sum(memory, row, column) + other.x, Block::Sum(memory, row, column + 1) + other.y, p.bfloat16);
  }
}

// ---- states ----

/// Where a warp's output stands while it attends to pages of the other space; that of raw pages has TileStates' place.
template <int kHeadDim, int kWarps, int kRows>
struct ParkedStates {
  float acc[kWarps][kRows][kHeadDim];  // of encoded pages
  float max[2][kWarps][kRows];         // by PageForm: what acc is relative to
};
struct NothingParked {};

/// Adds a state's output to a place and clears it. used: something is there.
template <class Pages, int kHeadDim, int kRows>
__device__ __forceinline__ void Park(WarpState<kHeadDim>& state, bool used, float (&acc)[kRows][kHeadDim],
                                     float (&max)[kRows]) {
  const int lane = threadIdx.x % 32;
  if (used) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float now = __shfl_sync(kAllLanes, state.max[r % 2], r / 2);
      const float factor = now == kMinusInfinity ? 0 : Exp2(max[r] - now);
      for (int c = lane; c < kHeadDim; c += 32) acc[r][c] *= factor;
    }
    __syncwarp();
    Pages::template Store<true>(state, &acc[0][0]);
  } else {
    Pages::template Store<false>(state, &acc[0][0]);
  }
  if (2 * lane < kRows) max[2 * lane] = state.max[0], max[2 * lane + 1] = state.max[1];
#pragma unroll
  for (int s = 0; s < WarpState<kHeadDim>::kSegments; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.acc[s][i] = 0;
  }
  __syncwarp();
}
/// Nothing, in such a place.
template <int kHeadDim, int kRows>
__device__ __forceinline__ void ParkNothing(float (&acc)[kRows][kHeadDim], float (&max)[kRows]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int c = lane; c < kHeadDim; c += 32) acc[r][c] = 0;
  }
  if (lane < kRows) max[lane] = kMinusInfinity;
}

/// Four channels of a row of a tile in both spaces, by PageForm.
struct ApartRowPart {
  float max = kMinusInfinity, sum = 0;
  float4 acc[2] = {};

  __device__ __forceinline__ void Add(int form, float factor, const float4& v) {
    acc[form].x += factor * v.x, acc[form].y += factor * v.y, acc[form].z += factor * v.z, acc[form].w += factor * v.w;
  }
  template <int kHeadDim>
  __device__ __forceinline__ void Write(const AttendParams& p, const AttendItem& item, int row, int channel) const {
    const size_t at = RowOf(p, item, row);
    const float n = 1.f / sum;
#pragma unroll
    for (int form = 0; form < 2; ++form) {
      const float4& v = acc[form];
      *reinterpret_cast<float4*>(MappedRow<kHeadDim>(p, 2 - form, at) + channel) =
          make_float4(v.x * n, v.y * n, v.z * n, v.w * n);
    }
    if (channel == 0 && p.lse != nullptr) p.lse[at] = (max + __log2f(sum)) * 0.693147181f;
  }
};

/// As MergeTile, of outputs in two spaces, which it leaves in p.mapped.
template <int kHeadDim, int kWarps, int kRows>
__device__ __forceinline__ void MergeTileApart(const AttendParams& p, const AttendItem& item, int index,
                                               const TileStates<kHeadDim, kWarps, kRows>& memory,
                                               const ParkedStates<kHeadDim, kWarps, kRows>& parked) {
  constexpr int kRaw = static_cast<int>(PageForm::kRaw), kEncoded = static_cast<int>(PageForm::kEncoded);
  constexpr int kLanes = kHeadDim / 4, kRowsAtOnce = 32 / kLanes;  // lanes of a row, rows of a warp
  const int lane = threadIdx.x % 32;
  const int row = index * kRowsAtOnce + lane / kLanes, channel = lane % kLanes * 4;
  if (index * kRowsAtOnce >= item.rows) return;
  const bool works = row < item.rows;
  if (works) {
    ApartRowPart part;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) part.max = fmaxf(part.max, memory.state[w][row].x);
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w) {
      // A warp that saw nothing has a maximum of minus infinity, and zeros.
      const float2 one = memory.state[w][row];
      part.sum += Exp2(one.x - part.max) * one.y;
      part.Add(kRaw, Exp2(parked.max[kRaw][w][row] - part.max),
               *reinterpret_cast<const float4*>(&memory.acc[w][row][channel]));
      part.Add(kEncoded, Exp2(parked.max[kEncoded][w][row] - part.max),
               *reinterpret_cast<const float4*>(&parked.acc[w][row][channel]));
    }
    if (item.parts == 1) {
      part.template Write<kHeadDim>(p, item, row, channel);
    } else {
      const size_t at = static_cast<size_t>(item.first_part + item.part) * kTileRows + row;
#pragma unroll
      for (int form = 0; form < 2; ++form) {
        __stcg(reinterpret_cast<float4*>(p.partial + (2 * at + form) * kHeadDim + channel), part.acc[form]);
      }
      if (channel == 0) __stcg(reinterpret_cast<float2*>(p.partial_max) + at, make_float2(part.max, part.sum));
    }
  }
  if (item.parts == 1 || !LastToArrive(p, item, index) || !works) return;
  const size_t first = static_cast<size_t>(item.first_part) * kTileRows + row;
  const float2* const states = reinterpret_cast<const float2*>(p.partial_max) + first;
  const float* const accs = p.partial + 2 * first * kHeadDim + channel;
  ApartRowPart whole;
  constexpr int kAtOnce = 4;  // loads under way
  for (int k = 0; k < item.parts; k += kAtOnce) {
    float2 one[kAtOnce];
    float4 acc[kAtOnce][2];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = min(k + j, item.parts - 1) * kTileRows;
      one[j] = __ldcg(states + at);
#pragma unroll
      for (int form = 0; form < 2; ++form) {
        acc[j][form] = __ldcg(reinterpret_cast<const float4*>(accs + (2 * at + form) * kHeadDim));
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (k + j >= item.parts) continue;
      const float next = fmaxf(whole.max, one[j].x), old = Exp2(whole.max - next), mine = Exp2(one[j].x - next);
      whole.max = next, whole.sum = whole.sum * old + mine * one[j].y;
#pragma unroll
      for (int form = 0; form < 2; ++form) {
        float4& v = whole.acc[form];
        v.x *= old, v.y *= old, v.z *= old, v.w *= old;
        whole.Add(form, mine, acc[j][form]);
      }
    }
  }
  whole.template Write<kHeadDim>(p, item, row, channel);
}

}  // namespace kvmanager::device
