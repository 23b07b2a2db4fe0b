// Attention by many query tokens: how pages of any form come into a block's shared memory (prefill_device.cuh).
//
// `Encoded` says how pages of a codec are read:
//
//   kRecordBytes: that a head of a page has at most, a multiple of 16; 0: there are no encoded pages, or
//
//   kDirect: their rows are copied as they stand: Fill(params, kv_head, page, side, tile, first_token), by all threads
//   of four warps.
//
//   kMaps: they are in a space of their own (prefill_device.cuh), in float16; KeyColumns and OutputColumns(params,
//   kv_head) are those that keys and outputs have there, or, with kAllColumns, there are all.
//
//   Load(params, kv_head, pages, places, barrier): begins copies of the head's records of two pages, of which one may
//   be nullptr; one lane calls it, and arrives once.
//
//   kTableBytes: of a side of one head, which are kept in shared memory beside pages: LoadTable(params, kv_head, side,
//   to), by all threads of four warps. There is one stage then instead of two.
//
//   Side: what a thread knows of K's or V's pages. Open(params, kv_head, side) before pages of that head;
//   FillKeys(record, tile, first_token, scratch) or FillValues: by all lanes of four warps, each a quarter of the
//   channels; row first_token + t of the tile becomes token t of the page. With tables, UseTable(params, table) behind
//   Open. scratch: kScratchBytes of the warp's own,
//   16-byte aligned, another one for the next page.
#pragma once

#include <cuda_runtime.h>

#include "codecs/device/attend_device.cuh"
#include "codecs/device/prefill_params.h"

namespace kvmanager::device {

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

/// What this thread stored to shared memory comes before what wgmma reads behind the next barrier.
__device__ __forceinline__ void FenceForWgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Barriers of some of the block's warps.
enum NamedBarrier : int { kGroup0 = 1, kGroup1, kProducers0, kProducers1 };
__device__ __forceinline__ void SyncNamed(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

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

template <class Encoded>
constexpr bool IsDirect() {
  if constexpr (requires { Encoded::kDirect; }) return Encoded::kDirect;
  return false;
}

template <class Encoded>
constexpr bool IsMapped() {
  if constexpr (requires { Encoded::kMaps; }) return Encoded::kMaps;
  return false;
}

template <class Encoded>
constexpr bool KeepsAllColumns() {
  if constexpr (requires { Encoded::kAllColumns; }) return Encoded::kAllColumns;
  return false;
}

template <class Encoded>
constexpr int TableBytesOf() {
  if constexpr (requires { Encoded::kTableBytes; }) return Encoded::kTableBytes;
  return 0;
}
/// Of pairs of pages, K and V each.
template <class Encoded>
inline constexpr uint32_t kStagesOf = TableBytesOf<Encoded>() > 0 ? 1 : 2;

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
  if (p.heads != nullptr) item.kv_head = static_cast<uint8_t>(__ldg(p.heads + item.kv_head));
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
  static constexpr uint32_t kStages = kStagesOf<Encoded>;
  alignas(1024) uint8_t keys[kStages][Tile::kBytes];
  alignas(1024) uint8_t values[kStages][Tile::kBytes];
  alignas(1024) uint8_t queries[kPrefillGroups][kHeadDim / 64][kGroupRows * 128];
  alignas(128) uint8_t records[kPrefillAhead][2][kRecordBytes];
  alignas(16) uint8_t scratch[8][2][Encoded::kScratchBytes == 0 ? 16 : Encoded::kScratchBytes];
  alignas(16) uint8_t tables[2][TableBytesOf<Encoded>() == 0 ? 16 : TableBytesOf<Encoded>()];
  alignas(16) PrefillPair pairs[kPrefillPairs];
  alignas(16) PrefillWalker walker;
  alignas(16) uint32_t slots[PrefillWalker::kSlots];
  // Barriers.
  alignas(8) uint64_t keys_full[kStages];
  alignas(8) uint64_t keys_empty[kStages];
  alignas(8) uint64_t values_full[kStages];
  alignas(8) uint64_t values_empty[kStages];
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
      if (encoded == 0 || IsDirect<Encoded>()) {
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
    constexpr uint32_t kStages = Memory::kStages;
    for (uint32_t n = 0;; ++n) {
      const uint32_t at = n % kPrefillPairs;
      Barrier{SharedAddress(&memory.pair_full[at])}.Wait(n / kPrefillPairs % 2);
      const PrefillPair& pair = memory.pairs[at];
      if (pair.end != 0) return;
      const uint32_t stage = n % kStages,
                     tile = SharedAddress(kSide == 0 ? memory.keys[0] : memory.values[0]) + stage * Tile::kBytes;
      if (kv_head != pair.kv_head) {
        kv_head = pair.kv_head;
        side.Open(p, kv_head, kSide);
        if constexpr (TableBytesOf<Encoded>() > 0) {
          SyncNamed(kSide == 0 ? kProducers0 : kProducers1, kGroupThreads);  // nobody reads the old one any more
          Encoded::LoadTable(p, kv_head, kSide, memory.tables[kSide]);
          SyncNamed(kSide == 0 ? kProducers0 : kProducers1, kGroupThreads);
          side.UseTable(p, memory.tables[kSide]);
        }
      }
      Barrier{SharedAddress(empty + stage)}.Wait(n / kStages % 2 ^ 1);
      const int encoded = pair.encoded;
#pragma unroll 1
      for (int h = 0; h < 2; ++h) {
        if ((Encoded::kRecordBytes > 0 || IsDirect<Encoded>()) && (encoded >> h & 1) != 0) {
          if constexpr (IsDirect<Encoded>()) {
            Encoded::Fill(p, kv_head, p.pool + pair.slots[h] * kSlotUnitBytes, kSide, tile, h * kPrefillPageTokens);
          } else if constexpr (Encoded::kRecordBytes > 0) {
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

}  // namespace kvmanager::device
