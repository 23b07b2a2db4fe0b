// Decoding of HACK pages: the values that codes stand for, rounded to the layout's dtype.
#include <cuda_runtime_api.h>

#include "codecs/hack/hack_codes_device.cuh"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/hack/hack_encode_general_device.cuh"
#include "codecs/hack/hack_rows_device.cuh"

namespace kvmanager::hack {
namespace device {
namespace {

template <int kWidth>
__device__ __forceinline__ Words<kWidth> ReadWords(const uint8_t* segment, int h, int r) {
  Words<kWidth> words;
  ForEachWord<kWidth>(h, r, [&](int at, auto word) { word(words) = *reinterpret_cast<const uint32_t*>(segment + at); });
  return words;
}
/// Of tasks r and r + 1, r even.
template <int kWidth>
__device__ __forceinline__ void ReadWords(const uint8_t* segment, int h, int r, Words<kWidth>* first,
                                          Words<kWidth>* second) {
  ForEachWord<kWidth>(h, r, [&](int at, auto word) {
    const uint2 two = *reinterpret_cast<const uint2*>(segment + at);
    word(*first) = two.x, word(*second) = two.y;
  });
}

/// Step and minimum n of a side (n counts [partition][entry] of the page), as attention reads them.
__device__ __forceinline__ Meta ReadMeta(const HackDeviceShape& shape, const HackDeviceSide& side,
                                         const uint8_t* record, int n, int group) {
  if (!shape.meta8) {
    return {HalfBitsToFloat(reinterpret_cast<const uint16_t*>(record + side.steps)[n]),
            HalfBitsToFloat(reinterpret_cast<const uint16_t*>(record + side.minima)[n])};
  }
  const uint16_t* const tops = reinterpret_cast<const uint16_t*>(record + side.tops) + 2 * group;
  return {HalfBitsToFloat(tops[0]) * float(record[side.steps + n]) / 255.f,
          HalfBitsToFloat(tops[1]) * float(int8_t(record[side.minima + n])) / 127.f};
}

/// Of a token of V.
__device__ __forceinline__ float ReadNorm(const HackDeviceSide& side, const uint8_t* record, int token) {
  return NormOf(HalfBitsToFloat(*reinterpret_cast<const uint16_t*>(record + side.norm_top)),
                record[side.norms + token]);
}

/// One strip of 64 tokens, one partition. Threads and tasks as in the encoder. kInRows: values go to `rows`, of which
/// StoreRows makes the page's; else into the page.
template <int kDim, bool kBFloat16, bool kInRows, bool kIsV>
__device__ __forceinline__ void DecodeStrip(const HackDeviceShape& shape, const HackDeviceSide& side,
                                            const uint8_t* record, uint8_t* raw, float* rows, float2 (&metas)[kDim]) {
  const int t = threadIdx.x;
  int pair, segment, h, r, token;
  if constexpr (kIsV) {
    pair = t % (kDim / 2), h = t / (kDim / 2), segment = pair / 8, r = pair % 8 * 2, token = 8 * h;
  } else {
    const int eight = t % (kDim / 8);
    pair = 4 * eight, segment = eight / 2, h = eight % 2, r = t / (kDim / 8) * 2, token = r;
  }
  const Meta own = ReadMeta(shape, side, record, t, 0);
  metas[t] = {own.step, own.minimum};
  uint8_t* const to = raw + (token * kDim + 2 * pair) * 2;
  float* const to_row = rows + token * StripRows<kDim>::kPitch + 2 * pair;
  const uint8_t* const from = record + side.codes + side.segment_offset[segment];
  const int width = side.segment_bits[segment];
  __syncthreads();
  constexpr int kChannels = kIsV ? 2 : 8;
  float2 meta[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) meta[c] = metas[2 * pair + c];
  WithWidth(width, [&](auto w) {
    constexpr int kWidth = decltype(w)::value;
    Words<kWidth> words[2];
    ReadWords<kWidth>(from, h, r, &words[0], &words[1]);
    const auto value = [&](int task, int i, int k) {
      uint32_t code = CodeOf<kWidth>(words[task], i, k);
      if (kIsV && kWidth == 8) code ^= 0x80;
      const float2 m = meta[kIsV ? task : k];
      return Integer(code) * m.x + m.y;
    };
    if constexpr (kIsV) {
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        const float a = value(0, n / 8, n % 8), b = value(1, n / 8, n % 8);
        const int row = n / 8 * 16 + n % 8;
        if constexpr (kInRows) {
          *reinterpret_cast<float2*>(to_row + row * StripRows<kDim>::kPitch) = make_float2(a, b);
        } else {
          *reinterpret_cast<uint32_t*>(to + row * kDim * 2) = Pair<kBFloat16>::FromFloats(a, b);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int row = n % 4 * 16 + n / 4;
        float x[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] = value(n / 4, n % 4, c);
        if constexpr (kInRows) {
          float4* const four = reinterpret_cast<float4*>(to_row + row * StripRows<kDim>::kPitch);
          four[0] = {x[0], x[1], x[2], x[3]}, four[1] = {x[4], x[5], x[6], x[7]};
        } else {
          uint32_t two[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) two[c] = Pair<kBFloat16>::FromFloats(x[2 * c], x[2 * c + 1]);
          *reinterpret_cast<uint4*>(to + row * kDim * 2) = {two[0], two[1], two[2], two[3]};
        }
      }
    }
  });
}

/// Rows times their norms, rotated back, into the page.
template <int kDim, bool kBFloat16>
__device__ __forceinline__ void StoreRows(const HackDeviceShape& shape, const HackDeviceSide& side,
                                          const uint8_t* record, const float* rows, uint8_t* raw) {
  using Rows = StripRows<kDim>;
  const Rows place;
#pragma unroll
  for (int group = 0; group < Rows::kGroups; ++group) {
    const int token = place.Token(group);
    float x[16];
    place.Read(rows, token, x);
    if (side.norms != 0) {
      const float norm = ReadNorm(side, record, token);
#pragma unroll
      for (float& value : x) value *= norm;
    }
    if (shape.hadamard) Rows::Rotate(x, shape.rotation_norm);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<uint2*>(raw + (token * kDim + place.Channel(j)) * 2) = {
          Pair<kBFloat16>::FromFloats(x[4 * j], x[4 * j + 1]), Pair<kBFloat16>::FromFloats(x[4 * j + 2], x[4 * j + 3])};
    }
  }
}

/// Blocks: [item][side of `sides` from first_side on][head].
template <int kDim, bool kBFloat16, bool kInRows>
__global__ void __launch_bounds__(kDim, 640 / kDim)
    DecodeStripKernel(const HackDeviceShape shape, const HackDeviceHead* __restrict__ table,
                      const DeviceDecodeItem* __restrict__ items, int first_side, int sides) {
  __shared__ float2 metas[kDim];
  float* rows = nullptr;
  if constexpr (kInRows) {
    __shared__ __align__(16) float memory[StripRows<kDim>::kFloats];
    rows = memory;
  }
  const uint32_t head = blockIdx.x % shape.kv_heads, rest = blockIdx.x / shape.kv_heads;
  const int side = first_side + rest % sides;
  const DeviceDecodeItem item = items[rest / sides];
  const HackDeviceHead* const heads = shape.heads_of(table, item.layer);
  uint8_t* const raw = item.raw + shape.raw_offset(side, head);
  const uint8_t* const record = item.encoded + heads[head].offset;
  const HackDeviceSide& layout = heads[head].side[side];
  side == 0 ? DecodeStrip<kDim, kBFloat16, kInRows, false>(shape, layout, record, raw, rows, metas)
            : DecodeStrip<kDim, kBFloat16, kInRows, true>(shape, layout, record, raw, rows, metas);
  if constexpr (kInRows) {
    __syncthreads();
    StoreRows<kDim, kBFloat16>(shape, layout, record, rows, raw);
  }
}

constexpr int kStripMetasMax = 512;  // of a strip: 2 partitions of 256 channels, or 8 of 64 tokens

constexpr size_t kGeneralDecodeStaticBytes = sizeof(Meta) * kStripMetasMax + sizeof(float) * kStripTokens;
constexpr size_t GeneralDecodeBytes(int head_dim) { return size_t(kStripTokens) * (head_dim + 1) * sizeof(float); }

/// Blocks: [item][head][strip] of one side.
template <bool kBFloat16>
__global__ void __launch_bounds__(kGeneralThreads)
    DecodeGeneralKernel(const HackDeviceShape shape, const HackDeviceHead* __restrict__ table,
                        const DeviceDecodeItem* __restrict__ items, int side_index) {
  extern __shared__ float rows[];  // [64][head_dim + 1]
  __shared__ Meta metas[kStripMetasMax];
  __shared__ float norms[kStripTokens];
  const int d = shape.head_dim, pitch = d + 1, part = shape.partition, strips = shape.page_tokens / kStripTokens;
  const int strip = blockIdx.x % strips, head = blockIdx.x / strips % shape.kv_heads;
  const DeviceDecodeItem item = items[blockIdx.x / strips / shape.kv_heads];
  const HackDeviceHead* const heads = shape.heads_of(table, item.layer);
  const HackDeviceSide& side = heads[head].side[side_index];
  const uint8_t* const record = item.encoded + heads[head].offset;
  const bool is_v = side_index == 1, along_tokens = is_v || shape.k_along_tokens;
  const int first_token = strip * kStripTokens;
  const int count = along_tokens ? (part < kStripTokens ? kStripTokens / part : 1) * d : d / part * kStripTokens;
  for (int n = threadIdx.x; n < count; n += kGeneralThreads) {
    if (along_tokens) {
      const int partition = first_token / part + n / d;
      metas[n] = ReadMeta(shape, side, record, partition * d + n % d, partition);
    } else {
      metas[n] =
          ReadMeta(shape, side, record, n / kStripTokens * shape.page_tokens + first_token + n % kStripTokens, 0);
    }
  }
  if (side.norms != 0 && threadIdx.x < kStripTokens) {
    norms[threadIdx.x] = ReadNorm(side, record, first_token + threadIdx.x);
  }
  __syncthreads();
  const uint8_t* const codes = record + side.codes + strip * side.strip_bytes;
  for (int n = threadIdx.x; n < 2 * d; n += kGeneralThreads) {  // [segment][h][r]
    const int r = n % 16, h = n / 16 % 2, segment = n / 32;
    WithWidth(side.segment_bits[segment], [&](auto w) {
      constexpr int kWidth = decltype(w)::value;
      const Words<kWidth> words = ReadWords<kWidth>(codes + side.segment_offset[segment], h, r);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const int t = 16 * i + (is_v ? 8 * h + k : r), c = segment * kSegmentChannels + (is_v ? r : 8 * h + k);
          const uint32_t code = CodeOf<kWidth>(words, i, k) ^ (is_v && kWidth == 8 ? 0x80 : 0);
          const Meta m = metas[along_tokens ? t / part * d + c : c / part * kStripTokens + t];
          const float value = Integer(code) * m.step + m.minimum;
          rows[t * pitch + c] = side.norms != 0 ? value * norms[t] : value;
        }
      }
    });
  }
  __syncthreads();
  if (shape.hadamard) {
    for (int t = threadIdx.x / 32; t < kStripTokens; t += kGeneralThreads / 32) {
      RotateRow(rows + t * pitch, d, shape.rotation_norm);
    }
    __syncthreads();
  }
  uint32_t* const to = reinterpret_cast<uint32_t*>(item.raw + shape.raw_offset(side_index, head)) + first_token * d / 2;
  for (int t = threadIdx.x / 32; t < kStripTokens; t += kGeneralThreads / 32) {
    for (int pair = threadIdx.x % 32; pair < d / 2; pair += 32) {
      const float* const from = rows + t * pitch + 2 * pair;
      to[t * d / 2 + pair] = Pair<kBFloat16>::FromFloats(from[0], from[1]);
    }
  }
}

}  // namespace
}  // namespace device

namespace {

constexpr size_t kDefaultSharedBytes = 48 * 1024;  // a kernel that wants more asks for it

struct DecodeLaunch {
  const HackDeviceShape& shape;
  const HackDeviceHead* heads;
  const DeviceDecodeItem* items;
  uint32_t count;
  cudaStream_t stream;

  template <int kDim, bool kInRows>
  cudaError_t Strips(int first_side, int sides) const {
    const auto kernel = shape.is_bfloat16 ? device::DecodeStripKernel<kDim, true, kInRows>
                                          : device::DecodeStripKernel<kDim, false, kInRows>;
    kernel<<<count * shape.kv_heads * sides, kDim, 0, stream>>>(shape, heads, items, first_side, sides);
    return cudaGetLastError();
  }

  cudaError_t Sides(int first_side, int sides) const {
    if (shape.decode_by_strip[first_side]) {
      if (shape.in_rows[first_side]) {
        return shape.head_dim == 128 ? Strips<128, true>(first_side, sides) : Strips<64, true>(first_side, sides);
      }
      return shape.head_dim == 128 ? Strips<128, false>(first_side, sides) : Strips<64, false>(first_side, sides);
    }
    const size_t bytes = device::GeneralDecodeBytes(shape.head_dim);
    const auto kernel = shape.is_bfloat16 ? device::DecodeGeneralKernel<true> : device::DecodeGeneralKernel<false>;
    if (bytes > kDefaultSharedBytes - device::kGeneralDecodeStaticBytes) {
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
      if (error != cudaSuccess) return error;
    }
    const uint32_t strips = shape.page_tokens / kStripTokens;
    for (int side = first_side; side < first_side + sides; ++side) {
      kernel<<<count * shape.kv_heads * strips, device::kGeneralThreads, bytes, stream>>>(shape, heads, items, side);
    }
    return cudaGetLastError();
  }
};

}  // namespace

int LaunchHackDecode(const HackDeviceShape& shape, const HackDeviceHead* heads, const DeviceDecodeItem* items,
                     uint32_t count, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  const DecodeLaunch launch = {shape, heads, items, count, stream};
  if (shape.decode_by_strip[0] == shape.decode_by_strip[1] && shape.in_rows[0] == shape.in_rows[1]) {
    return launch.Sides(0, 2);
  }
  const cudaError_t error = launch.Sides(0, 1);
  return error != cudaSuccess ? error : launch.Sides(1, 1);
}

}  // namespace kvmanager::hack
