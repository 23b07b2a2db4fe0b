// Sparse selection of tokens by codes on a GPU: what SelectByCodes (selection.cc) computes, in its order and rounding,
// so that the same tokens come out. This file is built with -fmad=false; where a product is exact, fmaf says so.
//
// One or several blocks (a cluster) have a query token's KV head. Phase by phase, with a barrier of the cluster
// between:
//  1. Tables: products of the query rows with all centroids, packed as 16-bit entries, a vector of rows per centroid. A
//     centroid's vector stands in shared memory so often that lanes that look up together never meet in a bank.
//  2. A warp takes runs of kWeightRun tokens: sums of entries in registers, the run's least, weights relative to it (to
//     scratch memory), their 32 sums.
//  3. Sums over the runs; each token's weight summed over the group, and a histogram of its upper 12 bits.
//  4. The k-th largest weight, by 10 and 9 bits more.
//  5. Tokens above it, and the first of those that equal it, in order, as rows of K.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_kernels.h"
#include "codecs/pq/pq_select_tables_device.cuh"

namespace kvmanager::pq {
namespace {

namespace cg = cooperative_groups;

constexpr int kSteps = kWeightRun / 32;  // tokens of a run that a lane has
constexpr int kHalf = 8, kQuarter = 4;   // of these, taken at once
static_assert(kSteps % kHalf == 0);
// Of a weight's bits: 12, then 10, then 9.
constexpr int kBins0 = 4096, kBins1 = 1024, kBins2 = 512;
constexpr int kBinsAll = kBins0 + kBins1 + kBins2;
// Where one block has the whole head, counts of its runs and the tokens it chose take the place of the bins, if they
// fit there.
constexpr uint32_t kNearRuns = 512, kNearTokens = kBinsAll - 2 * kNearRuns;

struct RunSum {
  float sum;
  uint32_t least;
};
struct RunCounts {
  uint32_t above, equal;
};

// ---- scratch memory: parts in the order of their alignment ----

__host__ __device__ inline size_t WeightBytes(const DeviceShape& shape) {  // of a token, in bfloat16
  const int pairs = PairsOf(shape);
  return size_t((shape.group() + 2 * pairs - 1) / (2 * pairs)) * pairs * 4;
}
struct Scratch {
  size_t weights_at, totals_at, sums_at, counts_at, bytes;
  __host__ __device__ Scratch(const DeviceShape& shape, size_t runs) {
    weights_at = 0;
    totals_at = weights_at + runs * kWeightRun * WeightBytes(shape);
    sums_at = totals_at + runs * kWeightRun * sizeof(float);
    counts_at = sums_at + runs * sizeof(RunSum) * shape.group();
    bytes = counts_at + runs * sizeof(RunCounts);
  }
};

// ---- weights ----

constexpr uint32_t kTwice = 0x00010001u;
constexpr uint32_t kMost = kOctavesKept * kUnitsPerOctave;

/// ExpBits of two distances.
__device__ __forceinline__ uint32_t ExpBits(uint32_t distances) {
  const uint32_t x = 127u * kUnitsPerOctave * kTwice - distances;
  const uint32_t f = x & (kUnitsPerOctave - 1) * kTwice;
  // 16 times f (1408 - 11 f) + 2048, whose upper half is then the correction.
  const uint32_t u = 16 * 11u * kUnitsPerOctave * kTwice - 16 * 11u * f;
  const uint32_t low = __dp2a_lo(u, f, 32768u), high = __dp2a_hi(u, f << 8, 32768u);
  return x - __byte_perm(low, high, 0x7632);
}
__device__ __forceinline__ uint32_t Shifted(uint32_t distance, int shift) {
  if (shift == 0) return distance;
  return min(distance, (kMost >> shift) + 1) << shift;
}
template <bool kShift>
__device__ __forceinline__ uint32_t WeightsOf(uint32_t sums, uint32_t least, const int (&shifts)[2]) {
  uint32_t distances = sums - least;  // neither half borrows
  if constexpr (kShift) {
    distances = Shifted(distances & 0xffff, shifts[0]) | Shifted(distances >> 16, shifts[1]) << 16;
  }
  return ExpBits(__vminu2(distances, kMost * kTwice));
}
__device__ __forceinline__ float LowOf(uint32_t two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float HighOf(uint32_t two) { return __uint_as_float(two & 0xffff0000u); }

template <int kPairs>
__device__ __forceinline__ Packed<kPairs> ReadOnce(const Packed<kPairs>* from) {
  Packed<kPairs> to;
  if constexpr (kPairs == 1) {
    to.of[0] = __ldcs(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kPairs == 2) {
    const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from));
    to.of[0] = x.x, to.of[1] = x.y;
  } else {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from));
    to.of[0] = x.x, to.of[1] = x.y, to.of[2] = x.z, to.of[3] = x.w;
  }
  return to;
}

/// 2^-octaves from a run's least sum to the best one.
__device__ __forceinline__ float RunFactor(uint32_t least, uint32_t best, int shift) {
  const unsigned long long octaves = (static_cast<unsigned long long>(least - best) << shift) / kUnitsPerOctave;
  return __uint_as_float((127u - uint32_t(min(octaves, static_cast<unsigned long long>(kOctavesKept)))) << 23);
}

/// A query token's KV head.
struct Head {
  const SelectParams& p;
  const DeviceSelect& query;
  int head;
  uint32_t runs;
  size_t first_run;

  __device__ __forceinline__ Head(const SelectParams& params, const DeviceSelect& of, int kv_head)
      : p(params),
        query(of),
        head(kv_head),
        runs(SelectRuns(of.middle)),
        first_run(of.first_run + size_t(runs) * kv_head) {}
  __device__ __forceinline__ RunSum* sums(int row) const {
    const Scratch at(p.shape, p.runs);
    return reinterpret_cast<RunSum*>(p.scratch + at.sums_at) + first_run * p.shape.group() + size_t(row) * runs;
  }
  __device__ __forceinline__ RunCounts* counts() const {
    const Scratch at(p.shape, p.runs);
    return reinterpret_cast<RunCounts*>(p.scratch + at.counts_at) + first_run;
  }
  /// Of the rows from 2 kPairs * group_part on: [runs * kWeightRun].
  template <int kPairs>
  __device__ __forceinline__ Packed<kPairs>* weights(int part) const {
    return reinterpret_cast<Packed<kPairs>*>(p.scratch + first_run * kWeightRun * WeightBytes(p.shape)) +
           size_t(part) * runs * kWeightRun;
  }
  __device__ __forceinline__ float* totals() const {
    const Scratch at(p.shape, p.runs);
    return reinterpret_cast<float*>(p.scratch + at.totals_at) + first_run * kWeightRun;
  }
  __device__ __forceinline__ const uint32_t* ChunkAt(uint32_t chunk) const {
    return reinterpret_cast<const uint32_t*>(InIndex(p, query.index + 1 + chunk));
  }
  /// The row of K of a token: its unit. No branch stands before its loads, so that several overlap.
  __device__ __forceinline__ uint32_t UnitOfToken(uint32_t token) const {
    const DeviceShape& shape = p.shape;
    const int page_shift = __ffs(shape.page_tokens) - 1;  // they divide a block
    uint32_t unit = __ldg(p.slots + query.table + (token >> page_shift));
    if (query.cached != nullptr) {
      const uint32_t block = token / kDeviceBlockTokens;
      const uint32_t copy =
          __ldcg(query.cached + size_t(head) * query.cached_stride + min(block, query.cached_stride - 1));
      const uint32_t in_block = (token % kDeviceBlockTokens) >> page_shift;
      const uint32_t page_units =
          uint32_t(size_t(4) * shape.kv_heads * shape.page_tokens * shape.head_dim / kRowUnitBytes);
      if (copy != kNoUnit && block < query.cached_stride) unit = copy + in_block * page_units;
    }
    const uint32_t at = token & (shape.page_tokens - 1);
    return unit + uint32_t(size_t(head * shape.page_tokens + at) * shape.head_dim * 2 / kRowUnitBytes);
  }
  struct Entry {
    uint32_t at, token;
  };
  /// Entries entry_of(i) of the list become their tokens' rows: every `step`-th i below `end`, from `first` on.
  template <typename EntryOf>
  __device__ __forceinline__ void Fill(uint32_t* list, uint32_t first, uint32_t end, uint32_t step,
                                       EntryOf entry_of) const {
    constexpr int kTogether = 4;
#pragma unroll 1
    for (uint32_t i = first; i < end; i += kTogether * step) {
      Entry entry[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) entry[u] = entry_of(i + u * step < end ? i + u * step : i);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) entry[u].token = UnitOfToken(entry[u].token);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (i + u * step < end) list[entry[u].at] = entry[u].token;
      }
    }
  }
};

/// Weights of one run of one part of the rows, and their sums, by a warp: lane l has tokens l, l + 32, ...
template <int kPairs, bool kWide, bool kShift>
__device__ __forceinline__ void WeighRun(const Head& h, const Tables<kPairs, kWide>& tables, const Rows<kPairs>& rows,
                                         int part, uint32_t run) {
  constexpr int kTogether = 8;  // words that are read at once
  const int lane = threadIdx.x % 32;
  const uint32_t middle = h.query.middle, first = run * uint32_t(kWeightRun);
  const uint32_t token = h.query.sinks + first, chunk = token / kCodeChunkTokens;
  const uint32_t last_chunk = (h.query.sinks + min(first + uint32_t(kWeightRun), middle) - 1) / kCodeChunkTokens;
  const bool straight = last_chunk == chunk && first + uint32_t(kWeightRun) <= middle;
  Packed<kPairs> sum[kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) sum[k] = {};
  const int all_words = kWide ? 1 : h.p.shape.words();
#pragma unroll 1
  for (int w = 0; w < all_words; ++w) {
    const size_t at = (size_t(h.head) * h.p.shape.words() + w) * kCodeChunkTokens;
    // Token t's word stands at base[t], of the first or of the second chunk. Beyond the middle the last token stands
    // in: the least stays what it is.
    const uint32_t* const base0 = h.ChunkAt(chunk) + at - size_t(chunk) * kCodeChunkTokens;
    const uint32_t* const base1 = h.ChunkAt(last_chunk) + at - size_t(last_chunk) * kCodeChunkTokens;
    const uint32_t boundary = (chunk + 1) * kCodeChunkTokens;
#pragma unroll
    for (int half = 0; half < kSteps; half += kTogether) {
      uint32_t word[kTogether];
      if (straight) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) word[k] = __ldcs(base0 + token + lane + 32 * (half + k));
      } else {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const uint32_t t = h.query.sinks + min(first + 32 * (half + k) + lane, middle - 1);
          word[k] = __ldcs((t < boundary ? base0 : base1) + t);
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) tables.AddWord(word[k], kCodesOfWord * w, sum[half + k]);
    }
  }
  uint32_t least[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    least[i] = sum[0].of[i];
#pragma unroll
    for (int k = 1; k < kSteps; ++k) least[i] = __vminu2(least[i], sum[k].of[i]);
  }
  float parts[2 * kPairs] = {};
  int shifts[kPairs][2];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) least[i] = __vminu2(least[i], __shfl_xor_sync(kAll, least[i], mask));
    uint32_t whole = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      shifts[i][j] = kShift ? rows.units[2 * i + j].shift : 0;
      whole |= (0xffffu & ~uint32_t((kUnitsPerOctave - 1) >> shifts[i][j])) << 16 * j;
    }
    least[i] &= whole;
  }
  Packed<kPairs>* const to = h.weights<kPairs>(part) + first;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const uint32_t kept = first + 32 * k + lane < middle ? kAll : 0;
    Packed<kPairs> e;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      e.of[i] = WeightsOf<kShift>(sum[k].of[i], least[i], shifts[i]) & kept;
      parts[2 * i] += LowOf(e.of[i]);
      parts[2 * i + 1] += HighOf(e.of[i]);
    }
    to[32 * k + lane] = e;
  }
#pragma unroll
  for (int r = 0; r < 2 * kPairs; ++r) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) parts[r] += __shfl_xor_sync(kAll, parts[r], mask);
    const int row = part * 2 * kPairs + r;
    if (lane == 0 && row < h.p.shape.group()) {
      h.sums(row)[run] = {parts[r], r % 2 == 0 ? least[r / 2] & 0xffff : least[r / 2] >> 16};
    }
  }
}

/// Of `bins` counts, the one that the k-th largest is in, and how many are in larger ones. All threads.
struct Found {
  uint32_t bin, above;
};
template <int kThreads, int kCount>
__device__ Found FindBin(const uint32_t* bins, uint32_t k, uint32_t* warp_sums, Found* found) {
  constexpr int kEach = kCount > kThreads ? kCount / kThreads : 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t mine[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int bin = kCount - 1 - int(threadIdx.x * kEach + i);
    sum += mine[i] = bin >= 0 ? bins[bin] : 0;
  }
  uint32_t before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) warp_sums[warp] = before;
  __syncthreads();
  static_assert(kThreads <= 32 * 32);
  before += __reduce_add_sync(kAll, lane < warp ? warp_sums[lane] : 0) - sum;
  if (before < k && k <= before + sum) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (before < k && k <= before + mine[i]) *found = {uint32_t(kCount - 1 - (threadIdx.x * kEach + i)), before};
      before += mine[i];
    }
  }
  __syncthreads();
  return *found;
}

template <int kPairs, bool kWide>
__global__ void __launch_bounds__(ThreadsFor(kPairs), 1)
    Select(const __grid_constant__ SelectParams p, int blocks, bool totals_in_shared) {
  constexpr int kThreads = ThreadsFor(kPairs), kWarps = kThreads / 32;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Rows<kPairs> rows;
  __shared__ float factor[kDeviceRowsMax];
  __shared__ uint32_t best[kDeviceRowsMax];
  __shared__ int shifts[kDeviceRowsMax];
  __shared__ uint32_t warp_sums[kWarps];
  __shared__ Found found;
  __shared__ uint32_t places[2];
  const cg::cluster_group cluster = cg::this_cluster();
  const auto all = [&]() {
    if (blocks == 1) {
      __syncthreads();
    } else {
      cluster.sync();
    }
  };
  const int rank = int(blockIdx.x) % blocks, pair = int(blockIdx.x) / blocks;
  const DeviceSelect query = p.queries[pair / p.shape.kv_heads];
  const Head h(p, query, pair % p.shape.kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.shape.group();
  const uint32_t each = (h.runs + blocks - 1) / blocks;
  const uint32_t first_run = min(h.runs, rank * each), end_run = min(h.runs, first_run + each);

  // Centroids come while this waits, for the kernel before or for the first of them; then codes, while tables are made.
  if (query.chosen > 0) {
    const uint32_t book_bytes = p.shape.head_dim * p.shape.count() * uint32_t(sizeof(float));
    const uint8_t* const book = InIndex(p, query.index) + size_t(h.head) * book_bytes;
    for (uint32_t at = threadIdx.x * 128; at < book_bytes; at += kThreads * 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(book + at));
    }
  }
  const auto prefetch_codes = [&]() {
    if (end_run == first_run) return;
    const uint32_t first = (query.sinks + first_run * uint32_t(kWeightRun)) / 32;
    const uint32_t end = (query.sinks + min(end_run * uint32_t(kWeightRun), query.middle) + 31) / 32;
    for (int w = 0; w < p.shape.words(); ++w) {
      for (uint32_t i = first + threadIdx.x; i < end; i += kThreads) {
        const uint32_t* const line = h.ChunkAt(i * 32 / kCodeChunkTokens) +
                                     (size_t(h.head) * p.shape.words() + w) * kCodeChunkTokens +
                                     i * 32 % kCodeChunkTokens;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
      }
    }
  };
  if (p.early) asm volatile("griddepcontrol.wait;" ::: "memory");
  // The list: sinks, what is chosen, what is local, and what stands behind the last row.
  uint32_t* const list = p.rows + query.list + size_t(h.head) * query.list_stride;
  const uint32_t local_at = query.sinks + query.chosen, count = local_at + query.local;
  uint32_t* const bins = reinterpret_cast<uint32_t*>(shared);
  RunCounts* const near_counts = reinterpret_cast<RunCounts*>(bins);
  uint32_t* const near_tokens = bins + 2 * kNearRuns;
  const bool counts_near = blocks == 1 && h.runs <= kNearRuns;
  const bool tokens_near = counts_near && query.chosen <= kNearTokens;
  const auto choose = [&]() {
    const TableLayout layout(p.shape, kPairs);
    for (int part = 0; part * 2 * kPairs < group; ++part) {
      MakeTables<kPairs>(p, query, h.head, part * 2 * kPairs, layout, shared, rows, [&]() {
        if (part == 0) prefetch_codes();
      });
      const Tables<kPairs, kWide> tables(p.shape, layout, shared);
      bool shifted = false;
#pragma unroll
      for (int r = 0; r < 2 * kPairs; ++r) shifted |= rows.units[r].shift != 0;
      for (uint32_t run = first_run + warp; run < end_run; run += kWarps) {
        if (shifted) {
          WeighRun<kPairs, kWide, true>(h, tables, rows, part, run);
        } else {
          WeighRun<kPairs, kWide, false>(h, tables, rows, part, run);
        }
      }
      if (threadIdx.x < 2 * kPairs && part * 2 * kPairs + threadIdx.x < group) {
        shifts[part * 2 * kPairs + threadIdx.x] = rows.units[threadIdx.x].shift;
      }
      __syncthreads();
    }
    // Tables are not needed any more. Weights of this block's runs:
    float* const near_totals = reinterpret_cast<float*>(shared + kBinsAll * 4);
    float* const far_totals = h.totals() + size_t(first_run) * kWeightRun;
    for (int i = threadIdx.x; i < kBinsAll; i += kThreads) bins[i] = 0;
    if (blocks > 1) __threadfence();
    all();

    // Each row's sum over all runs, in order: a warp has a row, and its first lane adds.
    for (int r = warp; r < group; r += kWarps) {
      constexpr int kTogether = 2;
      const auto* const of = reinterpret_cast<const float2*>(h.sums(r));
      float2 one[kTogether];
      const auto read = [&](uint32_t run) {
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const uint32_t at = run + 32 * u + lane;
          one[u] = at < h.runs ? __ldcg(of + at) : float2{0, __uint_as_float(kAll)};
        }
      };
      uint32_t low = kAll;
      for (uint32_t run = 0; run < h.runs; run += 32 * kTogether) {
        read(run);
#pragma unroll
        for (int u = 0; u < kTogether; ++u) low = min(low, __float_as_uint(one[u].y));
      }
      low = __reduce_min_sync(kAll, low);
      float sum = 0;
      for (uint32_t run = 0; run < h.runs; run += 32 * kTogether) {
        if (h.runs > 32 * kTogether) read(run);
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          // Zeros beyond the last run change nothing.
          const float x = one[u].x * RunFactor(__float_as_uint(one[u].y), low, shifts[r]);
#pragma unroll
          for (int i = 0; i < 32; ++i) sum += __shfl_sync(kAll, x, i);
        }
      }
      if (lane == 0) {
        factor[r] = __uint_as_float(__float_as_uint(1.0f / sum) & 0xffffff00u);
        best[r] = low;
      }
    }
    __syncthreads();

    // Weights summed over the group. An exact product, so fmaf rounds as a product and a sum do. Loops are kept short
    // from here on: what runs once or twice is fetched as instructions first.
    for (uint32_t run = first_run + warp; run < end_run; run += kWarps) {
      const uint32_t first = run * uint32_t(kWeightRun);
      const uint32_t least = lane < group ? __ldcg(&h.sums(lane)[run].least) : 0;
#pragma unroll 1
      for (int half = 0; half < kSteps; half += kHalf) {
        float total[kHalf] = {};
#pragma unroll 1
        for (int part = 0; part * 2 * kPairs < group; ++part) {
          const Packed<kPairs>* const from = h.weights<kPairs>(part) + first + 32 * half + lane;
          Packed<kPairs> e[kHalf];
#pragma unroll
          for (int k = 0; k < kHalf; ++k) e[k] = ReadOnce(from + 32 * k);
          // Lane r's: row r's factor in this run; 0 beyond the group.
          const float mine = lane < group ? factor[lane] * RunFactor(least, best[lane], shifts[lane]) : 0;
          float factors[2 * kPairs];
#pragma unroll
          for (int r = 0; r < 2 * kPairs; ++r) factors[r] = __shfl_sync(kAll, mine, (part * 2 * kPairs + r) & 31);
#pragma unroll
          for (int k = 0; k < kHalf; ++k) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
              total[k] = fmaf(LowOf(e[k].of[i]), factors[2 * i], total[k]);
              total[k] = fmaf(HighOf(e[k].of[i]), factors[2 * i + 1], total[k]);
            }
          }
        }
        float* const to = (totals_in_shared ? near_totals : far_totals) + (run - first_run) * uint32_t(kWeightRun);
#pragma unroll
        for (int k = 0; k < kHalf; ++k) to[32 * (half + k) + lane] = total[k];
#pragma unroll
        for (int k = 0; k < kHalf; ++k) {
          if (first + 32 * (half + k) + lane < query.middle) atomicAdd(&bins[__float_as_uint(total[k]) >> 19], 1u);
        }
      }
    }

    // The k-th largest.
    uint32_t k = query.chosen, threshold = 0;
    uint32_t* const leader = blocks == 1 ? bins : cluster.map_shared_rank(bins, 0);
    const auto gather = [&](int at, int n) {
      all();
      if (blocks == 1) return;
      if (rank != 0) {
        for (int i = at + threadIdx.x; i < at + n; i += kThreads) {
          if (bins[i] != 0) atomicAdd(leader + i, bins[i]);
        }
      }
      cluster.sync();
      // The others' own counts are not needed any more.
      if (rank != 0) {
        for (int i = at + threadIdx.x; i < at + n; i += kThreads) bins[i] = leader[i];
      }
      __syncthreads();
    };
    // Some of a run's weights as bits; 0 beyond the middle, below any weight.
    const auto bits_of = [&](uint32_t run, int from, uint32_t(&bits)[kQuarter]) {
      const uint32_t at = (run - first_run) * uint32_t(kWeightRun) + 32 * from + lane;
      if (totals_in_shared) {
#pragma unroll
        for (int i = 0; i < kQuarter; ++i) bits[i] = __float_as_uint(near_totals[at + 32 * i]);
      } else {
#pragma unroll
        for (int i = 0; i < kQuarter; ++i) bits[i] = __float_as_uint(far_totals[at + 32 * i]);
      }
    };
    const auto refine = [&](int at, int prefix_shift, int shift, uint32_t mask) {
      for (uint32_t run = first_run + warp; run < end_run; run += kWarps) {
#pragma unroll 1
        for (int from = 0; from < kSteps; from += kQuarter) {
          uint32_t bits[kQuarter];
          bits_of(run, from, bits);
#pragma unroll
          for (int i = 0; i < kQuarter; ++i) {
            if (bits[i] >> prefix_shift == threshold) atomicAdd(&bins[at + (bits[i] >> shift & mask)], 1u);
          }
        }
      }
    };
    gather(0, kBins0);
    Found at = FindBin<kThreads, kBins0>(bins, k, warp_sums, &found);
    threshold = at.bin, k -= at.above;
    refine(kBins0, 19, 9, 1023);
    gather(kBins0, kBins1);
    at = FindBin<kThreads, kBins1>(bins + kBins0, k, warp_sums, &found);
    threshold = threshold << 10 | at.bin, k -= at.above;
    refine(kBins0 + kBins1, 9, 0, 511);
    gather(kBins0 + kBins1, kBins2);
    at = FindBin<kThreads, kBins2>(bins + kBins0 + kBins1, k, warp_sums, &found);
    threshold = threshold << 9 | at.bin, k -= at.above;  // k: of those that equal it

    for (uint32_t run = first_run + warp; run < end_run; run += kWarps) {
      RunCounts counts = {0, 0};
#pragma unroll 1
      for (int from = 0; from < kSteps; from += kQuarter) {
        uint32_t bits[kQuarter];
        bits_of(run, from, bits);
#pragma unroll
        for (int i = 0; i < kQuarter; ++i) {
          counts.above += bits[i] > threshold;
          counts.equal += bits[i] == threshold;
        }
      }
      counts.above = __reduce_add_sync(kAll, counts.above), counts.equal = __reduce_add_sync(kAll, counts.equal);
      if (lane == 0) {
        if (counts_near) {
          near_counts[run] = counts;
        } else {
          h.counts()[run] = counts;
        }
      }
    }
    if (blocks > 1) __threadfence();
    all();
    // How many are before a run: above the threshold, and equal to it.
    const auto before = [&](uint32_t run) {
      RunCounts sum = {0, 0};
      for (uint32_t i = lane; i < run; i += 32) {
        const auto* const far = reinterpret_cast<const uint2*>(h.counts() + i);
        const uint2 one = counts_near ? reinterpret_cast<const uint2*>(near_counts)[i] : __ldcg(far);
        sum.above += one.x, sum.equal += one.y;
      }
      return RunCounts{__reduce_add_sync(kAll, sum.above), __reduce_add_sync(kAll, sum.equal)};
    };
    // Tokens first, then their rows: the loads of many overlap.
    for (uint32_t run = first_run + warp; run < end_run; run += kWarps) {
      RunCounts n = before(run);
      const uint32_t lower = (1u << lane) - 1;
#pragma unroll 1
      for (int from = 0; from < kSteps; from += kQuarter) {
        uint32_t bits[kQuarter];
        bits_of(run, from, bits);
#pragma unroll
        for (int i = 0; i < kQuarter; ++i) {
          const bool over = bits[i] > threshold, same = bits[i] == threshold;
          const uint32_t overs = __ballot_sync(kAll, over), sames = __ballot_sync(kAll, same);
          const uint32_t same_before = n.equal + __popc(sames & lower);
          const uint32_t place = n.above + __popc(overs & lower) + min(same_before, k);
          const uint32_t token = query.sinks + run * uint32_t(kWeightRun) + 32 * (from + i) + lane;
          if (over || (same && same_before < k)) {
            if (tokens_near) {
              near_tokens[place] = token;
            } else {
              list[query.sinks + place] = token;
            }
          }
          n.above += __popc(overs), n.equal += __popc(sames);
        }
      }
    }
    if (blocks == 1) {
      if (threadIdx.x == 0) places[0] = 0, places[1] = query.chosen;
    } else if (warp < 2) {
      const RunCounts n = before(warp == 0 ? first_run : end_run);
      if (lane == 0) places[warp] = n.above + min(n.equal, k);
    }
  };
  if (query.chosen > 0) {
    choose();
  } else if (threadIdx.x < 2) {
    places[threadIdx.x] = 0;
  }
  __syncthreads();
  // What this block chose, and its share of what is read in any case.
  const uint32_t first = places[0], own = places[1] - first, others = query.list_stride - query.chosen;
  uint32_t* const chosen = p.chosen == nullptr ? nullptr : p.chosen + query.list + size_t(h.head) * query.list_stride;
  h.Fill(list, threadIdx.x, own + (others + blocks - 1 - rank) / blocks, kThreads, [&](uint32_t i) {
    if (i < own) {
      const uint32_t at = query.sinks + first + i, token = tokens_near ? near_tokens[first + i] : __ldcg(list + at);
      if (chosen != nullptr) chosen[first + i] = token;
      return Head::Entry{at, token};
    }
    const uint32_t other = (i - own) * blocks + rank;
    if (other < query.sinks) return Head::Entry{other, other};
    const uint32_t at = other + query.chosen;
    return Head::Entry{at, at < count ? query.middle + other : 0};
  });
  if (blocks > 1) cluster.sync();  // nobody reads this block's counts any more
}

template <typename Do>
int WithKernel(const DeviceShape& shape, Do run) {
  const int pairs = PairsOf(shape);
  const bool wide = TableLayout(shape, pairs).wide;
  if (pairs == 1) return wide ? run(Select<1, true>) : run(Select<1, false>);
  if (pairs == 2) return wide ? run(Select<2, true>) : run(Select<2, false>);
  return wide ? run(Select<4, true>) : run(Select<4, false>);
}

}  // namespace

size_t SelectScratchBytes(const DeviceShape& shape, uint32_t runs) { return Scratch(shape, runs).bytes; }

bool CanSelectOnDevice(const DeviceShape& shape) {
  if (shape.group() > kDeviceRowsMax || shape.head_dim * 2 % int(kRowUnitBytes) != 0) return false;
  if (int(kDeviceBlockTokens) % shape.page_tokens != 0) return false;
  return TableLayout(shape, PairsOf(shape)).reach <= kSharedMax;
}

int PrepareSelect() {
  for (const auto kernel :
       {Select<1, true>, Select<1, false>, Select<2, true>, Select<2, false>, Select<4, true>, Select<4, false>}) {
    const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMax);
    if (error != 0) return error;
  }
  return 0;
}

int SelectBlocks(const DeviceShape& shape, uint32_t count, uint32_t middle_max, int multiprocessors) {
  const uint32_t pairs = count * shape.kv_heads, runs = SelectRuns(middle_max);
  const int warps = 16;
  int blocks = 1;
  while (blocks < 8 && pairs * 2 * blocks <= uint32_t(multiprocessors) && runs >= uint32_t(warps * blocks)) blocks *= 2;
  return blocks;
}

int LaunchPqSelect(const SelectParams& params, int blocks, uint32_t middle_max, CUstream_st* stream) {
  if (params.count == 0) return 0;
  const uint32_t tables = TableLayout(params.shape, PairsOf(params.shape)).reach;
  const uint32_t each = (SelectRuns(middle_max) + blocks - 1) / blocks;
  const uint64_t totals = kBinsAll * 4 + uint64_t{each} * kWeightRun * sizeof(float);
  const uint32_t most = kSharedMax;
  const bool in_shared = totals <= most;
  uint32_t bytes = tables > kBinsAll * 4 ? tables : kBinsAll * 4;
  if (in_shared && totals > bytes) bytes = uint32_t(totals);
  if (bytes > most) return cudaErrorInvalidConfiguration;
  return WithKernel(params.shape, [&](auto kernel) {
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (blocks > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count].val.clusterDim.x = blocks;
      attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
      ++count;
    }
    if (params.early) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params.count * params.shape.kv_heads * blocks);
    config.blockDim = dim3(ThreadsFor(PairsOf(params.shape)));
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return int(cudaLaunchKernelEx(&config, kernel, params, blocks, in_shared));
  });
}

}  // namespace kvmanager::pq
