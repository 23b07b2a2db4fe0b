// ZACK's pages in attention by many query tokens (codecs/device/prefill_device.cuh), and the two small kernels around
// it: one maps q into the space before, one brings the outputs of both forms together behind.
#pragma once

#include "codecs/device/prefill_device.cuh"
#include "codecs/zack/rotation_device.cuh"
#include "codecs/zack/zack_device.h"

namespace kvmanager::device {

/// Rows of K' and V' as they stand, those of K' filled up to 64 or 128 columns with zeros.
template <int kHeadDim>
struct ZackPrefillPages {
  static constexpr bool kDirect = true, kMaps = true;
  static constexpr int kRecordBytes = 0, kScratchBytes = 0;
  using Tile = PrefillTile<kHeadDim>;

  static __device__ __forceinline__ const zack::ZackDeviceHead& HeadOf(const PrefillParams& p, int kv_head) {
    return static_cast<const zack::ZackPrefillLayer*>(p.format)->heads[kv_head];
  }
  static __device__ __forceinline__ int KeyColumns(const PrefillParams& p, int kv_head) {
    return HeadOf(p, kv_head).chunks[0] * 8;
  }
  static __device__ __forceinline__ int OutputColumns(const PrefillParams& p, int kv_head) {
    return HeadOf(p, kv_head).chunks[1] * 8;
  }
  static __device__ __forceinline__ void Load(const PrefillParams&, int, const uint8_t*, const uint8_t*, uint32_t,
                                              uint32_t, Barrier) {}
  struct Side {
    __device__ __forceinline__ void Open(const PrefillParams&, int, int) {}
  };
  static __device__ __forceinline__ void Fill(const PrefillParams& p, int kv_head, const uint8_t* page, int side,
                                              uint32_t tile, int first_token) {
    constexpr int kChunks = kHeadDim / 8, kTokensAtOnce = kGroupThreads / kChunks;
    const int thread = threadIdx.x % kGroupThreads, chunk = thread % kChunks, token = thread / kChunks;
    const zack::ZackDeviceHead& head = HeadOf(p, kv_head);
    const int k_chunks = head.chunks[0], chunks = side == 0 ? k_chunks : head.chunks[1];
    const bool copy = chunk < chunks;
    if (!copy && (side != 0 || chunk >= (chunks + 7) / 8 * 8)) return;
    const uint8_t* const from =
        copy ? page + head.offset + (side == 0 ? 0 : kPrefillPageTokens * k_chunks * 16) + (token * chunks + chunk) * 16
             : p.pool;
    const int step = copy ? kTokensAtOnce * chunks * 16 : 0;
    const uint32_t to = tile + Tile::At(first_token + token, chunk);
#pragma unroll
    for (int i = 0; i < kPrefillPageTokens / kTokensAtOnce; ++i) {
      CopyOrZero(to + i * kTokensAtOnce * 128, from + i * step, copy);  // a multiple of 8 rows: the swizzle stays
    }
  }
};

/// 64 rows of a KV head, 16 of them a warp's: as RotateRows, of rows that need not be neighbours. A lane's two rows are
/// rows[0] and rows[1], head_dim elements each; nullptr: zeros.
template <int kHeadDim, bool kBFloat16>
struct RowsOfHead {
  static constexpr int kParts = kBFloat16 ? 3 : 2;
  uint4 a16[kHeadDim / 32][2];

  __device__ __forceinline__ void Load(const uint16_t* const (&rows)[2], int columns) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int kb = 0; kb < kHeadDim / 32; ++kb) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        a16[kb][r] = make_uint4(0, 0, 0, 0);
        if (rows[r] != nullptr && 32 * kb + 8 * t < columns) {
          a16[kb][r] = *reinterpret_cast<const uint4*>(rows[r] + 32 * kb + 8 * t);
        }
      }
    }
  }
  /// Columns 32 m .. 32 m + 31 of the product with a packed factor [depth][...], times its scale: of row r, columns
  /// 32 m + 8 t + 2 j + e in sums[j][2 r + e].
  __device__ __forceinline__ void Multiply(const uint8_t* factor, int depth, int m, float (&sums)[4][4]) const {
    const uint2* b = reinterpret_cast<const uint2*>(factor + zack::kFactorHeaderBytes) + threadIdx.x % 32 * kParts +
                     m * ((depth + 31) / 32 * 8 * 32 * kParts);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] = 0;
    }
    zack::MultiplyPacked<kHeadDim, kBFloat16>(a16, b, depth, sums);
    const float scale = *reinterpret_cast<const float*>(factor);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][i] *= scale;
    }
  }
};

/// Places of a lane's two rows in [tokens][query_heads]; behind the last: SIZE_MAX. Blocks: [kv_head][rows / 64].
__device__ __forceinline__ void PlacesOfRows(const PrefillParams& p, size_t (&places)[2]) {
  const int group = p.query_heads / p.kv_heads, rows = static_cast<int>(p.tokens) * group;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = blockIdx.y * zack::kRotatedTokens + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
    places[r] =
        row < rows ? static_cast<size_t>(row / group) * p.query_heads + blockIdx.x * group + row % group : SIZE_MAX;
  }
}

/// q into the space: float16 rows whose largest is 2^14 and more, and the powers of two that are to be undone.
template <int kHeadDim, bool kBFloat16>
__global__ void __launch_bounds__(zack::kRotateThreads) ZackMapKernel(const __grid_constant__ PrefillParams p) {
  extern __shared__ __align__(16) uint8_t factor[];
  const auto& layer = *static_cast<const zack::ZackPrefillLayer*>(p.format);
  const int columns = layer.heads[blockIdx.x].chunks[0] * 8, t = threadIdx.x % 4;
  zack::LoadFactor(factor, layer.query + layer.query_bytes * blockIdx.x,
                   zack::FactorBytes<kBFloat16>(kHeadDim, columns));
  size_t places[2];
  PlacesOfRows(p, places);
  const uint16_t* rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r] = places[r] == SIZE_MAX ? nullptr : static_cast<const uint16_t*>(p.q) + places[r] * kHeadDim;
  }
  RowsOfHead<kHeadDim, kBFloat16> q;
  q.Load(rows, kHeadDim);
  __syncthreads();
  float x[kHeadDim / 32][4][4] = {};
#pragma unroll
  for (int m = 0; m < kHeadDim / 32; ++m) {
    if (32 * m < columns) q.Multiply(factor, kHeadDim, m, x[m]);
  }
  const MappedRows<kHeadDim> mapped(p);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0;
#pragma unroll
    for (int m = 0; m < kHeadDim / 32; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fmaxf(fabsf(x[m][j][2 * r]), fabsf(x[m][j][2 * r + 1])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const PowerOfRow power(largest);
    if (places[r] == SIZE_MAX) continue;
    uint16_t* const to = mapped.q + places[r] * kHeadDim + 8 * t;
#pragma unroll
    for (int m = 0; m < kHeadDim / 32; ++m) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = FromFloats(x[m][j][2 * r] * power.up, x[m][j][2 * r + 1] * power.up, false);
      }
      *reinterpret_cast<uint4*>(to + 32 * m) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (t == 0) mapped.states[places[r]] = {power.down, {kMinusInfinity, kMinusInfinity}, 0};
  }
}

/// The outputs of encoded and raw pages, each of weight 1, brought into one space with the weights of their sums.
template <int kHeadDim, bool kBFloat16, bool kFolds>
__global__ void __launch_bounds__(zack::kRotateThreads) ZackExpandKernel(const __grid_constant__ PrefillParams p) {
  constexpr bool kInBFloat16 = kFolds && kBFloat16;  // what is multiplied: raw pages' outputs, or encoded ones'
  constexpr int kMultiplied = static_cast<int>(kFolds ? PageForm::kRaw : PageForm::kEncoded), kOther = 1 - kMultiplied;
  extern __shared__ __align__(16) uint8_t factor[];
  const auto& layer = *static_cast<const zack::ZackPrefillLayer*>(p.format);
  const int rank = layer.heads[blockIdx.x].chunks[1] * 8, t = threadIdx.x % 4;
  const int depth = kFolds ? kHeadDim : rank, columns = kFolds ? rank : kHeadDim;
  zack::LoadFactor(
      factor, layer.base + (kFolds ? layer.sides[2 * blockIdx.x + 1].encode : layer.sides[2 * blockIdx.x + 1].decode),
      zack::FactorBytes<kInBFloat16>(depth, columns));
  const MappedRows<kHeadDim> mapped(p);
  size_t places[2];
  PlacesOfRows(p, places);
  uint16_t* const out = static_cast<uint16_t*>(p.out);
  const uint16_t* rows[2];
  float weights[2][2] = {};  // of a row, by form
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows[r] = nullptr;
    if (places[r] == SIZE_MAX) continue;
    const float lse[2] = {mapped.states[places[r]].lse[0], mapped.states[places[r]].lse[1]};
    const float largest = fmaxf(lse[0], lse[1]);
    if (largest == kMinusInfinity) {  // no item had this row
      places[r] = SIZE_MAX;
      continue;
    }
    constexpr float kLog2E = 1.44269504f;
    const float a = Exp2((lse[0] - largest) * kLog2E), b = Exp2((lse[1] - largest) * kLog2E), n = 1.f / (a + b);
    weights[r][0] = a * n, weights[r][1] = b * n;
    if (weights[r][kMultiplied] > 0) rows[r] = (kFolds ? out : mapped.out) + places[r] * kHeadDim;
    if (t == 0 && p.lse != nullptr) p.lse[places[r]] = largest + __log2f(a + b) * 0.693147181f;
  }
  RowsOfHead<kHeadDim, kInBFloat16> multiplied;
  multiplied.Load(rows, depth);
  __syncthreads();
#pragma unroll 1
  for (int m = 0; m < kHeadDim / 32; ++m) {
    float x[4][4] = {};
    if (32 * m < columns) multiplied.Multiply(factor, depth, m, x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (places[r] == SIZE_MAX) continue;
      const size_t at = places[r] * kHeadDim + 32 * m + 8 * t;
      uint4 other = make_uint4(0, 0, 0, 0);
      if (weights[r][kOther] > 0) other = *reinterpret_cast<const uint4*>((kFolds ? mapped.out : out) + at);
      const uint32_t words[4] = {other.x, other.y, other.z, other.w};
      uint32_t result[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = ToFloats(words[j], !kFolds && kBFloat16);
        result[j] = FromFloats(x[j][2 * r] * weights[r][kMultiplied] + two.x * weights[r][kOther],
                               x[j][2 * r + 1] * weights[r][kMultiplied] + two.y * weights[r][kOther], kBFloat16);
      }
      *reinterpret_cast<uint4*>(out + at) = make_uint4(result[0], result[1], result[2], result[3]);
    }
  }
}

}  // namespace kvmanager::device
