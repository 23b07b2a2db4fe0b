// Raw pages in the attention kernel: 16 tokens at a time on fp16 or bf16 matrix units.
//
// A unit is 16 tokens of one head, in two pieces, K and V: rows of head_dim elements, whose 16-byte chunks are swizzled
// (chunk ^ row % 8) so that eight rows of a column of chunks lie in different banks. S^T = K q^T and O^T = V^T P^T, so
// that the heads of a group are the eight columns of an instruction and no row is padding.
#pragma once

#include "codecs/device/attend_device.cuh"
#include "codecs/device/mma_device.cuh"

namespace kvmanager::device {

/// Four 8 x 8 matrices: lane l gives a row of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(uint32_t (&a)[4], uint32_t row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(row));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(row));
  }
}

/// kTileRowsMax: 4 where no tile has more rows, else kTileRows.
template <int kHeadDimension, int kTileRowsMax>
struct RawPages {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kRows = kTileRowsMax;
  static constexpr int kUnitTokens = 16;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kPieces = 2;
  static constexpr int kPieceBytes = kUnitTokens * kRowBytes;
  static constexpr int kSegments = kHeadDim / 16;
  static constexpr int kScratchBytes = 0;
  static constexpr bool kPrepares = false;

  uint32_t q[kSegments][2];  // B fragments: channels x rows of the tile
  int visible[2];            // tokens of the item that rows 2t and 2t + 1 see
  uint32_t p[2];             // of the unit: B fragment, tokens x rows

  /// Tokens that the tile's row `row` sees.
  static __device__ __forceinline__ int Visible(const AttendParams& p, const AttendItem& item, int row) {
    const int token = (item.first_row + row) / (p.query_heads / p.kv_heads);
    return (item.pages - 1) * p.page_tokens + min(p.page_tokens, item.last_visible + token);
  }
  static __device__ __forceinline__ int Units(const AttendParams& p, const AttendItem& item) {
    return (Visible(p, item, item.rows - 1) + kUnitTokens - 1) / kUnitTokens;
  }
  static __device__ __forceinline__ int PageOf(const AttendParams& p, const AttendItem&, int unit) {
    return unit * kUnitTokens / p.page_tokens;
  }
  static __device__ __forceinline__ void Load(const AttendParams& p, const AttendItem& item, const uint8_t* page,
                                              int unit, int side, uint32_t to, Barrier barrier) {
    const int lane = threadIdx.x % 32, first = unit * kUnitTokens % p.page_tokens;
    const uint8_t* const from = page + ((side * p.kv_heads + item.kv_head) * p.page_tokens + first) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kPieceBytes / 512; ++i) {
      const int at = i * 32 + lane, r = at / kChunks, chunk = at % kChunks;
      CopyAsync(to + r * kRowBytes + (chunk ^ (r % 8)) * 16, from + at * 16);
    }
    barrier.ArriveWithCopies();
  }

  __device__ __forceinline__ void Begin(const AttendParams& params, const AttendItem& item, uint8_t*) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t* const row = static_cast<const uint32_t*>(params.q) + RowOf(params, item, g) * (kHeadDim / 2);
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) q[s][half] = g < item.rows ? row[s * 8 + half * 4 + t] : 0;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) visible[h] = Visible(params, item, min(2 * t + h, item.rows - 1));
  }

  template <int kPiece>
  __device__ __forceinline__ void Attend(const AttendParams& params, const AttendItem& item, int unit,
                                         const uint8_t* piece, WarpState<kHeadDim>& state) {
    const int first = unit * kUnitTokens;
    if constexpr (kPiece == 0) {
      params.bfloat16 ? Scores<true>(params, first, piece, state) : Scores<false>(params, first, piece, state);
    } else {
      const int written = Visible(params, item, item.rows - 1) - first;
      params.bfloat16 ? Outputs<true>(written, piece, state) : Outputs<false>(written, piece, state);
    }
  }

  // Its order of channels is the plain one.
  template <bool kAdd>
  static __device__ __forceinline__ void Store(const WarpState<kHeadDim>& state, float* to) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (2 * t >= kRows) return;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& place = to[(2 * t + i % 2) * kHeadDim + 16 * s + 8 * (i / 2) + g];
        place = kAdd ? place + state.acc[s][i] : state.acc[s][i];
      }
    }
  }
  static __device__ __forceinline__ void Close(WarpState<kHeadDim>&, const AttendParams&) {}

 private:
  template <bool kBFloat16>
  __device__ __forceinline__ void Scores(const AttendParams& params, int first, const uint8_t* piece,
                                         WarpState<kHeadDim>& state) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    // A: rows are tokens; matrices 0, 1 are tokens 0..7 and 8..15 of the first 8 channels, 2, 3 of the next 8.
    const int row = lane % 16, column = lane / 16;
    const uint32_t at = SharedAddress(piece) + row * kRowBytes;
    float c[2][4] = {};  // two sums: half the chain of dependent products
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      uint32_t a[4];
      LoadMatrices<false>(a, at + ((2 * s + column) ^ (row % 8)) * 16);
      Multiply<kBFloat16>(c[s % 2], a, q[s]);
    }
    float alpha[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = (c[0][2 * i + h] + c[1][2 * i + h]) * params.scale_log2;
        if (first + 8 * i + g >= visible[h]) x[i] = kMinusInfinity;
      }
      const float top = MaxOfColumn(fmaxf(x[0], x[1])), next = fmaxf(state.max[h], top);
      // A row may see nothing of this unit, and nothing before it either.
      const float origin = next == kMinusInfinity ? 0 : next;
      alpha[h] = Exp2(state.max[h] - origin);
      state.max[h] = next;
      c[0][h] = Exp2(x[0] - origin), c[0][2 + h] = Exp2(x[1] - origin);
      state.sum[h] = state.sum[h] * alpha[h] + c[0][h] + c[0][2 + h];
    }
    state.Scale(alpha);
    p[0] = Transpose8x8(FromFloats(c[0][0], c[0][1], kBFloat16));
    p[1] = Transpose8x8(FromFloats(c[0][2], c[0][3], kBFloat16));
  }

  /// written: tokens of the unit that anybody sees; what lies behind them in the page is anything, NaN too.
  template <bool kBFloat16>
  __device__ __forceinline__ void Outputs(int written, const uint8_t* piece, WarpState<kHeadDim>& state) const {
    const int lane = threadIdx.x % 32, t = lane % 4;
    // A, transposed: rows are channels; matrices 0, 1 are channels 0..7 and 8..15 of tokens 0..7, 2, 3 of the others.
    const int row = lane % 8 + lane / 16 * 8, column = lane / 8 % 2;
    const uint32_t at = SharedAddress(piece) + row * kRowBytes;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      uint32_t a[4];
      LoadMatrices<true>(a, at + ((2 * s + column) ^ (row % 8)) * 16);
      if (written < kUnitTokens) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 8 * (i / 2) + 2 * t;
          a[i] &= token + 1 < written ? 0xffffffffu : token < written ? 0x0000ffffu : 0;
        }
      }
      Multiply<kBFloat16>(state.acc[s], a, p);
    }
  }
};

}  // namespace kvmanager::device
