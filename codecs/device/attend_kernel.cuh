// The attention kernel: a template over how raw and encoded pages are read (attend_device.cuh).
#pragma once

#include <cstddef>
#include <type_traits>

#include "codecs/device/attend_apart.cuh"
#include "codecs/device/attend_device.cuh"

namespace kvmanager::device {

/// Whether encoded pages' outputs stand in a space of their own.
template <class Encoded>
constexpr bool StandsApart() {
  if constexpr (requires { Encoded::kApart; }) return Encoded::kApart;
  return false;
}

/// Whether encoded pages may be rotated (AttendParams::rotates), so that what is attended to of them is too until a
/// warp goes on to raw pages, or its tile is merged.
template <class Encoded>
constexpr bool MayRotate() {
  if constexpr (requires { Encoded::kMayRotate; }) return Encoded::kMayRotate;
  return false;
}

/// Whether a tile's q is rotated by a block's warps together (RotatedQueries), where p.rotates.
template <class Encoded>
constexpr bool SharesQueries() {
  if constexpr (requires { Encoded::kSharesQueries; }) return Encoded::kSharesQueries;
  return false;
}

/// Whether the kernel may begin while what was launched before it ends; all that it reads may come from there.
template <class Encoded>
constexpr bool LaunchedIntoEnd() {
  if constexpr (requires { Encoded::kLaunchedIntoEnd; }) return Encoded::kLaunchedIntoEnd;
  return false;
}

template <class Raw, class Encoded, int kWarps, int kStages>
struct AttendMemory {
  static constexpr int kPieceBytes = Raw::kPieceBytes > Encoded::kPieceBytes ? Raw::kPieceBytes : Encoded::kPieceBytes;
  alignas(128) uint8_t ring[kWarps][kStages][kPieceBytes];
  static constexpr int kMergers = Encoded::kRows * Encoded::kHeadDim / 128;  // warps that merge a tile
  TileStates<Encoded::kHeadDim, kWarps, Encoded::kRows> states;
  std::conditional_t<StandsApart<Encoded>(), ParkedStates<Encoded::kHeadDim, kWarps, Encoded::kRows>, NothingParked>
      parked;
  std::conditional_t<SharesQueries<Encoded>(), RotatedQueries<Encoded::kHeadDim, Encoded::kRows>, NothingRotated>
      queries;
  alignas(8) uint64_t left;    // barrier: all warps left their states
  alignas(8) uint64_t merged;  // barrier: they were merged
  alignas(8) uint64_t barriers[kWarps][kStages];
  alignas(16) AttendItem items[kWarps][2];  // that a warp attends to, and that it loads
  alignas(16) uint8_t scratch[kWarps][Encoded::kScratchBytes == 0 ? 16 : Encoded::kScratchBytes];
};

/// A warp's copy of an item, with the head that it means: registers are short.
__device__ __forceinline__ void CopyItem(const AttendParams& p, AttendItem* to, uint32_t index) {
  static_assert(offsetof(AttendItem, kv_head) == 16);
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if (lane < 2) {
    uint4 half = reinterpret_cast<const uint4*>(p.items + index)[lane];
    if (lane == 1 && p.heads != nullptr) half.x = (half.x & 0xffff0000u) | __ldg(p.heads + (half.x & 0xffff));
    reinterpret_cast<uint4*>(to)[lane] = half;
  }
  __syncwarp();
}

/// This warp's first unit of an item whose block had `begun` units in items before: units go round the warps.
template <int kWarps>
__device__ __forceinline__ int FirstUnit(int begun) {
  return (static_cast<int>(threadIdx.x / 32) - begun % kWarps + kWarps) % kWarps;
}

struct NoLead {};
/// What a warp knows of an encoded item that it loads, where the form keeps that (attend_device.cuh).
template <class Encoded>
struct LeadOfForm {
  using Type = NoLead;
};
template <class Encoded>
requires requires { typename Encoded::Lead; }
struct LeadOfForm<Encoded> {
  using Type = typename Encoded::Lead;
};

/// Walks a block's items ahead of its attention, and begins the copies of one warp's pieces.
template <class Raw, class Encoded, int kWarps>
struct Loader {
  const AttendParams& p;
  AttendItem& item;
  int unit = 0, units = 0, piece = 0;
  int begun = 0;  // units of the block's earlier items
  bool done = false;
  uint32_t slot = 0;  // of the next unit's page, read ahead
  using Lead = typename LeadOfForm<Encoded>::Type;
  static constexpr bool kLeads = !std::is_same_v<Lead, NoLead>;
  Lead lead;  // of an encoded item

  __device__ __forceinline__ Loader(const AttendParams& params, AttendItem& place) : p(params), item(place) {
    Open(blockIdx.x);
    FindUnit();
  }
  __device__ __forceinline__ bool raw() const { return item.form == PageForm::kRaw; }
  __device__ __forceinline__ void Open(uint32_t index) {
    CopyItem(p, &item, index);
    if constexpr (kLeads) {
      if (!raw()) lead.Open(p, item);
    }
    units = raw() ? Raw::Units(p, item) : Encoded::Units(p, item);
    unit = FirstUnit<kWarps>(begun);
    begun += units;
  }
  /// The next item that has a unit for this warp, if this one has no more.
  __device__ __forceinline__ void FindUnit() {
    while (unit >= units) {
      const uint32_t next = item.next;
      done = next == 0;
      if (done) return;
      Open(next);
    }
    slot = p.slots[item.first_page + (raw() ? Raw::PageOf(p, item, unit) : EncodedPageOf())];
  }
  __device__ __forceinline__ int EncodedPageOf() const {
    if constexpr (kLeads) {
      return lead.PageOf(unit);
    } else {
      return Encoded::PageOf(p, item, unit);
    }
  }
  /// Nothing, if nothing is left.
  __device__ __forceinline__ void Load(uint32_t to, Barrier barrier) {
    if (done) return;
    const uint8_t* const page = p.pool + slot * kSlotUnitBytes;
    int pieces;
    if (raw()) {
      Raw::Load(p, item, page, unit, piece, to, barrier);
      pieces = Raw::kPieces;
    } else {
      if constexpr (kLeads) {
        lead.Load(page, unit, to, barrier);
      } else {
        Encoded::Load(p, item, page, unit, piece, to, barrier);
      }
      pieces = Encoded::kPieces;
    }
    if (++piece < pieces) return;
    piece = 0, unit += kWarps;
    FindUnit();
  }
};

template <class Raw, class Encoded, int kWarps, int kStages, int kBlocksPerSm>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm) AttendKernel(const __grid_constant__ AttendParams p) {
  using Memory = AttendMemory<Raw, Encoded, kWarps, kStages>;
  extern __shared__ __align__(128) uint8_t shared[];
  Memory* const memory = reinterpret_cast<Memory*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const ring = memory->ring[warp][0];
  const uint32_t barriers = SharedAddress(memory->barriers[warp]);
  const Barrier left{SharedAddress(&memory->left)}, merged{SharedAddress(&memory->merged)};
  if (lane < kStages) Barrier{barriers + 8 * lane}.Init(32);
  if (threadIdx.x == 0) left.Init(kWarps * 32), merged.Init(Memory::kMergers * 32);
  if constexpr (SharesQueries<Encoded>()) memory->queries.Init();
  __syncthreads();
  if constexpr (LaunchedIntoEnd<Encoded>()) {
    WaitForLast();
    LetNextBegin();
  }

  AttendItem& item = memory->items[warp][0];
  Loader<Raw, Encoded, kWarps> loader(p, memory->items[warp][1]);
  CopyItem(p, &item, blockIdx.x);
  if (item.pages == 0) return;  // fewer blocks were needed
  uint32_t load_stage = 0, stage = 0, parity = 0;
  const auto load = [&]() {
    loader.Load(SharedAddress(ring) + load_stage * Memory::kPieceBytes, {barriers + 8 * load_stage});
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
  };
  // Bytes of the next piece, once they are there.
  const auto wait = [&]() -> uint8_t* {
    Barrier{barriers + 8 * stage}.Wait(parity);
    return ring + stage * Memory::kPieceBytes;
  };
  const auto advance = [&]() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  };
  // The first tile's q is on its way while pages are looked up.
  [[maybe_unused]] int row = Encoded::kRows;
  [[maybe_unused]] uint2 four;
  const auto read_query = [&](int tile) {
    if constexpr (SharesQueries<Encoded>()) {
      if (!p.rotates) return;
      row = memory->queries.template TakeRow<kWarps>(tile);
      if (row < Encoded::kRows) four = memory->queries.Read(p, item, row);
    }
  };
  const auto rotate_query = [&](int tile) {
    if constexpr (SharesQueries<Encoded>()) {
      if (row < Encoded::kRows) memory->queries.Put(p, tile, row, four);
    }
  };
  read_query(0);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) load();
  rotate_query(0);
  constexpr bool kApart = StandsApart<Encoded>();
  if constexpr (kApart) {  // pages were there before what was launched last: it mapped q
    WaitForLast();
    LetNextBegin();
  }

  WarpState<Encoded::kHeadDim> state;
  bool empty = true, plain = true;  // the state; its order of channels
  state.Clear();
  int begun = 0;  // units of the block's earlier items
  int tile = 0;
  // Where outputs of the two forms are parked, with kApart: whether something is there.
  [[maybe_unused]] bool parked_raw = false, parked_encoded = false;
  const auto park = [&]() {
    if constexpr (kApart) {
      if (tile > 0) merged.Wait((tile - 1) % 2);
      if (plain) {
        Park<Raw>(state, parked_raw, memory->states.acc[warp], memory->parked.max[0][warp]);
        parked_raw = true;
      } else {
        Park<Encoded>(state, parked_encoded, memory->parked.acc[warp], memory->parked.max[1][warp]);
        parked_encoded = true;
      }
    }
  };
  const auto attend = [&](auto pages) {
    using Pages = decltype(pages);
    const int units = Pages::Units(p, item);
    int unit = FirstUnit<kWarps>(begun);
    begun += units;
    if (unit >= units) return;
    if constexpr (SharesQueries<Pages>()) {
      pages.Begin(p, item, memory->scratch[warp], memory->queries, tile);
    } else {
      pages.Begin(p, item, memory->scratch[warp]);
    }
    if constexpr (Pages::kPrepares) {
      if (!empty && plain) {
        park();
        Pages::Open(state, p);
      }
      if constexpr (kApart) Pages::ClearUnused(state);
      plain = false;
      uint8_t* piece = wait();
      advance();
      pages.Prepare(p, piece);
      for (; unit < units; unit += kWarps) {
        load();
        pages.Scores(p, piece, state);
        uint8_t* next = piece;
        if (unit + kWarps < units) {
          next = wait();
          advance();
        }
        pages.Outputs(p, piece, next, state);
        piece = next;
        __syncwarp();
      }
    } else {
      constexpr bool kPlain = !StandsApart<Pages>();
      if (!empty && plain != kPlain) {
        park();
        if constexpr (kPlain) {
          Encoded::Close(state, p);
        } else {
          Pages::Open(state, p);
        }
      }
      plain = kPlain;
      for (; unit < units; unit += kWarps) {
        load();
        pages.template Attend<0>(p, item, unit, wait(), state);
        advance();
        __syncwarp();
        if constexpr (Pages::kPieces == 2) {
          load();
          pages.template Attend<1>(p, item, unit, wait(), state);
          advance();
          __syncwarp();
        }
      }
    }
    empty = false;
  };
  for (;;) {
    if (item.form == PageForm::kRaw) {
      attend(Raw());
    } else {
      attend(Encoded());
    }
    if (item.ends_tile) {
      if constexpr (kApart) {
        park();
        if (!parked_raw) ParkNothing(memory->states.acc[warp], memory->parked.max[0][warp]);
        if (!parked_encoded) ParkNothing(memory->parked.acc[warp], memory->parked.max[1][warp]);
        parked_raw = parked_encoded = false;
        if (!plain) Encoded::Close(state, p);
        LeaveSums(state, memory->states);
      } else {
        if (tile > 0) merged.Wait((tile - 1) % 2);
        LeaveSums(state, memory->states);
        float* const to = &memory->states.acc[warp][0][0];
        plain ? Raw::template Store<false>(state, to) : Encoded::template Store<false>(state, to);
        if constexpr (MayRotate<Encoded>()) {
          if (lane == 0) memory->states.space[warp] = !plain && p.rotates ? kRotatedSpace : kPlainSpace;
        }
      }
      left.Arrive();
      // Warps take turns in merging.
      const int merger = (warp + tile * Memory::kMergers) % kWarps;
      if (merger < Memory::kMergers) {
        left.Wait(tile % 2);
        if constexpr (kApart) {
          MergeTileApart(p, item, merger, memory->states, memory->parked);
        } else {
          MergeTile<MayRotate<Encoded>()>(p, item, merger, memory->states);
        }
        merged.Arrive();
      }
      state.Clear();
      empty = plain = true;
      ++tile;
    }
    const uint32_t next = item.next;
    if (next == 0) return;
    const bool ended = item.ends_tile;
    CopyItem(p, &item, next);
    if (ended) {
      read_query(tile);
      rotate_query(tile);
    }
  }
}

}  // namespace kvmanager::device
