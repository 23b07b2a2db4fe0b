// Attention by many query tokens over pages of any form: what every codec's kernel shares.
//
// A block of threads, one to a multiprocessor, works through tiles of 128 rows (prefill_params.h). Four warps bring K
// and four bring V, two pages at a time, as float16 or bfloat16 into shared memory, swizzled as wgmma reads them: K and
// V are wanted and given back at different times. Two groups of four warps have 64 rows each, their scores and outputs
// in registers. While a group's softmax of two pages runs, its product with the two pages before does. Products are the
// raw form's for all pages: encoded ones are decoded on their way.
//
// Where encoded pages stand in a space of their own instead (IsMapped), the two forms have tiles of their own. Those of
// encoded pages take q from there, float16 rows scaled by powers of two, and leave outputs there; a MappedRowState says
// of each row what either form gave.
#pragma once

#include <cuda_runtime.h>

#include "codecs/device/attend_device.cuh"
#include "codecs/device/prefill_pages_device.cuh"
#include "codecs/device/prefill_params.h"
#include "codecs/device/wgmma_device.cuh"

namespace kvmanager::device {

/// PrefillParams::mapped where kernels map, for `rows` of q: q in the space and outputs of encoded pages there, both
/// float16 [rows][head_dim], and then these [rows].
struct MappedRowState {
  float scale;   // of scores, beside PrefillParams::scale_log2
  float lse[2];  // by PageForm, natural logarithms; minus infinity: nothing was read
  float unused;
};
static_assert(sizeof(MappedRowState) == 16);
template <int kHeadDim>
struct MappedRows {
  static_assert(kMappedRows * kHeadDim * sizeof(float) >= 2 * kHeadDim * 2 + sizeof(MappedRowState));
  uint16_t *q, *out;
  MappedRowState* states;

  __device__ __forceinline__ explicit MappedRows(const PrefillParams& p)
      : q(reinterpret_cast<uint16_t*>(p.mapped)),
        out(q + static_cast<size_t>(p.tokens) * p.query_heads * kHeadDim),
        states(reinterpret_cast<MappedRowState*>(out + static_cast<size_t>(p.tokens) * p.query_heads * kHeadDim)) {}
};

// ---- attending ----

template <int kHeadDim, bool kBFloat16, class Encoded>
struct PrefillConsumer {
  using Memory = PrefillMemory<kHeadDim, Encoded>;
  using Tile = PrefillTile<kHeadDim>;
  static constexpr int kScores = kPrefillPairTokens / 2, kOutputs = kHeadDim / 2;  // of a lane
  static constexpr bool kMaps = IsMapped<Encoded>();

  const PrefillParams& p;
  Memory& memory;
  const int group;   // of warps
  const int thread;  // in it
  float s[kScores];
  float o[kOutputs];
  uint32_t weights[kScores / 2];
  float max[2], sum[2];  // of rows g and g + 8; sums of this lane's columns
  int token[2];          // of these rows, in the tile
  float scales[2];       // of their scores, with kMaps

  __device__ __forceinline__ PrefillConsumer(const PrefillParams& params, Memory& m)
      : p(params),
        memory(m),
        group(__shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0) - 2),
        thread(threadIdx.x % kGroupThreads) {}

  __device__ __forceinline__ float ScaleOf(int half) const { return kMaps ? scales[half] : p.scale_log2; }
  __device__ __forceinline__ int RowInGroup(int half) const { return thread / 32 * 16 + thread % 32 / 4 + 8 * half; }

  __device__ __forceinline__ void SyncGroup() const { SyncNamed(group == 0 ? kGroup0 : kGroup1, kGroupThreads); }
  /// All four warps of both groups do.
  __device__ __forceinline__ void Release(uint64_t* empty) const {
    __syncwarp();
    if (thread % 32 == 0) Barrier{SharedAddress(empty)}.Arrive();
  }

  /// Index of a row of the tile into [tokens][query_heads].
  __device__ __forceinline__ size_t PlaceOf(const PrefillItem& item, int of_tile) const {
    const int group_heads = p.query_heads / p.kv_heads;
    return static_cast<size_t>(item.first_token + of_tile / group_heads) * p.query_heads + item.kv_head * group_heads +
           of_tile % group_heads;
  }

  __device__ __forceinline__ void LoadQueries(const PrefillItem& item, const void* from) const {
    constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = kGroupThreads / kChunks;
    const int group_heads = p.query_heads / p.kv_heads, rows = item.tokens * group_heads;
    const int chunk = thread % kChunks, first = thread / kChunks;
    uint8_t* const to = memory.queries[group][chunk / 8];
    SyncGroup();  // the tile before is done with them
#pragma unroll
    for (int i = 0; i < kGroupRows / kRowsAtOnce; ++i) {
      const int row = first + i * kRowsAtOnce, of_tile = group * kGroupRows + row;
      uint4 eight = {0, 0, 0, 0};
      if (of_tile < rows) {
        const size_t at = PlaceOf(item, of_tile);
        eight = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at * kHeadDim) + chunk);
      }
      *reinterpret_cast<uint4*>(to + row * 128 + (chunk % 8 ^ row % 8) * 16) = eight;
    }
    FenceForWgmma();
    SyncGroup();
  }

  template <int kColumns, bool kInBFloat16>
  __device__ __forceinline__ void BeginScores(uint32_t stage) {
    const uint32_t keys = SharedAddress(memory.keys[stage]), queries = SharedAddress(memory.queries[group]);
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      const uint32_t column = k % 4 * 32;
      MultiplyRows<kInBFloat16>(s, SwizzledMatrix(queries + k / 4 * kGroupRows * 128 + column, 0),
                                SwizzledMatrix(keys + k / 4 * Tile::kColumnBytes + column, 0), k > 0);
    }
    WgmmaCommit();
  }
  template <int kColumns, bool kInBFloat16>
  __device__ __forceinline__ void BeginOutputs(uint32_t stage, bool accumulate) {
    const uint32_t values = SharedAddress(memory.values[stage]);
#pragma unroll
    for (int k = 0; k < kPrefillPairTokens / 16; ++k) {
      const uint32_t a[4] = {weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3]};
      MultiplyColumns<kColumns, kInBFloat16>(o, a, SwizzledMatrix(values + k * 16 * 128, Tile::kColumnBytes),
                                             k > 0 || accumulate);
    }
    WgmmaCommit();
  }

  /// Scores that a row does not see become minus infinity.
  __device__ __forceinline__ void Mask(uint32_t n) {
#pragma unroll
    for (int page = 0; page < 2; ++page) {
      const PrefillView view = memory.pairs[n % kPrefillPairs].views[page];
      if (view.partial == 0) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool reads = token[half] >= view.begin && token[half] < view.end;
        const int seen = (reads ? token[half] + 1 - view.base : 0) - 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[32 * page + 4 * j + 2 * half + e];
            x = 8 * j + e < seen ? x : kMinusInfinity;
          }
        }
      }
    }
  }

  /// Scores to weights, in place; what the output so far is to be multiplied by.
  __device__ __forceinline__ void Softmax(float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i] = s[4 * (i / 2) + 2 * half + i % 2];
#pragma unroll
      for (int j = 2; j < kScores / 4; ++j) {
        top[j % 2 * 2] = fmaxf(top[j % 2 * 2], s[4 * j + 2 * half]);
        top[j % 2 * 2 + 1] = fmaxf(top[j % 2 * 2 + 1], s[4 * j + 2 * half + 1]);
      }
      float next = fmaxf(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])), max[half]);
      next = fmaxf(next, __shfl_xor_sync(kAllLanes, next, 1));
      next = fmaxf(next, __shfl_xor_sync(kAllLanes, next, 2));
      // A row may see nothing of these pages, and nothing before them either.
      const float origin = next == kMinusInfinity ? 0.f : next * ScaleOf(half);
      factor[half] = Exp2(max[half] * ScaleOf(half) - origin);
      max[half] = next;
      float sums[2] = {sum[half] * factor[half], 0};
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * half + e];
          x = Exp2(fmaf(x, ScaleOf(half), -origin));
          sums[e] += x;
        }
      }
      sum[half] = sums[0] + sums[1];
    }
  }
  template <bool kInBFloat16>
  __device__ __forceinline__ void RoundWeights() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i] = FromFloats(s[2 * i], s[2 * i + 1], kInBFloat16);
  }

  template <bool kInSpace>
  __device__ __forceinline__ void Write(const PrefillItem& item) const {
    const int t = thread % 4;
    uint16_t* out = static_cast<uint16_t*>(p.out);
    if constexpr (kInSpace) out = MappedRows<kHeadDim>(p).out;
    int columns = kHeadDim;
    if constexpr (kInSpace && !KeepsAllColumns<Encoded>()) columns = Encoded::OutputColumns(p, item.kv_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (token[half] >= item.tokens) continue;
      const size_t at = PlaceOf(item, group * kGroupRows + RowInGroup(half));
      // A row may read nothing in this form.
      const float n = kMaps && sum[half] == 0 ? 0.f : 1.f / sum[half];
      uint32_t* const to = reinterpret_cast<uint32_t*>(out + at * kHeadDim) + t;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const uint32_t two = FromFloats(o[4 * j + 2 * half] * n, o[4 * j + 2 * half + 1] * n, !kInSpace && kBFloat16);
        to[4 * j] = !kInSpace || 8 * j < columns ? two : 0;  // behind them is anything
      }
      if (t != 0) continue;
      const float lse = (max[half] + __log2f(sum[half])) * 0.693147181f;
      if constexpr (kMaps) {
        MappedRows<kHeadDim>(p).states[at].lse[static_cast<int>(kInSpace ? PageForm::kEncoded : PageForm::kRaw)] = lse;
      } else if (p.lse != nullptr) {
        p.lse[at] = lse;
      }
    }
  }

  /// Leaves this part; whoever comes last of a tile's parts has all of them then. max: of scores * log2 e.
  __device__ __forceinline__ bool Merge(const PrefillItem& item) {
    const int rows = group * kGroupRows;
    const auto partial = [&](uint32_t part) {
      return p.partial + (static_cast<size_t>(item.first_part + part) * kPrefillRows + rows) * kHeadDim + thread;
    };
    const auto state = [&](uint32_t part, int half) {
      return reinterpret_cast<float2*>(p.partial_state) + static_cast<size_t>(item.first_part + part) * kPrefillRows +
             rows + RowInGroup(half);
    };
    float* const mine = partial(item.part);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) __stcg(mine + i * kGroupThreads, o[i]);
    if (thread % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) __stcg(state(item.part, half), make_float2(max[half], sum[half]));
    }
    __threadfence();
    SyncGroup();
    uint32_t* const arrived = p.arrived + 2 * static_cast<size_t>(item.first_part) + group;
    if (thread == 0) memory.last[group] = atomicAdd(arrived, 1) + 1 == item.parts;
    SyncGroup();
    if (memory.last[group] == 0) return false;
    if (thread == 0) *arrived = 0;  // for the next launch
    __threadfence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = kMinusInfinity, sum[half] = 0;
      for (uint32_t k = 0; k < item.parts; ++k) max[half] = fmaxf(max[half], __ldcg(state(k, half)).x);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0;
    for (uint32_t k = 0; k < item.parts; ++k) {
      const float* const from = partial(k);
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 one = __ldcg(state(k, half));
        factor[half] = max[half] == kMinusInfinity ? 0.f : Exp2(one.x - max[half]);
        sum[half] += factor[half] * one.y;
      }
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] += factor[i / 2 % 2] * __ldcg(from + i * kGroupThreads);
    }
    return true;
  }

  template <bool kInSpace>
  __device__ __forceinline__ void End(const PrefillItem& item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] *= ScaleOf(half);
      sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
      sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
    }
    if (item.parts > 1 && !Merge(item)) return;
    Write<kInSpace>(item);
  }

  /// An item, whose first pair is n. kInSpace: its pages are encoded, and stand in a space of their own. kKeyColumns,
  /// kColumns: that products with keys and with values have; what is behind those that there are is zeros, or anything.
  template <bool kInSpace, int kKeyColumns, int kColumns>
  __device__ __forceinline__ void Attend(const PrefillItem& item, uint32_t& n) {
    constexpr bool kInBFloat16 = !kInSpace && kBFloat16;
    const auto stage_of = [](uint32_t pair) { return pair % Memory::kStages; };
    const auto parity_of = [](uint32_t pair) { return pair / Memory::kStages % 2; };
    const void* queries = p.q;
    if constexpr (kInSpace) queries = MappedRows<kHeadDim>(p).q;
    LoadQueries(item, queries);
    const int group_heads = p.query_heads / p.kv_heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_tile = group * kGroupRows + RowInGroup(half);
      token[half] = of_tile / group_heads;
      max[half] = kMinusInfinity, sum[half] = 0;
      if constexpr (kMaps) scales[half] = p.scale_log2;
      if constexpr (kInSpace) {
        if (token[half] < item.tokens) scales[half] *= MappedRows<kHeadDim>(p).states[PlaceOf(item, of_tile)].scale;
      }
    }
    const uint32_t first = n, end = n + (item.pages + 1) / 2;
    float factor[2];
    Barrier{SharedAddress(&memory.keys_full[stage_of(n)])}.Wait(parity_of(n));
    WgmmaFence();
    BeginScores<kKeyColumns, kInBFloat16>(stage_of(n));
    WgmmaWait<0>();
    Mask(n);
    Release(&memory.keys_empty[stage_of(n)]);
    Softmax(factor);
    RoundWeights<kInBFloat16>();
    for (++n; n < end; ++n) {
      const uint32_t stage = stage_of(n), before = stage_of(n - 1);
      Barrier{SharedAddress(&memory.keys_full[stage])}.Wait(parity_of(n));
      WgmmaFence();
      BeginScores<kKeyColumns, kInBFloat16>(stage);
      Barrier{SharedAddress(&memory.values_full[before])}.Wait(parity_of(n - 1));
      WgmmaFence();
      BeginOutputs<kColumns, kInBFloat16>(before, n - 1 > first);
      WgmmaWait<1>();
      Mask(n);
      Release(&memory.keys_empty[stage]);
      Softmax(factor);
      WgmmaWait<0>();
      Release(&memory.values_empty[before]);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) o[i] *= factor[i / 2 % 2];
      RoundWeights<kInBFloat16>();
    }
    Barrier{SharedAddress(&memory.values_full[stage_of(n - 1)])}.Wait(parity_of(n - 1));
    WgmmaFence();
    BeginOutputs<kColumns, kInBFloat16>(stage_of(n - 1), n - 1 > first);
    WgmmaWait<0>();
    Release(&memory.values_empty[stage_of(n - 1)]);
    End<kInSpace>(item);
  }

  __device__ __forceinline__ void Run() {
    PrefillItem item = ReadPrefillItem(p, blockIdx.x);
    if (item.pages == 0) return;
    uint32_t n = 0;  // pairs
    for (;;) {
      if constexpr (kMaps) {
        // By a value that the compiler knows to be the same in a warp.
        const uint32_t encoded = __shfl_sync(kAllLanes, static_cast<uint32_t>(p.runs[item.first_run].encoded), 0);
        if (encoded == 0) {
          Attend<false, kHeadDim, kHeadDim>(item, n);
        } else if constexpr (kHeadDim == 64 || KeepsAllColumns<Encoded>()) {
          Attend<true, kHeadDim, kHeadDim>(item, n);
        } else {
          const int wide = (Encoded::KeyColumns(p, item.kv_head) > 64 ? 2 : 0) +
                           (Encoded::OutputColumns(p, item.kv_head) > 64 ? 1 : 0);
          switch (__shfl_sync(kAllLanes, wide, 0)) {
            case 0:
              Attend<true, 64, 64>(item, n);
              break;
            case 1:
              Attend<true, 64, 128>(item, n);
              break;
            case 2:
              Attend<true, 128, 64>(item, n);
              break;
            default:
              Attend<true, 128, 128>(item, n);
          }
        }
      } else {
        Attend<false, kHeadDim, kHeadDim>(item, n);
      }
      if (item.next == 0) return;
      item = ReadPrefillItem(p, item.next);
    }
  }
};

// ---- the kernel ----

template <int kHeadDim, bool kBFloat16, class Encoded>
__global__ void __launch_bounds__(kPrefillThreads, 1) PrefillKernel(const __grid_constant__ PrefillParams p) {
  using Memory = PrefillMemory<kHeadDim, Encoded>;
  extern __shared__ __align__(1024) uint8_t shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Memory::kStages; ++i) {
      Barrier{SharedAddress(&memory.keys_full[i])}.Init(kGroupThreads);
      Barrier{SharedAddress(&memory.values_full[i])}.Init(kGroupThreads);
      Barrier{SharedAddress(&memory.keys_empty[i])}.Init(4 * kPrefillGroups);
      Barrier{SharedAddress(&memory.values_empty[i])}.Init(4 * kPrefillGroups);
    }
    for (uint32_t i = 0; i < kPrefillPairs; ++i) {
      Barrier{SharedAddress(&memory.pair_full[i])}.Init(1);
      Barrier{SharedAddress(&memory.pair_empty[i])}.Init(8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    FenceForWgmma();
  }
  __syncthreads();
  // By a value that the compiler knows to be the same in a warp: products must not stand where warps diverge.
  const uint32_t role = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);
  if (role >= 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    PrefillConsumer<kHeadDim, kBFloat16, Encoded>(p, memory).Run();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (role == 0) {
      PrefillProducer<kHeadDim, Encoded, 0>{p, memory}.Run();
    } else {
      PrefillProducer<kHeadDim, Encoded, 1>{p, memory}.Run();
    }
  }
}

/// From the template to functions. Encoded: a template of bfloat16 or not.
template <int kHeadDim, template <bool> class Encoded>
struct PrefillLaunch {
  template <bool kBFloat16>
  static constexpr auto kKernel = PrefillKernel<kHeadDim, kBFloat16, Encoded<kBFloat16>>;
  template <bool kBFloat16>
  static constexpr int kBytes = sizeof(PrefillMemory<kHeadDim, Encoded<kBFloat16>>);
  static_assert(kBytes<false> <= 227 * 1024 && kBytes<true> <= 227 * 1024, "what a block may have");

  static int Launch(const PrefillParams& params, int blocks, CUstream_st* stream) {
    if (params.bfloat16) {
      kKernel<true><<<blocks, kPrefillThreads, kBytes<true>, stream>>>(params);
    } else {
      kKernel<false><<<blocks, kPrefillThreads, kBytes<false>, stream>>>(params);
    }
    return cudaPeekAtLastError();
  }
  template <bool kBFloat16>
  static int PrepareOne() {
    return cudaFuncSetAttribute(kKernel<kBFloat16>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes<kBFloat16>);
  }
  static int Prepare() {
    const int error = PrepareOne<false>();
    return error != 0 ? error : PrepareOne<true>();
  }
  static constexpr PrefillKernels kKernels = {Launch, Prepare};
};

/// A cache without encoded pages.
template <bool kBFloat16>
struct NoEncodedPages {
  static constexpr int kRecordBytes = 0, kScratchBytes = 0;
  struct Side {
    __device__ __forceinline__ void Open(const PrefillParams&, int, int) {}
  };
  static __device__ __forceinline__ void Load(const PrefillParams&, int, const uint8_t*, const uint8_t*, uint32_t,
                                              uint32_t, Barrier) {}
};

}  // namespace kvmanager::device
