// MILLION pages of any format in the attention kernel: indices are looked up by address, in shared memory where a
// head's codes have room there, and are float16 operands of matrix instructions.
//
// A centroid is mid + step * code by channel (million_codebooks.h), and codes, -127..127, are exact in float16. So q
// times K's steps is what scores multiply codes with: a row of it is scaled by a power of two and split into two parts
// of float16, exact to 22 bits; q times K's mids is added. Of V codes are summed, and steps and mids come in when an
// item ends. P is float16, as with raw pages: nothing is rounded to 8 bits, which the CPU does (million_attention.h).
//
// What is looked up at once is four channels (a *quad*) of a token, or half of them, or one, as wide as subspaces are.
// So channels are in an order of their own: a lane (g, t) has of K quad 4 s + t of segment s in the four columns that
// are its own of two tokens, and of V quad 8 n + g in two rows each of segments 2 n and 2 n + 1.
#pragma once

#include <cuda_fp16.h>

#include "codecs/million/million_quads_device.cuh"
#include "codecs/million/million_space_device.cuh"
#include "codecs/raw/raw_attention_device.cuh"

namespace kvmanager::device {

/// kPieceBytesMax: of a side of a page of one head. kStandsApart: as of MillionPages.
template <int kHeadDimension, int kPieceBytesMax, bool kStandsApart>
struct MillionAnyPages {
  static constexpr bool kApart = kStandsApart;
  static constexpr int kHeadDim = kHeadDimension, kRows = kTileRows, kSegments = kHeadDim / 16;
  static constexpr int kPieces = 2, kPieceBytes = kPieceBytesMax;
  static constexpr int kTableBytes = 2 * 256 * kHeadDim;
  static constexpr int kScratchBytes = 16;
  static constexpr int kBlocks = million::kStripTokens / 16;  // of 16 tokens
  using Layer = million::MillionAnyLayer;
  using Side = million::MillionAnySide;
  using Head = million::MillionAnyHead;
  using State = WarpState<kHeadDim>;

  uint32_t q[kSegments][2][2];  // B fragments, channels x rows of the tile: by part
  float scale[2], base[2];      // of scores of rows 2t and 2t + 1: scale * product + base
  const uint8_t* codes;         // of the head
  uint32_t p[kBlocks][2];       // of the page: B fragments, tokens x rows

  static __device__ __forceinline__ const Layer& LayerOf(const AttendParams& params) {
    return *static_cast<const Layer*>(MillionTablesOf<kApart>(params));
  }
  static __device__ __forceinline__ int Units(const AttendParams&, const AttendItem& item) { return item.pages; }
  static __device__ __forceinline__ int PageOf(const AttendParams&, const AttendItem&, int unit) { return unit; }
  static __device__ __forceinline__ void Load(const AttendParams& params, const AttendItem& item, const uint8_t* page,
                                              int, int piece, uint32_t to, Barrier barrier) {
    if (threadIdx.x % 32 != 0) return barrier.Arrive();
    const Layer& layer = LayerOf(params);
    const uint32_t bytes = layer.side[piece].bytes;
    barrier.ArriveExpecting(bytes);
    CopyBulk(to, page + item.kv_head * layer.record_bytes + layer.side[piece].offset, bytes, barrier);
  }
  static __device__ __forceinline__ uint32_t TableBytes(const AttendParams& params) {
    return LayerOf(params).shared_bytes;
  }
  static __device__ __forceinline__ const void* TableOf(const AttendParams& params, const AttendItem& item) {
    const Layer& layer = LayerOf(params);
    return layer.codes + layer.heads[item.kv_head].codes;
  }
  static __device__ __forceinline__ void Clear(State& state) { state.Clear(); }

  __device__ __forceinline__ void Begin(const AttendParams& params, const AttendItem& item, const uint8_t* in_shared,
                                        uint8_t*) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Layer& layer = LayerOf(params);
    const Head& head = layer.heads[item.kv_head];
    codes = layer.shared_bytes > 0 ? in_shared : layer.codes + head.codes;
    const QueryPairs<kHeadDim, kApart> row(params, RowOf(params, item, g < item.rows ? g : 0));
    float4 x[kSegments];
    float largest = 0, offset = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const float2 a = row[8 * s + 2 * t], b = row[8 * s + 2 * t + 1];
      const float4 step = *reinterpret_cast<const float4*>(head.step[0] + 16 * s + 4 * t);
      const float4 mid = *reinterpret_cast<const float4*>(head.mid[0] + 16 * s + 4 * t);
      x[s] = make_float4(a.x * step.x, a.y * step.y, b.x * step.z, b.y * step.w);
      if (g >= item.rows) x[s] = make_float4(0, 0, 0, 0);
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x[s].x), fabsf(x[s].y)), fmaxf(fabsf(x[s].z), fabsf(x[s].w))));
      offset = fmaf(b.y, mid.w, fmaf(b.x, mid.z, fmaf(a.y, mid.y, fmaf(a.x, mid.x, offset))));
    }
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bit));
      offset += __shfl_xor_sync(kAllLanes, offset, bit);
    }
    const PowerOfRow power(largest);
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      const float2 two[2] = {make_float2(x[s].x, x[s].y), make_float2(x[s].z, x[s].w)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float a = two[half].x * power.up, b = two[half].y * power.up;
        const __half2 high = __floats2half2_rn(a, b);
        const float2 back = __half22float2(high);
        const __half2 low = __floats2half2_rn(a - back.x, b - back.y);
        q[s][half][0] = *reinterpret_cast<const uint32_t*>(&high);
        q[s][half][1] = *reinterpret_cast<const uint32_t*>(&low);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = __shfl_sync(kAllLanes, power.down, (2 * t + h) * 4) * params.scale_log2;
      base[h] = __shfl_sync(kAllLanes, offset, (2 * t + h) * 4) * params.scale_log2;
    }
  }

  template <int kPiece>
  __device__ __forceinline__ void Attend(const AttendParams& params, const AttendItem&, int, const uint8_t* piece,
                                         State& state) {
    const Side side = LayerOf(params).side[kPiece];
    MillionQuads::WithWidth(side, [&](auto width) {
      if constexpr (kPiece == 0) {
        Scores<width.value>(side, piece, state);
      } else {
        Outputs<width.value>(side, piece, state);
      }
    });
  }

  static __device__ __forceinline__ void Leave(const AttendParams& params, const AttendItem& item, const State& state,
                                               const WarpPlace& place) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Head& head = LayerOf(params).heads[item.kv_head];
    const float sums[2] = {SumOfColumn(state.sum[0]), SumOfColumn(state.sum[1])};
    WarpPlace::Factors factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) factors[h] = place.Merge(2 * t + h, state.max[h], sums[h]);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kSegments / 2; ++n) {
      const int channel = 32 * n + 4 * g;
      const float4 step = *reinterpret_cast<const float4*>(head.step[1] + channel);
      const float4 mid = *reinterpret_cast<const float4*>(head.mid[1] + channel);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float(&a)[4] = state.acc[2 * n], (&b)[4] = state.acc[2 * n + 1];
        const float factor = factors[h].mine, old = factors[h].theirs;
        float4 v;
        v.x = fmaf(a[h], step.x, sums[h] * mid.x) * factor, v.y = fmaf(a[2 + h], step.y, sums[h] * mid.y) * factor;
        v.z = fmaf(b[h], step.z, sums[h] * mid.z) * factor, v.w = fmaf(b[2 + h], step.w, sums[h] * mid.w) * factor;
        float4* const at = reinterpret_cast<float4*>(place.acc + (2 * t + h) * kHeadDim + channel);
        if (!place.empty) {
          const float4 before = *at;
          v.x = fmaf(before.x, old, v.x), v.y = fmaf(before.y, old, v.y);
          v.z = fmaf(before.z, old, v.z), v.w = fmaf(before.w, old, v.w);
        }
        *at = v;
      }
    }
    if (g == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) place.state[2 * t + h] = factors[h].merged;
    }
    __syncwarp();
  }

 private:
  template <int kWidth>
  __device__ __forceinline__ void Scores(const Side& side, const uint8_t* piece, State& state) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float c[kBlocks][4];
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      float high[4] = {}, low[4] = {};
#pragma unroll
      for (int s = 0; s < kSegments; ++s) {
        const uint32_t first = MillionQuads::Of<kWidth>(side, codes, piece, 4 * s + t, 16 * block + g),
                       second = MillionQuads::Of<kWidth>(side, codes, piece, 4 * s + t, 16 * block + g + 8);
        const uint32_t a[4] = {MillionQuads::Halves<0, 1>(first), MillionQuads::Halves<0, 1>(second),
                               MillionQuads::Halves<2, 3>(first), MillionQuads::Halves<2, 3>(second)};
        const uint32_t high_part[2] = {q[s][0][0], q[s][1][0]}, low_part[2] = {q[s][0][1], q[s][1][1]};
        Multiply<false>(high, a, high_part);
        Multiply<false>(low, a, low_part);
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (b != block) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) c[b][i] = fmaf(high[i] + low[i], scale[i % 2], base[i % 2]);
      }
    }
    float alpha[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = kMinusInfinity;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) top = fmaxf(top, fmaxf(c[b][h], c[b][2 + h]));
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
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      p[b][0] = Transpose8x8(FromFloats(c[b][0], c[b][1], false));
      p[b][1] = Transpose8x8(FromFloats(c[b][2], c[b][3], false));
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void Outputs(const Side& side, const uint8_t* piece, State& state) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t weights[2] = {p[0][0], p[0][1]};
#pragma unroll
      for (int b = 1; b < kBlocks; ++b) {
        if (b == block) weights[0] = p[b][0], weights[1] = p[b][1];
      }
#pragma unroll
      for (int n = 0; n < kSegments / 2; ++n) {
        uint32_t a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the tokens
          const int token = 16 * block + 8 * half + 2 * t;
          const uint32_t first = MillionQuads::Of<kWidth>(side, codes, piece, 8 * n + g, token),
                         second = MillionQuads::Of<kWidth>(side, codes, piece, 8 * n + g, token + 1);
          const uint32_t low = __byte_perm(first, second, 0x5140), high = __byte_perm(first, second, 0x7362);
          a[0][2 * half] = MillionQuads::Halves<0, 1>(low), a[0][2 * half + 1] = MillionQuads::Halves<2, 3>(low);
          a[1][2 * half] = MillionQuads::Halves<0, 1>(high), a[1][2 * half + 1] = MillionQuads::Halves<2, 3>(high);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) Multiply<false>(state.acc[2 * n + i], a[i], weights);
      }
    }
  }
};

}  // namespace kvmanager::device
