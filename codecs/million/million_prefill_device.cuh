// MILLION's pages on their way to tensor cores (codecs/device/prefill_device.cuh): centroids become float16 or
// bfloat16.
//
// A lane has two tokens of a page, and a warp a quarter of the channels, so that steps and mids are the same for all
// lanes. Codes are looked up in shared memory, but those of more than 8 bits in device memory.
#pragma once

#include "codecs/device/prefill_device.cuh"
#include "codecs/million/million_quads_device.cuh"

namespace kvmanager::device {

/// Layers::Of(params): the MillionAnyLayer. kMapped: pages are of rotated K and V.
template <int kHeadDim, bool kBFloat16, class Layers, bool kMapped>
struct MillionPrefillPages {
  static constexpr bool kMaps = kMapped, kAllColumns = true;
  static constexpr int kRecordBytes = million::kPrefillRecordBytesMax, kScratchBytes = 0;
  static constexpr int kTableBytes = 256 * kHeadDim;
  using Tile = PrefillTile<kHeadDim>;
  using Layer = million::MillionAnyLayer;

  static __device__ __forceinline__ void Load(const PrefillParams& p, int kv_head, const uint8_t* first,
                                              const uint8_t* second, uint32_t first_to, uint32_t second_to,
                                              Barrier barrier) {
    const uint32_t bytes = Layers::Of(p).record_bytes;
    barrier.ArriveExpecting(first != nullptr && second != nullptr ? 2 * bytes : bytes);
    if (first != nullptr) CopyBulk(first_to, first + kv_head * bytes, bytes, barrier);
    if (second != nullptr) CopyBulk(second_to, second + kv_head * bytes, bytes, barrier);
  }

  static __device__ __forceinline__ uint32_t CodeBytes(const million::MillionAnySide& side) {
    return static_cast<uint32_t>(kHeadDim) << side.bits;
  }
  static __device__ __forceinline__ void LoadTable(const PrefillParams& p, int kv_head, int side_index, uint8_t* to) {
    const Layer& layer = Layers::Of(p);
    const million::MillionAnySide& side = layer.side[side_index];
    const uint32_t bytes = CodeBytes(side);
    if (bytes > kTableBytes) return;
    const uint8_t* const from = layer.codes + layer.heads[kv_head].codes + side.codes;
    for (uint32_t i = threadIdx.x % kGroupThreads * 16; i < bytes; i += kGroupThreads * 16) {
      *reinterpret_cast<uint4*>(to + i) = __ldg(reinterpret_cast<const uint4*>(from + i));
    }
  }

  struct Side {
    million::MillionAnySide side;
    const uint8_t* codes;
    const float *step, *mid;

    __device__ __forceinline__ void Open(const PrefillParams& p, int kv_head, int side_index) {
      const Layer& layer = Layers::Of(p);
      const million::MillionAnyHead& head = layer.heads[kv_head];
      side = layer.side[side_index];
      codes = layer.codes + head.codes;
      step = head.step[side_index], mid = head.mid[side_index];
    }
    __device__ __forceinline__ void UseTable(const PrefillParams&, const uint8_t* table) {
      if (CodeBytes(side) <= kTableBytes) codes = table - side.codes;
    }
    __device__ __forceinline__ void FillKeys(const uint8_t* record, uint32_t tile, int first_token, uint8_t*) const {
      Fill(record, tile, first_token);
    }
    __device__ __forceinline__ void FillValues(const uint8_t* record, uint32_t tile, int first_token, uint8_t*) const {
      Fill(record, tile, first_token);
    }

   private:
    __device__ __forceinline__ void Fill(const uint8_t* record, uint32_t tile, int first_token) const {
      constexpr int kChunks = kHeadDim / 32;  // of 8 channels, of a warp
      const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * kChunks;
      const uint8_t* const piece = record + side.offset;
      MillionQuads::WithWidth(side, [&](auto width) {
#pragma unroll 2
        for (int i = 0; i < 2 * kChunks; ++i) {
          const int chunk = first + i / 2, token = lane + 32 * (i % 2);
          uint32_t words[4];
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const uint32_t quad = MillionQuads::Of<width.value>(side, codes, piece, 2 * chunk + q, token);
            const float4 s = __ldg(reinterpret_cast<const float4*>(step + 8 * chunk + 4 * q));
            const float4 m = __ldg(reinterpret_cast<const float4*>(mid + 8 * chunk + 4 * q));
            const float2 a = CodesOf(MillionQuads::Halves<0, 1>(quad)), b = CodesOf(MillionQuads::Halves<2, 3>(quad));
            words[2 * q] = FromFloats(fmaf(a.x, s.x, m.x), fmaf(a.y, s.y, m.y), kBFloat16);
            words[2 * q + 1] = FromFloats(fmaf(b.x, s.z, m.z), fmaf(b.y, s.w, m.w), kBFloat16);
          }
          asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + Tile::At(first_token + token, chunk)),
                       "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      });
    }
    static __device__ __forceinline__ float2 CodesOf(uint32_t halves) {
      return __half22float2(*reinterpret_cast<const __half2*>(&halves));
    }
  };
};

}  // namespace kvmanager::device
