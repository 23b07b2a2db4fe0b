// Paged decode attention on a GPU for codecs whose pages are read through tables: beside what attend_device.cuh does,
// a block keeps the tables of one KV head in shared memory, and each form keeps its softmax state as it likes.
//
// A block begins with the tables of its first encoded item and reads others where the KV head changes, all warps
// together. The state of an item is merged into the warp's place of the tile in shared memory when the item ends, so
// that forms share nothing else, and registers of one form are free in another. As it is for a tile, so it is for an
// item: a warp waits only where the block is a whole tile ahead of its merging warps.
//
// Beside what `Pages` says in attend_device.cuh, the encoded form has
//
//   State, Clear(state), Leave(params, item, state, place): adds a state to what the warp has of the tile.
//
//   kTableBytes, TableBytes(params), TableOf(params, item): of one KV head, on the device, 16-byte aligned; at most, as
//   many as there are (a multiple of 16; 0: none are kept), and where.
//
//   Begin(params, item, table, scratch) with the tables in shared memory.
//
// With kApart its outputs stand in a space of their own (attend_apart.cuh): a warp then has two places of the tile.
#pragma once

#include <type_traits>

#include "codecs/device/attend_kernel.cuh"

namespace kvmanager::device {

/// What one warp has of a tile: rows' sums of exponentials times values, their maxima (of scores * log2 e) and sums.
struct WarpPlace {
  float* acc;     // [kRows][kHeadDim]
  float2* state;  // [kRows]
  bool empty;     // nothing was left yet: what stands there is anything

  /// Of a state's row and the place's: the factors by which each goes into the sum of both.
  struct Factors {
    float2 merged;
    float mine, theirs;
  };
  __device__ __forceinline__ Factors Merge(int row, float max, float sum) const {
    if (empty) return {make_float2(max, sum), 1, 0};
    const float2 old = state[row];
    const float next = fmaxf(max, old.x), origin = next == kMinusInfinity ? 0 : next;
    const float mine = Exp2(max - origin), theirs = Exp2(old.x - origin);
    return {make_float2(next, mine * sum + theirs * old.y), mine, theirs};
  }
};

/// Places of encoded pages where they stand apart: what raw ones have is in TileStates.
template <int kHeadDim, int kWarps, int kRows>
struct ApartPlaces : ParkedStates<kHeadDim, kWarps, kRows> {
  float2 state[kWarps][kRows];
};

/// Nothing, in a place that nothing was left in.
template <int kHeadDim, int kRows>
__device__ __forceinline__ void LeaveNothing(const WarpPlace& place) {
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < kRows * kHeadDim; i += 32) place.acc[i] = 0;
  if (lane < kRows) place.state[lane] = make_float2(kMinusInfinity, 0);
}

/// A raw and an encoded place of a warp, in two spaces, become what MergeTileApart reads.
template <int kHeadDim, int kWarps, int kRows>
__device__ __forceinline__ void JoinPlaces(TileStates<kHeadDim, kWarps, kRows>& raw,
                                           ApartPlaces<kHeadDim, kWarps, kRows>& encoded) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane >= kRows) return;
  const float2 a = raw.state[warp][lane], b = encoded.state[warp][lane];
  const float max = fmaxf(a.x, b.x), origin = max == kMinusInfinity ? 0 : max;
  encoded.max[static_cast<int>(PageForm::kRaw)][warp][lane] = a.x;
  encoded.max[static_cast<int>(PageForm::kEncoded)][warp][lane] = b.x;
  raw.state[warp][lane] = make_float2(max, Exp2(a.x - origin) * a.y + Exp2(b.x - origin) * b.y);
}

template <class Raw, class Encoded, int kWarps, int kStages>
struct AttendTablesMemory {
  static_assert(Raw::kPieces == 2 && Encoded::kPieces == 2);
  static constexpr int kPieceBytes = Raw::kPieceBytes > Encoded::kPieceBytes ? Raw::kPieceBytes : Encoded::kPieceBytes;
  alignas(128) uint8_t table[Encoded::kTableBytes];
  alignas(128) uint8_t ring[kWarps][kStages][kPieceBytes];
  static constexpr int kMergers = Encoded::kRows * Encoded::kHeadDim / 128;  // warps that merge a tile
  static_assert(kMergers <= kWarps);
  TileStates<Encoded::kHeadDim, kWarps, Encoded::kRows> states;
  std::conditional_t<StandsApart<Encoded>(), ApartPlaces<Encoded::kHeadDim, kWarps, Encoded::kRows>, NothingParked>
      parked;
  alignas(8) uint64_t left;    // barrier: all warps left their states
  alignas(8) uint64_t merged;  // barrier: they were merged
  alignas(8) uint64_t loaded;  // barrier: the table is there
  alignas(8) uint64_t barriers[kWarps][kStages];
  alignas(16) AttendItem items[kWarps][2];  // that a warp attends to, and that it loads
  alignas(16) uint8_t scratch[kWarps][Encoded::kScratchBytes];
};

/// A raw item's state, in the plain order.
template <int kHeadDim, int kRows>
__device__ __forceinline__ void LeavePlain(const WarpState<kHeadDim>& state, const WarpPlace& place) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float sums[2] = {SumOfColumn(state.sum[0]), SumOfColumn(state.sum[1])};
  WarpPlace::Factors factors[2];
  if (2 * t < kRows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) factors[h] = place.Merge(2 * t + h, state.max[h], sums[h]);
  }
  __syncwarp();
  if (2 * t < kRows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* const row = place.acc + (2 * t + h) * kHeadDim;
#pragma unroll
      for (int c = 0; c < kHeadDim / 8; ++c) {
        float* const at = row + 8 * c + g;
        const float mine = state.acc[c / 2][c % 2 * 2 + h] * factors[h].mine;
        *at = place.empty ? mine : fmaf(*at, factors[h].theirs, mine);
      }
      if (g == 0) place.state[2 * t + h] = factors[h].merged;
    }
  }
  __syncwarp();
}

template <class Raw, class Encoded, int kWarps, int kStages, int kBlocksPerSm>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm)
    AttendTablesKernel(const __grid_constant__ AttendParams p) {
  using Memory = AttendTablesMemory<Raw, Encoded, kWarps, kStages>;
  constexpr int kHeadDim = Encoded::kHeadDim;
  extern __shared__ __align__(128) uint8_t shared[];
  Memory* const memory = reinterpret_cast<Memory*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const ring = memory->ring[warp][0];
  const uint32_t barriers = SharedAddress(memory->barriers[warp]);
  const Barrier left{SharedAddress(&memory->left)}, merged{SharedAddress(&memory->merged)},
      loaded{SharedAddress(&memory->loaded)};
  if (lane < kStages) Barrier{barriers + 8 * lane}.Init(32);
  if (threadIdx.x == 0) left.Init(kWarps * 32), merged.Init(Memory::kMergers * 32), loaded.Init(1);
  __syncthreads();

  AttendItem& item = memory->items[warp][0];
  Loader<Raw, Encoded, kWarps> loader(p, memory->items[warp][1]);
  uint32_t load_stage = 0, stage = 0, parity = 0;
  const auto load = [&]() {
    loader.Load(SharedAddress(ring) + load_stage * Memory::kPieceBytes, {barriers + 8 * load_stage});
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
  };
  // Bytes of the next piece, once they are there.
  const auto wait = [&]() -> const uint8_t* {
    Barrier{barriers + 8 * stage}.Wait(parity);
    return ring + stage * Memory::kPieceBytes;
  };
  const auto advance = [&]() {
    __syncwarp();
    if (++stage == kStages) stage = 0, parity ^= 1;
  };

  int table_head = -1;  // whose tables are in shared memory, or on their way there
  uint32_t table_parity = 0;
  const auto begin_table = [&]() {
    table_head = item.kv_head;
    if (threadIdx.x != 0) return;
    const uint32_t bytes = Encoded::TableBytes(p);
    if (bytes == 0) return loaded.Arrive();
    loaded.ArriveExpecting(bytes);
    CopyBulk(SharedAddress(memory->table), Encoded::TableOf(p, item), bytes, loaded);
  };

  CopyItem(p, &item, blockIdx.x);
  if (item.pages == 0) return;  // fewer blocks were needed
  bool table_waits = item.form == PageForm::kEncoded;
  if (table_waits) begin_table();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) load();
  constexpr bool kApart = StandsApart<Encoded>();
  if constexpr (kApart) {  // pages were there before what was launched last: it mapped q
    WaitForLast();
    LetNextBegin();
  }

  int begun = 0;  // units of the block's earlier items
  int tile = 0;
  WarpPlace place{memory->states.acc[warp][0], memory->states.state[warp], true};
  [[maybe_unused]] WarpPlace apart = place;  // of encoded pages, with kApart
  if constexpr (kApart) apart = {memory->parked.acc[warp][0], memory->parked.state[warp], true};
  const auto attend = [&](auto pages, auto& state, const WarpPlace& to) {
    using Pages = decltype(pages);
    const int units = Pages::Units(p, item);
    int unit = FirstUnit<kWarps>(begun);
    begun += units;
    if (unit >= units) return false;
    if constexpr (std::is_same_v<Pages, Raw>) {
      pages.Begin(p, item, nullptr);
    } else {
      pages.Begin(p, item, memory->table, memory->scratch[warp]);
    }
    for (; unit < units; unit += kWarps) {
      load();
      pages.template Attend<0>(p, item, unit, wait(), state);
      advance();
      load();
      pages.template Attend<1>(p, item, unit, wait(), state);
      advance();
    }
    if (to.empty && tile > 0) merged.Wait((tile - 1) % 2);
    return true;
  };
  for (;;) {
    if (item.form == PageForm::kRaw) {
      WarpState<kHeadDim> state;
      state.Clear();
      if (attend(Raw(), state, place)) {
        LeavePlain<kHeadDim, Encoded::kRows>(state, place);
        place.empty = false;
      }
    } else {
      if (table_head != item.kv_head) {
        if (table_head >= 0) __syncthreads();  // nobody reads the old ones any more
        begin_table();
        table_waits = true;
      }
      if (table_waits) loaded.Wait(table_parity), table_parity ^= 1;
      table_waits = false;
      typename Encoded::State state;
      Encoded::Clear(state);
      WarpPlace& to = kApart ? apart : place;
      if (attend(Encoded(), state, to)) {
        Encoded::Leave(p, item, state, to);
        to.empty = false;
      }
    }
    if (item.ends_tile) {
      if (place.empty) {
        if (tile > 0) merged.Wait((tile - 1) % 2);
        LeaveNothing<kHeadDim, Encoded::kRows>(place);
      }
      if constexpr (kApart) {
        if (apart.empty) {
          if (tile > 0) merged.Wait((tile - 1) % 2);
          LeaveNothing<kHeadDim, Encoded::kRows>(apart);
        }
        __syncwarp();
        JoinPlaces(memory->states, memory->parked);
        apart.empty = true;
      }
      left.Arrive();
      // Warps take turns in merging.
      const int merger = (warp + tile * Memory::kMergers) % kWarps;
      if (merger < Memory::kMergers) {
        left.Wait(tile % 2);
        if constexpr (kApart) {
          MergeTileApart(p, item, merger, memory->states, memory->parked);
        } else {
          MergeTile(p, item, merger, memory->states);
        }
        merged.Arrive();
      }
      place.empty = true;
      ++tile;
    }
    const uint32_t next = item.next;
    if (next == 0) return;
    CopyItem(p, &item, next);
  }
}

template <class Raw, class Encoded, int kWarps, int kStages>
struct AttendTables {
  using Memory = AttendTablesMemory<Raw, Encoded, kWarps, kStages>;
  static_assert(sizeof(Memory) <= 227 * 1024, "a block has 227 KiB");
  static constexpr auto kKernel = AttendTablesKernel<Raw, Encoded, kWarps, kStages, 1>;
  static constexpr int kThreads = kWarps * 32, kHeadDim = Encoded::kHeadDim;

  static int Prepare() {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
  }
  static int Launch(const AttendParams& params, int blocks, CUstream_st* stream) {
    kKernel<<<blocks, kThreads, sizeof(Memory), stream>>>(params);
    return cudaPeekAtLastError();
  }
};

}  // namespace kvmanager::device
