// ZACK's pages in the attention kernel: raw pages' products (raw_attention_device.cuh) in fewer dimensions, those of
// the head, in a space of their own (attend_apart.cuh).
//
// A unit is 16, 32 or 64 tokens of one head in one piece, as many as fit: rows of K', then rows of V'. Rows are 2 to 16
// chunks of 16 bytes, whose places are swizzled so that eight rows of a column of chunks lie in different banks,
// whatever a row's length: rows that begin at the same bank differ in the bits that are flipped.
//
// q in the space is any fp32: a row is scaled by a power of two and split into two parts of float16, so that scores are
// exact to 22 bits of it.
#pragma once

#include <type_traits>

#include "codecs/device/attend_apart.cuh"
#include "codecs/raw/raw_attention_device.cuh"
#include "codecs/zack/zack_device.h"

namespace kvmanager::device {

/// kTileRowsMax: 4 where no tile has more rows, else kTileRows.
template <int kHeadDimension, int kTileRowsMax>
struct ZackPages {
  using Raw = RawPages<kHeadDimension, kTileRowsMax>;
  using Head = zack::ZackDeviceHead;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRowsMax;
  static constexpr bool kApart = true, kPrepares = false;
  static constexpr int kPieces = 1, kPieceBytes = zack::kUnitBytes;
  static constexpr int kSegments = kHeadDim / 16, kPageTokens = zack::kDevicePageTokens;
  static constexpr int kScratchBytes = 0;

  /// Chunk c of a row lies at c ^ Flip(row).
  struct Swizzle {
    int shift, mask;
    __device__ __forceinline__ explicit Swizzle(int chunks) {
      const int zeros = min(__ffs(chunks) - 1, 3);
      shift = 3 - zeros, mask = (1 << zeros) - 1;
    }
    __device__ __forceinline__ int Flip(int row) const { return row >> shift & mask; }
  };

  uint32_t q[kSegments][2][2];  // B fragments, channels x rows of the tile: by part
  float scale[2];               // of scores of rows 2t and 2t + 1
  int segments[2];              // of K', of V'
  int block_bytes[2];           // of 16 tokens
  int blocks;                   // of 16 tokens in a unit
  uint32_t row_at[2];           // of the lane's row of a matrix, in 16 tokens
  int column[2];                // of its first chunk there

  static __device__ __forceinline__ const Head* HeadOf(const AttendParams& params, int kv_head) {
    return reinterpret_cast<const Head*>(static_cast<const MappedSpace*>(params.codec) + 1) + kv_head;
  }
  static __device__ __forceinline__ int UnitsOfPageLog2(const AttendParams& params, const AttendItem& item) {
    return 2 - static_cast<int>(__ldg(&HeadOf(params, item.kv_head)->unit_log2));
  }
  static __device__ __forceinline__ int Units(const AttendParams& params, const AttendItem& item) {
    return static_cast<int>(item.pages) << UnitsOfPageLog2(params, item);
  }
  /// Where a lane's copies go is the same for all units of an item, and for all 16 tokens of a unit.
  struct Lead {
    uint32_t offset;        // of K' in a page
    int unit_log2;          // tokens of a unit are 16 << unit_log2
    int chunks[2];          // of a row of K', of V'
    uint32_t places[2][4];  // of the i-th copy among 16 tokens: two to a word

    __device__ __forceinline__ void Open(const AttendParams& params, const AttendItem& item) {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(HeadOf(params, item.kv_head)));
      // So the compiler knows that lanes agree.
      const uint32_t both = __reduce_or_sync(kAllLanes, words.y);
      offset = words.x, unit_log2 = static_cast<int>(__reduce_or_sync(kAllLanes, words.w));
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        chunks[side] = both >> 16 * side & 0xffff;
        const Swizzle swizzle(chunks[side]);
        const uint32_t reciprocal = words.z >> 16 * side & 0xffff;
#pragma unroll
        for (int i = 0; i < kSegments; ++i) {
          const int at = threadIdx.x % 32 + 32 * i, row = static_cast<int>(at * reciprocal >> 16);
          const int chunk = at - row * chunks[side];
          const uint32_t place = (at - chunk + (chunk ^ swizzle.Flip(row))) * 16;
          if (i % 2 == 0) {
            places[side][i / 2] = place;
          } else {
            places[side][i / 2] |= place << 16;
          }
        }
      }
    }
    __device__ __forceinline__ int PageOf(int unit) const { return unit >> (2 - unit_log2); }
    __device__ __forceinline__ void Load(const uint8_t* page, int unit, uint32_t to, Barrier barrier) const {
      const int blocks = 1 << unit_log2, first = (unit & ((4 >> unit_log2) - 1)) << unit_log2;  // of 16 tokens
      const uint8_t* from = page + offset + threadIdx.x % 32 * 16;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int bytes = chunks[side] * 256;  // of 16 tokens
        const uint8_t* of_side = from + first * bytes;
#pragma unroll 1
        for (int b = 0; b < blocks; ++b) {
#pragma unroll
          for (int i = 0; i < kSegments; ++i) {
            if (i == kSegments / 2 && 2 * i >= chunks[side]) break;
            const uint32_t place = i % 2 == 0 ? places[side][i / 2] & 0xffff : places[side][i / 2] >> 16;
            if (2 * i < chunks[side]) CopyAsync(to + place, of_side + i * 512);
          }
          to += bytes, of_side += bytes;
        }
        from += 4 * bytes;
      }
      barrier.ArriveWithCopies();
    }
  };

  __device__ __forceinline__ void Begin(const AttendParams& params, const AttendItem& item, uint8_t*) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(HeadOf(params, item.kv_head)));
    // So the compiler knows that lanes agree.
    const uint32_t both = __reduce_or_sync(kAllLanes, words.y);
    // K as A: rows are tokens; matrices 0, 1 are tokens 0..7 and 8..15 of the first 8 channels, 2, 3 of the next 8. V
    // as A, transposed: rows are channels; matrices 0, 1 are channels 0..7 and 8..15 of tokens 0..7, 2, 3 of the
    // others.
    const int rows[2] = {lane % 16, lane % 8 + lane / 16 * 8}, columns[2] = {lane / 16, lane / 8 % 2};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int chunks = both >> 16 * side & 0xffff;
      segments[side] = chunks / 2;
      block_bytes[side] = chunks * 256;
      row_at[side] = rows[side] * chunks * 16;
      column[side] = columns[side] ^ Swizzle(chunks).Flip(rows[side]);
    }
    blocks = 1 << __reduce_or_sync(kAllLanes, words.w);
    const float* const row = MappedRow<kHeadDim>(params, 0, RowOf(params, item, g < item.rows ? g : 0));
    float2 x[kSegments][2];
    float largest = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[s][half] = make_float2(0, 0);
        if (g < item.rows && s < segments[0]) {
          x[s][half] = __ldcg(reinterpret_cast<const float2*>(row + 16 * s + 8 * half + 2 * t));
        }
        largest = fmaxf(largest, fmaxf(fabsf(x[s][half].x), fabsf(x[s][half].y)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const PowerOfRow power(largest);
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = x[s][half].x * power.up, b = x[s][half].y * power.up;
        const __half2 high = __floats2half2_rn(a, b);
        const float2 back = __half22float2(high);
        const __half2 low = __floats2half2_rn(a - back.x, b - back.y);
        q[s][half][0] = *reinterpret_cast<const uint32_t*>(&high);
        q[s][half][1] = *reinterpret_cast<const uint32_t*>(&low);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = __shfl_sync(kAllLanes, power.down, (2 * t + h) * 4) * params.scale_log2;
  }

  template <int kPiece>
  __device__ __forceinline__ void Attend(const AttendParams&, const AttendItem&, int, const uint8_t* piece,
                                         WarpState<kHeadDim>& state) const {
    const uint32_t keys = SharedAddress(piece) + row_at[0],
                   values = SharedAddress(piece) + blocks * block_bytes[0] + row_at[1];
    if (blocks == 1) {
      AttendBlocks<1>(keys, values, state);
    } else {
#pragma unroll 1
      for (int i = 0; i < blocks; i += 2) {
        AttendBlocks<2>(keys + i * block_bytes[0], values + i * block_bytes[1], state);
      }
    }
  }

  // The order of channels is the plain one, and sums and maxima are as raw pages have them.
  template <bool kAdd>
  static __device__ __forceinline__ void Store(const WarpState<kHeadDim>& state, float* to) {
    Raw::template Store<kAdd>(state, to);
  }
  static __device__ __forceinline__ void Open(WarpState<kHeadDim>&, const AttendParams&) {}
  static __device__ __forceinline__ void Close(WarpState<kHeadDim>&, const AttendParams&) {}

 private:
  /// body(N) where N, a constant, is `segments`: code without branches behind each case.
  template <class Body>
  static __device__ __forceinline__ void ForSegments(int segments, Body body) {
    switch (segments) {
      case 1:
        return body(std::integral_constant<int, 1>());
      case 2:
        return body(std::integral_constant<int, 2>());
      case 3:
        return body(std::integral_constant<int, 3>());
      case 4:
        return body(std::integral_constant<int, 4>());
    }
    if constexpr (kSegments == 8) {
      switch (segments) {
        case 5:
          return body(std::integral_constant<int, 5>());
        case 6:
          return body(std::integral_constant<int, 6>());
        case 7:
          return body(std::integral_constant<int, 7>());
        case 8:
          return body(std::integral_constant<int, 8>());
      }
    }
  }

  /// 16 tokens, or 32, of which the lane's rows of K' and of V' are there.
  template <int kBlocks>
  __device__ __forceinline__ void AttendBlocks(uint32_t keys, uint32_t values, WarpState<kHeadDim>& state) const {
    float c[kBlocks][4];
    ForSegments(segments[0], [&](auto count) {
      float high[kBlocks][4] = {}, low[kBlocks][4] = {};
#pragma unroll
      for (int s = 0; s < count.value; ++s) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t a[4];
          LoadMatrices<false>(a, keys + b * block_bytes[0] + (2 * s ^ column[0]) * 16);
          const uint32_t high_part[2] = {q[s][0][0], q[s][1][0]}, low_part[2] = {q[s][0][1], q[s][1][1]};
          Multiply<false>(high[b], a, high_part);
          Multiply<false>(low[b], a, low_part);
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[b][i] = (high[b][i] + low[b][i]) * scale[i % 2];
      }
    });
    float alpha[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(c[0][h], c[0][2 + h]);
#pragma unroll
      for (int b = 1; b < kBlocks; ++b) top = fmaxf(top, fmaxf(c[b][h], c[b][2 + h]));
      const float next = fmaxf(state.max[h], MaxOfColumn(top));
      alpha[h] = Exp2(state.max[h] - next);
      state.max[h] = next;
      state.sum[h] *= alpha[h];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        c[b][h] = Exp2(c[b][h] - next), c[b][2 + h] = Exp2(c[b][2 + h] - next);
        state.sum[h] += c[b][h] + c[b][2 + h];
      }
    }
    state.Scale(alpha);
    uint32_t p[kBlocks][2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      p[b][0] = Transpose8x8(FromFloats(c[b][0], c[b][1], false));
      p[b][1] = Transpose8x8(FromFloats(c[b][2], c[b][3], false));
    }
    ForSegments(segments[1], [&](auto count) {
#pragma unroll
      for (int s = 0; s < count.value; ++s) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t a[4];
          LoadMatrices<true>(a, values + b * block_bytes[1] + (2 * s ^ column[1]) * 16);
          Multiply<false>(state.acc[s], a, p[b]);
        }
      }
    });
  }
};

}  // namespace kvmanager::device
