// Attention by many query tokens over pages of any form: what every codec's kernel shares.
//
// A block of threads, one to a multiprocessor, works through tiles of 128 rows (prefill_params.h). Four warps bring K
// and four bring V, two pages at a time, as float16 or bfloat16 into shared memory, swizzled as wgmma reads them: K and
// V are wanted and given back at different times. Two groups of four warps have 64 rows each, their scores and outputs
// in registers. While a group's softmax of two pages runs, its product with the two pages before does. Products are the
// raw form's for all pages: encoded ones are decoded on their way.
//
// `Encoded` says how pages of a codec are read:
//
//   kRecordBytes: that a head of a page has at most, a multiple of 16; 0: there are no encoded pages.
//
//   Load(params, kv_head, pages, places, barrier): begins copies of the head's records of two pages, of which one may
//   be nullptr; one lane calls it, and arrives once.
//
//   Side: what a thread knows of K's or V's pages. Open(params, kv_head, side) before pages of that head;
//   FillKeys(record, tile, first_token, scratch) or FillValues: by all lanes of four warps, each a quarter of the
//   channels; row first_token + t of the tile becomes token t of the page. scratch: kScratchBytes of the warp's own,
//   16-byte aligned, another one for the next page.
#pragma once

#include <cuda_runtime.h>

#include "codecs/device/attend_device.cuh"
#include "codecs/device/prefill_params.h"
#include "codecs/device/wgmma_device.cuh"

namespace kvmanager::device {

inline constexpr int kPrefillStages = 2;      // of pairs of pages, K and V each
inline constexpr uint32_t kPrefillAhead = 3;  // pairs of records: of encoded pages
inline constexpr uint32_t kPrefillPairs = 8;  // pairs that are known: those ahead, and those that are attended to
inline constexpr int kPrefillPairTokens = 2 * kPrefillPageTokens;
inline constexpr int kPrefillGroups = 2;  // of four warps that attend
inline constexpr int kGroupRows = kPrefillRows / kPrefillGroups;
inline constexpr int kGroupThreads = 128;
inline constexpr int kPrefillThreads = (2 + kPrefillGroups) * kGroupThreads;
// Of 128 that each of 512 threads begins with.
inline constexpr int kProducerRegisters = 64, kConsumerRegisters = 192;
static_assert(2 * kProducerRegisters + kPrefillGroups * kConsumerRegisters == 4 * 128);

/// Barriers of some of the block's warps.
enum NamedBarrier : int { kGroup0 = 1, kGroup1 };
__device__ __forceinline__ void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
/// What this thread stored to shared memory comes before what wgmma reads behind the next barrier.
__device__ __forceinline__ void FenceForWgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// 16 bytes by one lane, or zeros.
__device__ __forceinline__ void CopyOrZero(uint32_t to, const void* from, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(copy ? 16 : 0) : "memory");
}

/// Two pages' K, or V, of one head: tokens are rows of 128 bytes, 64 channels each, swizzled as SwizzledMatrix says;
/// further channels behind all rows.
template <int kHeadDim>
struct PrefillTile {
  static constexpr int kColumnBytes = kPrefillPairTokens * 128, kBytes = kHeadDim / 64 * kColumnBytes;
  /// Offset of chunk `chunk` (8 channels) of a token.
  static __device__ __forceinline__ uint32_t At(int token, int chunk) {
    return chunk / 8 * kColumnBytes + token * 128 + (chunk % 8 ^ token % 8) * 16;
  }
};

/// A page as a tile's rows see it.
struct PrefillView {
  int base;        // of its first token, from the position of the tile's first token
  int begin, end;  // the tile's tokens that read it
  int partial;     // some row of the tile does not see all of it
};

// ---- the pages of a block's items ----

/// Two pages, in shared memory, for those who bring them and those who attend.
struct PrefillPair {
  PrefillView views[2];
  uint32_t slots[2];
  int tokens[2];  // that some row of the tile may see: 0 of a page that is not there
  int encoded;    // bit h: page h is
  int kv_head;
  int end;  // there are no more
};

__device__ __forceinline__ PrefillItem ReadPrefillItem(const PrefillParams& p, uint32_t index) {
  PrefillItem item;
  const uint4* const from = reinterpret_cast<const uint4*>(p.items + index);
  reinterpret_cast<uint4*>(&item)[0] = __ldg(from);
  reinterpret_cast<uint4*>(&item)[1] = __ldg(from + 1);
  return item;
}

/// Walks a block's pages in pairs; each item begins with a new pair. A warp does so together, and keeps it in shared
/// memory between pairs.
struct PrefillWalker {
  static constexpr uint32_t kSlots = 32;  // that are read at once

  uint32_t next;  // item
  uint32_t run;   // behind the current one
  uint32_t left;  // pages of the item
  uint32_t of_run, at, position, cached;
  uint32_t first_position;
  uint32_t tokens_begin_end;  // of the run
  int tokens, kv_head, encoded;

  __device__ __forceinline__ void Open(const PrefillParams& p, uint32_t index) {
    const PrefillItem item = ReadPrefillItem(p, index);
    next = item.next, run = item.first_run, left = item.pages;
    first_position = item.first_position, tokens = item.tokens, kv_head = item.kv_head;
    if (left > 0) NextRun(p, item.skip);
  }
  __device__ __forceinline__ void NextRun(const PrefillParams& p, uint32_t skip) {
    uint4 words = __ldg(reinterpret_cast<const uint4*>(p.runs + run++));
    while (skip >= (words.y & 0x7fffffffu)) {
      skip -= words.y & 0x7fffffffu;
      words = __ldg(reinterpret_cast<const uint4*>(p.runs + run++));
    }
    at = words.x + skip, of_run = (words.y & 0x7fffffffu) - skip, encoded = words.y >> 31;
    position = words.z + skip * kPrefillPageTokens, tokens_begin_end = words.w;
    cached = at - kSlots;
  }
  /// Page h of *pair. slots: [kSlots] those from `cached` on.
  __device__ __forceinline__ void Take(const PrefillParams& p, int h, uint32_t* slots, PrefillPair* pair) {
    const uint32_t lane = threadIdx.x % 32;
    if (left > 0 && at - cached >= kSlots) {
      cached = at;
      __syncwarp();
      slots[lane] = __ldg(p.slots + at + min(lane, of_run - 1));
      __syncwarp();
    }
    if (lane == 0) {
      if (left == 0) {
        pair->views[h] = {0, 0, 0, 1};
        pair->tokens[h] = 0;
      } else {
        const int base = static_cast<int>(position - first_position);
        const int begin = static_cast<int>(tokens_begin_end & 0xffff), end = static_cast<int>(tokens_begin_end >> 16);
        pair->views[h] = {base, begin, end, begin > 0 || end < tokens || base + kPrefillPageTokens - 1 > 0};
        pair->slots[h] = slots[at - cached];
        pair->tokens[h] = min(kPrefillPageTokens, tokens - base);
      }
    }
    if (left == 0) return;
    --left, --of_run, ++at, position += kPrefillPageTokens;
    if (left > 0 && of_run == 0) NextRun(p, 0);
  }
};

// ---- the block ----

template <int kHeadDim, class Encoded>
struct PrefillMemory {
  using Tile = PrefillTile<kHeadDim>;
  static constexpr int kRecordBytes = Encoded::kRecordBytes == 0 ? 16 : (Encoded::kRecordBytes + 127) / 128 * 128;
  alignas(1024) uint8_t keys[kPrefillStages][Tile::kBytes];
  alignas(1024) uint8_t values[kPrefillStages][Tile::kBytes];
  alignas(1024) uint8_t queries[kPrefillGroups][kHeadDim / 64][kGroupRows * 128];
  alignas(128) uint8_t records[kPrefillAhead][2][kRecordBytes];
  alignas(16) uint8_t scratch[8][2][Encoded::kScratchBytes == 0 ? 16 : Encoded::kScratchBytes];
  alignas(16) PrefillPair pairs[kPrefillPairs];
  alignas(16) PrefillWalker walker;
  alignas(16) uint32_t slots[PrefillWalker::kSlots];
  // Barriers.
  alignas(8) uint64_t keys_full[kPrefillStages];
  alignas(8) uint64_t keys_empty[kPrefillStages];
  alignas(8) uint64_t values_full[kPrefillStages];
  alignas(8) uint64_t values_empty[kPrefillStages];
  alignas(8) uint64_t pair_full[kPrefillPairs];   // known, and its records are there
  alignas(8) uint64_t pair_empty[kPrefillPairs];  // its records were read
  uint32_t last[kPrefillGroups];                  // this group merges a tile
};

// ---- bringing pages ----

/// One warp's: finds out what the block's pages are, ahead of everybody else, and begins copies of encoded ones.
template <int kHeadDim, class Encoded>
struct PrefillLoader {
  const PrefillParams& p;
  PrefillMemory<kHeadDim, Encoded>& memory;

  __device__ __forceinline__ void Begin() const {
    PrefillWalker walker;
    walker.Open(p, blockIdx.x);
    if (threadIdx.x % 32 == 0) memory.walker = walker;
    __syncwarp();
    for (uint32_t n = 0; n < kPrefillAhead; ++n) LoadPair(n);
  }
  /// Pair n, behind pair n - 1. Waits for its place among records.
  __device__ __forceinline__ void LoadPair(uint32_t n) const {
    const int lane = threadIdx.x % 32;
    PrefillWalker walker = memory.walker;
    PrefillPair* const pair = &memory.pairs[n % kPrefillPairs];
    const Barrier full{SharedAddress(&memory.pair_full[n % kPrefillPairs])};
    if (walker.left == 0) {
      if (walker.next == 0) {
        if (lane == 0) {
          pair->end = 1;
          full.Arrive();
        }
        return;
      }
      walker.Open(p, walker.next);
    }
    const int kv_head = walker.kv_head;
    int encoded = walker.encoded;
    walker.Take(p, 0, memory.slots, pair);
    if (walker.left > 0) encoded |= walker.encoded << 1;
    walker.Take(p, 1, memory.slots, pair);
    __syncwarp();
    if (lane == 0) {
      memory.walker = walker;
      pair->encoded = encoded, pair->kv_head = kv_head, pair->end = 0;
      if (encoded == 0) {
        full.Arrive();
      } else {
        if (n >= kPrefillAhead) {
          const uint32_t before = n - kPrefillAhead;
          Barrier{SharedAddress(&memory.pair_empty[before % kPrefillPairs])}.Wait(before / kPrefillPairs % 2);
        }
        Encoded::Load(p, kv_head, encoded & 1 ? p.pool + pair->slots[0] * kSlotUnitBytes : nullptr,
                      encoded & 2 ? p.pool + pair->slots[1] * kSlotUnitBytes : nullptr,
                      SharedAddress(memory.records[n % kPrefillAhead][0]),
                      SharedAddress(memory.records[n % kPrefillAhead][1]), full);
      }
    }
    __syncwarp();
  }
};

/// Four warps that bring K (kSide 0) or V.
template <int kHeadDim, class Encoded, int kSide>
struct PrefillProducer {
  using Memory = PrefillMemory<kHeadDim, Encoded>;
  using Tile = PrefillTile<kHeadDim>;

  const PrefillParams& p;
  Memory& memory;

  /// Of a raw page, or zeros: tokens that no row of the tile sees may be anything, NaN too.
  __device__ __forceinline__ void FillRaw(uint32_t slot, int kv_head, int tokens, int half, uint32_t tile) const {
    constexpr int kChunks = kHeadDim / 8, kTokensAtOnce = kGroupThreads / kChunks;
    const int thread = threadIdx.x % kGroupThreads, chunk = thread % kChunks, token = thread / kChunks;
    const uint32_t run = static_cast<uint32_t>(kSide * p.kv_heads + kv_head) * kPrefillPageTokens + token;
    const uint8_t* from = p.pool;
    if (tokens > 0) from += slot * kSlotUnitBytes + (static_cast<size_t>(run) * kHeadDim + chunk * 8) * 2;
    const uint32_t to = tile + Tile::At(half * kPrefillPageTokens + token, chunk);
#pragma unroll
    for (int i = 0; i < kPrefillPageTokens / kTokensAtOnce; ++i) {
      const int t = i * kTokensAtOnce;  // a multiple of 8: the swizzle stays
      const bool copy = token + t < tokens;
      CopyOrZero(to + t * 128, copy ? from + t * kHeadDim * 2 : p.pool, copy);
    }
  }

  __device__ __forceinline__ void Run() {
    typename Encoded::Side side;
    const PrefillLoader<kHeadDim, Encoded> loader{p, memory};
    const bool loads = __shfl_sync(kAllLanes, threadIdx.x / 32, 0) == 4;
    uint64_t* const full = kSide == 0 ? memory.keys_full : memory.values_full;
    uint64_t* const empty = kSide == 0 ? memory.keys_empty : memory.values_empty;
    if (kSide == 1 && loads) loader.Begin();
    int kv_head = -1;
    for (uint32_t n = 0;; ++n) {
      const uint32_t at = n % kPrefillPairs;
      Barrier{SharedAddress(&memory.pair_full[at])}.Wait(n / kPrefillPairs % 2);
      const PrefillPair& pair = memory.pairs[at];
      if (pair.end != 0) return;
      const uint32_t stage = n % kPrefillStages,
                     tile = SharedAddress(kSide == 0 ? memory.keys[0] : memory.values[0]) + stage * Tile::kBytes;
      if (kv_head != pair.kv_head) {
        kv_head = pair.kv_head;
        side.Open(p, kv_head, kSide);
      }
      Barrier{SharedAddress(empty + stage)}.Wait(n / kPrefillStages % 2 ^ 1);
      const int encoded = pair.encoded;
#pragma unroll 1
      for (int h = 0; h < 2; ++h) {
        if (Encoded::kRecordBytes > 0 && (encoded >> h & 1) != 0) {
          if constexpr (Encoded::kRecordBytes > 0) {
            const uint8_t* const record = memory.records[n % kPrefillAhead][h];
            uint8_t* const scratch = memory.scratch[threadIdx.x / 32][h];
            if constexpr (kSide == 0) {
              side.FillKeys(record, tile, h * kPrefillPageTokens, scratch);
            } else {
              side.FillValues(record, tile, h * kPrefillPageTokens, scratch);
            }
          }
        } else {
          FillRaw(pair.slots[h], kv_head, pair.tokens[h], h, tile);
        }
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      FenceForWgmma();
      Barrier{SharedAddress(full + stage)}.Arrive();
      __syncwarp();
      if (threadIdx.x % 32 == 0) Barrier{SharedAddress(&memory.pair_empty[at])}.Arrive();
      if (kSide == 1 && loads) loader.LoadPair(n + kPrefillAhead);
    }
  }
};

// ---- attending ----

template <int kHeadDim, bool kBFloat16, class Encoded>
struct PrefillConsumer {
  using Memory = PrefillMemory<kHeadDim, Encoded>;
  using Tile = PrefillTile<kHeadDim>;
  static constexpr int kScores = kPrefillPairTokens / 2, kOutputs = kHeadDim / 2;  // of a lane

  const PrefillParams& p;
  Memory& memory;
  const int group;   // of warps
  const int thread;  // in it
  float s[kScores];
  float o[kOutputs];
  uint32_t weights[kScores / 2];
  float max[2], sum[2];  // of rows g and g + 8; sums of this lane's columns
  int token[2];          // of these rows, in the tile

  __device__ __forceinline__ PrefillConsumer(const PrefillParams& params, Memory& m)
      : p(params),
        memory(m),
        group(__shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0) - 2),
        thread(threadIdx.x % kGroupThreads) {}

  __device__ __forceinline__ int RowInGroup(int half) const { return thread / 32 * 16 + thread % 32 / 4 + 8 * half; }

  __device__ __forceinline__ void SyncGroup() const { SyncNamed(group == 0 ? kGroup0 : kGroup1, kGroupThreads); }
  /// All four warps of both groups do.
  __device__ __forceinline__ void Release(uint64_t* empty) const {
    __syncwarp();
    if (thread % 32 == 0) Barrier{SharedAddress(empty)}.Arrive();
  }

  __device__ __forceinline__ void LoadQueries(const PrefillItem& item) const {
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
        const size_t at = static_cast<size_t>(item.first_token + of_tile / group_heads) * p.query_heads +
                          item.kv_head * group_heads + of_tile % group_heads;
        eight = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.q) + at * kHeadDim) + chunk);
      }
      *reinterpret_cast<uint4*>(to + row * 128 + (chunk % 8 ^ row % 8) * 16) = eight;
    }
    FenceForWgmma();
    SyncGroup();
  }

  __device__ __forceinline__ void BeginScores(uint32_t stage) {
    const uint32_t keys = SharedAddress(memory.keys[stage]), queries = SharedAddress(memory.queries[group]);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const uint32_t column = k % 4 * 32;
      MultiplyRows<kBFloat16>(s, SwizzledMatrix(queries + k / 4 * kGroupRows * 128 + column, 0),
                              SwizzledMatrix(keys + k / 4 * Tile::kColumnBytes + column, 0), k > 0);
    }
    WgmmaCommit();
  }
  __device__ __forceinline__ void BeginOutputs(uint32_t stage, bool accumulate) {
    const uint32_t values = SharedAddress(memory.values[stage]);
#pragma unroll
    for (int k = 0; k < kPrefillPairTokens / 16; ++k) {
      const uint32_t a[4] = {weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3]};
      MultiplyColumns<kHeadDim, kBFloat16>(o, a, SwizzledMatrix(values + k * 16 * 128, Tile::kColumnBytes),
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
      const float origin = next == kMinusInfinity ? 0.f : next * p.scale_log2;
      factor[half] = Exp2(max[half] * p.scale_log2 - origin);
      max[half] = next;
      float sums[2] = {sum[half] * factor[half], 0};
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * half + e];
          x = Exp2(fmaf(x, p.scale_log2, -origin));
          sums[e] += x;
        }
      }
      sum[half] = sums[0] + sums[1];
    }
  }
  __device__ __forceinline__ void RoundWeights() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i] = FromFloats(s[2 * i], s[2 * i + 1], kBFloat16);
  }

  __device__ __forceinline__ void Write(const PrefillItem& item) const {
    const int group_heads = p.query_heads / p.kv_heads, t = thread % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (token[half] >= item.tokens) continue;
      const int row = group * kGroupRows + RowInGroup(half);
      const size_t at = static_cast<size_t>(item.first_token + token[half]) * p.query_heads +
                        item.kv_head * group_heads + row % group_heads;
      const float n = 1.f / sum[half];
      uint32_t* const to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at * kHeadDim) + t;
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        to[4 * j] = FromFloats(o[4 * j + 2 * half] * n, o[4 * j + 2 * half + 1] * n, kBFloat16);
      }
      if (t == 0 && p.lse != nullptr) p.lse[at] = (max[half] + __log2f(sum[half])) * 0.693147181f;
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

  __device__ __forceinline__ void End(const PrefillItem& item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] *= p.scale_log2;
      sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 1);
      sum[half] += __shfl_xor_sync(kAllLanes, sum[half], 2);
    }
    if (item.parts > 1 && !Merge(item)) return;
    Write(item);
  }

  __device__ __forceinline__ void Run() {
    PrefillItem item = ReadPrefillItem(p, blockIdx.x);
    if (item.pages == 0) return;
    uint32_t n = 0;  // pairs
    const auto stage_of = [](uint32_t pair) { return pair % kPrefillStages; };
    const auto parity_of = [](uint32_t pair) { return pair / kPrefillStages % 2; };
    for (;;) {
      LoadQueries(item);
      const int group_heads = p.query_heads / p.kv_heads;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        token[half] = (group * kGroupRows + RowInGroup(half)) / group_heads;
        max[half] = kMinusInfinity, sum[half] = 0;
      }
      const uint32_t first = n, end = n + (item.pages + 1) / 2;
      float factor[2];
      Barrier{SharedAddress(&memory.keys_full[stage_of(n)])}.Wait(parity_of(n));
      WgmmaFence();
      BeginScores(stage_of(n));
      WgmmaWait<0>();
      Mask(n);
      Release(&memory.keys_empty[stage_of(n)]);
      Softmax(factor);
      RoundWeights();
      for (++n; n < end; ++n) {
        const uint32_t stage = stage_of(n), before = stage_of(n - 1);
        Barrier{SharedAddress(&memory.keys_full[stage])}.Wait(parity_of(n));
        WgmmaFence();
        BeginScores(stage);
        Barrier{SharedAddress(&memory.values_full[before])}.Wait(parity_of(n - 1));
        WgmmaFence();
        BeginOutputs(before, n - 1 > first);
        WgmmaWait<1>();
        Mask(n);
        Release(&memory.keys_empty[stage]);
        Softmax(factor);
        WgmmaWait<0>();
        Release(&memory.values_empty[before]);
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
        RoundWeights();
      }
      Barrier{SharedAddress(&memory.values_full[stage_of(n - 1)])}.Wait(parity_of(n - 1));
      WgmmaFence();
      BeginOutputs(stage_of(n - 1), n - 1 > first);
      WgmmaWait<0>();
      Release(&memory.values_empty[stage_of(n - 1)]);
      End(item);
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
    for (int i = 0; i < kPrefillStages; ++i) {
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
