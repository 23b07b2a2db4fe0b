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
  int chunks[2];
  int blocks;  // of 16 tokens in a unit

  static __device__ __forceinline__ const Head* HeadOf(const AttendParams& params, int kv_head) {
    return reinterpret_cast<const Head*>(static_cast<const MappedSpace*>(params.codec) + 1) + kv_head;
  }
  static __device__ __forceinline__ int UnitsOfPageLog2(const AttendParams& params, const AttendItem& item) {
    return 2 - static_cast<int>(__ldg(&HeadOf(params, item.kv_head)->unit_log2));
  }
  static __device__ __forceinline__ int Units(const AttendParams& params, const AttendItem& item) {
    return static_cast<int>(item.pages) << UnitsOfPageLog2(params, item);
  }
  static __device__ __forceinline__ int PageOf(const AttendParams& params, const AttendItem& item, int unit) {
    return unit >> UnitsOfPageLog2(params, item);
  }
  static __device__ __forceinline__ void Load(const AttendParams& params, const AttendItem& item, const uint8_t* page,
                                              int unit, int, uint32_t to, Barrier barrier) {
    const int lane = threadIdx.x % 32;
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(HeadOf(params, item.kv_head)));
    const int k_chunks = words.y & 0xffff, v_chunks = words.y >> 16, tokens = 16 << words.w;
    const int first = (unit & ((4 >> words.w) - 1)) * tokens;
    const uint8_t* const keys = page + words.x;
    CopyRows(keys + first * k_chunks * 16, tokens, k_chunks, words.z & 0xffff, to, lane);
    CopyRows(keys + (kPageTokens * k_chunks + first * v_chunks) * 16, tokens, v_chunks, words.z >> 16,
             to + tokens * k_chunks * 16, lane);
    barrier.ArriveWithCopies();
  }

  __device__ __forceinline__ void Begin(const AttendParams& params, const AttendItem& item, uint8_t*) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(HeadOf(params, item.kv_head)));
    // So the compiler knows that lanes agree.
    const uint32_t both = __reduce_or_sync(kAllLanes, words.y);
    chunks[0] = both & 0xffff, chunks[1] = both >> 16;
    segments[0] = chunks[0] / 2, segments[1] = chunks[1] / 2;
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
    // The largest becomes 2^14 and more; both powers are normal numbers.
    const uint32_t exponent = min(max(AsBits(largest) >> 23, 15u), 254u);
    const float up = AsFloat((268 - exponent) << 23), down = AsFloat((exponent - 14) << 23);
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = x[s][half].x * up, b = x[s][half].y * up;
        const __half2 high = __floats2half2_rn(a, b);
        const float2 back = __half22float2(high);
        const __half2 low = __floats2half2_rn(a - back.x, b - back.y);
        q[s][half][0] = *reinterpret_cast<const uint32_t*>(&high);
        q[s][half][1] = *reinterpret_cast<const uint32_t*>(&low);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = __shfl_sync(kAllLanes, down, (2 * t + h) * 4) * params.scale_log2;
  }

  template <int kPiece>
  __device__ __forceinline__ void Attend(const AttendParams&, const AttendItem&, int, const uint8_t* piece,
                                         WarpState<kHeadDim>& state) const {
    const uint32_t keys = SharedAddress(piece), values = keys + blocks * chunks[0] * 256;
    if (blocks == 1) {
      AttendBlocks<1>(keys, values, state);
    } else {
#pragma unroll 1
      for (int i = 0; i < blocks; i += 2) {
        AttendBlocks<2>(keys + i * chunks[0] * 256, values + i * chunks[1] * 256, state);
      }
    }
  }

  // The order of channels is the plain one, and sums and maxima are as raw pages have them.
  template <bool kAdd>
  static __device__ __forceinline__ void Store(const WarpState<kHeadDim>& state, float* to) {
    Raw::template Store<kAdd>(state, to);
  }
  static __device__ __forceinline__ void Open(WarpState<kHeadDim>&) {}
  static __device__ __forceinline__ void Close(WarpState<kHeadDim>&) {}

 private:
  static __device__ __forceinline__ void CopyRows(const uint8_t* from, int rows, int chunks, uint32_t reciprocal,
                                                  uint32_t to, int lane) {
    const Swizzle swizzle(chunks);
    const int all = rows * chunks;  // a multiple of 32
#pragma unroll 4
    for (int at = lane; at < all; at += 32) {
      const int row = static_cast<int>(at * reciprocal >> 16), chunk = at - row * chunks;
      CopyAsync(to + (at - chunk + (chunk ^ swizzle.Flip(row))) * 16, from + at * 16);
    }
  }

  /// 16 tokens, or 32, of which rows of K' and of V' begin there.
  template <int kBlocks>
  __device__ __forceinline__ void AttendBlocks(uint32_t keys, uint32_t values, WarpState<kHeadDim>& state) const {
    const int lane = threadIdx.x % 32;
    float c[kBlocks][4] = {};
    {
      // A: rows are tokens; matrices 0, 1 are tokens 0..7 and 8..15 of the first 8 channels, 2, 3 of the next 8.
      const int row = lane % 16, column = lane / 16 ^ Swizzle(chunks[0]).Flip(row);
      const uint32_t at = keys + row * chunks[0] * 16;
      float low[kBlocks][4] = {};
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        if (s >= segments[0]) break;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t a[4];
          LoadMatrices<false>(a, at + b * chunks[0] * 256 + (2 * s ^ column) * 16);
          const uint32_t high_part[2] = {q[s][0][0], q[s][1][0]}, low_part[2] = {q[s][0][1], q[s][1][1]};
          Multiply<false>(c[b], a, high_part);
          Multiply<false>(low[b], a, low_part);
        }
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[b][i] = (c[b][i] + low[b][i]) * scale[i % 2];
      }
    }
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
    // A, transposed: rows are channels; matrices 0, 1 are channels 0..7 and 8..15 of tokens 0..7, 2, 3 of the others.
    const int row = lane % 8 + lane / 16 * 8, column = lane / 8 % 2 ^ Swizzle(chunks[1]).Flip(row);
    const uint32_t at = values + row * chunks[1] * 16;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      if (s >= segments[1]) break;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        uint32_t a[4];
        LoadMatrices<true>(a, at + b * chunks[1] * 256 + (2 * s ^ column) * 16);
        Multiply<false>(state.acc[s], a, p[b]);
      }
    }
  }
};

}  // namespace kvmanager::device
