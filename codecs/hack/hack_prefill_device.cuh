// HACK pages on their way to tensor cores: codes of 0 to 4 bits, of K also 8, any width per segment, become float16 or
// bfloat16 (hack_format.h has the bytes).
//
// For k_axis=channel, 8-bit metadata, 64 tokens to a page and a partition. A warp decodes a quarter of the channels. A
// nibble n under the bits of 1024.0 is the float16 1024 + n or, in the upper half of its byte, 1024 + 16 n: one fused
// product makes either the exact code less half the levels, a second one the value. Counted from the middle of its
// range, a value's error is little more than its own rounding.
#pragma once

#include <type_traits>

#include "codecs/device/prefill_device.cuh"
#include "codecs/hack/hack_device_format.h"

namespace kvmanager::hack::device {

using kvmanager::device::Barrier;
using kvmanager::device::CopyBulk;
using kvmanager::device::PrefillParams;
using kvmanager::device::PrefillTile;
using kvmanager::device::SharedAddress;

/// Of a segment; of K also kWideWidth, where a record is no larger than with kWidthMax throughout.
inline constexpr int kWidthMax = 4, kWideWidth = 8;

/// Codes of tiles 0 and 2 (`even`) and of 1 and 3 (`odd`) of a word: four lanes in bytes, a tile in each half.
struct Nibbles {
  uint32_t even = 0, odd = 0;
};

/// Of word [j][r] of a segment's planes.
template <int kWidth>
__device__ __forceinline__ Nibbles ReadNibbles(const uint8_t* segment, int j, int r) {
  constexpr uint32_t kTwo = 0x33333333u, kThird = 0x44444444u;
  const auto word = [&](int at) { return *reinterpret_cast<const uint32_t*>(segment + at); };
  const int plane = 64 * j + 4 * r, half_plane = 64 * (j / 2) + 4 * r, shift = 2 * (j % 2);
  if constexpr (kWidth == 0) {
    return {};
  } else if constexpr (kWidth == 1) {
    const uint32_t one = word(half_plane) >> shift;
    return {one & 0x11111111u, one >> 1 & 0x11111111u};
  } else if constexpr (kWidth == 2) {
    const uint32_t low = word(plane);
    return {low & kTwo, low >> 2 & kTwo};
  } else if constexpr (kWidth == 3) {
    const uint32_t low = word(plane), one = word(256 + half_plane) << (2 - shift);
    return {(low & kTwo) | (one & kThird), (low >> 2 & kTwo) | (one >> 1 & kThird)};
  } else {
    const uint32_t low = word(plane), high = word(256 + plane);
    return {(low & kTwo) | (high << 2 & ~kTwo), (low >> 2 & kTwo) | (high & ~kTwo)};
  }
}

/// Calls body with the width as a constant. kMayBeWide: it may be kWideWidth.
template <bool kMayBeWide, class Body>
__device__ __forceinline__ void WithWidth(int width, const Body& body) {
  if constexpr (kMayBeWide) {
    if (width == kWideWidth) return body(std::integral_constant<int, kWideWidth>());
  }
  switch (width) {
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    default:
      return body(std::integral_constant<int, 0>());
  }
}

/// Steps and middles of channels, and values from codes less half the levels, in pairs of channels or tokens.
template <bool kBFloat16>
struct PairOfValues;
template <>
struct PairOfValues<false> {
  using Number = uint16_t;  // in scratch memory
  struct Meta {
    uint32_t step, middle;
  };
  static __device__ __forceinline__ Number ToNumber(float x) { return __half_as_ushort(__float2half_rn(x)); }
  /// Of two channels, and of one twice.
  static __device__ __forceinline__ Meta Of(const Number* steps, const Number* middles) {
    return {*reinterpret_cast<const uint32_t*>(steps), *reinterpret_cast<const uint32_t*>(middles)};
  }
  static __device__ __forceinline__ Meta Twice(const Number* step, const Number* middle) {
    return {*step * 0x10001u, *middle * 0x10001u};
  }
  static __device__ __forceinline__ uint32_t Value(__half2 code, const Meta& m) {
    const __half2 value =
        __hfma2(code, *reinterpret_cast<const __half2*>(&m.step), *reinterpret_cast<const __half2*>(&m.middle));
    return *reinterpret_cast<const uint32_t*>(&value);
  }
  /// Two norms of two bytes, as 256ths.
  static __device__ __forceinline__ __half2 Norms(uint32_t two) {
    const uint32_t bits = __byte_perm(two, 0x44, 0x4140);  // 4 + byte / 256
    return __hadd2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(-4.f));
  }
  static __device__ __forceinline__ uint32_t Times(uint32_t values, __half2 norms) {
    const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&values), norms);
    return *reinterpret_cast<const uint32_t*>(&product);
  }
};
template <>
struct PairOfValues<true> {
  using Number = float;
  struct Meta {
    float2 step, middle;
  };
  static __device__ __forceinline__ Number ToNumber(float x) { return x; }
  static __device__ __forceinline__ Meta Of(const Number* steps, const Number* middles) {
    return {*reinterpret_cast<const float2*>(steps), *reinterpret_cast<const float2*>(middles)};
  }
  static __device__ __forceinline__ Meta Twice(const Number* step, const Number* middle) {
    return {make_float2(*step, *step), make_float2(*middle, *middle)};
  }
  static __device__ __forceinline__ uint32_t Value(__half2 code, const Meta& m) {
    const float2 c = __half22float2(code);
    const __nv_bfloat162 value =
        __floats2bfloat162_rn(fmaf(c.x, m.step.x, m.middle.x), fmaf(c.y, m.step.y, m.middle.y));
    return *reinterpret_cast<const uint32_t*>(&value);
  }
  static __device__ __forceinline__ __nv_bfloat162 Norms(uint32_t two) {
    return __floats2bfloat162_rn(static_cast<float>(two & 0xff) * (1 / 256.f),
                                 static_cast<float>(two >> 8) * (1 / 256.f));
  }
  static __device__ __forceinline__ uint32_t Times(uint32_t values, __nv_bfloat162 norms) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&values), norms);
    return *reinterpret_cast<const uint32_t*>(&product);
  }
};

/// Where a layer's heads are: PrefillParams::format.
struct FormatHeads {
  static __device__ __forceinline__ const HackDeviceHead* Of(const PrefillParams& p) {
    return static_cast<const HackDeviceHead*>(p.format);
  }
};

template <int kHeadDim, bool kBFloat16, class Heads = FormatHeads>
struct HackPrefillPages {
  using Pair = PairOfValues<kBFloat16>;
  using Number = typename Pair::Number;
  using Tile = PrefillTile<kHeadDim>;
  static constexpr int kWarpSegments = kHeadDim / 64, kWarpChannels = 16 * kWarpSegments;
  // Both sides' codes, and their metadata, each array aligned; norms.
  static constexpr int kRecordBytes = 2 * (kHeadDim / 16 * 128 * kWidthMax + 16 + 2 * kHeadDim) + 64;
  static constexpr int kScratchBytes = 2 * kWarpChannels * sizeof(Number);

  static __device__ __forceinline__ void Load(const PrefillParams& p, int kv_head, const uint8_t* first,
                                              const uint8_t* second, uint32_t first_to, uint32_t second_to,
                                              Barrier barrier) {
    const HackDeviceHead& head = Heads::Of(p)[kv_head];
    const uint32_t bytes = head.side[1].end;
    barrier.ArriveExpecting(first != nullptr && second != nullptr ? 2 * bytes : bytes);
    if (first != nullptr) CopyBulk(first_to, first + head.offset, bytes, barrier);
    if (second != nullptr) CopyBulk(second_to, second + head.offset, bytes, barrier);
  }

  /// Codes less half the levels, of nibbles in the low or high half of two bytes that are 16 bits apart.
  template <int kWidth>
  struct Codes {
    static constexpr uint32_t kHalf = 1u << kWidth >> 1;
    /// Of whole bytes.
    static __device__ __forceinline__ __half2 Bytes(uint32_t bytes) {
      const uint32_t x = (bytes & 0x00ff00ffu) | 0x64006400u;
      return __hadd2(*reinterpret_cast<const __half2*>(&x), Twice(0xe400 + kHalf));  // -(1024 + half)
    }
    static __device__ __forceinline__ __half2 Twice(uint32_t bits) {
      const uint32_t two = bits * 0x10001u;
      return *reinterpret_cast<const __half2*>(&two);
    }
    static __device__ __forceinline__ __half2 Low(uint32_t bytes) {
      const uint32_t x = (bytes & 0x000f000fu) | 0x64006400u;
      return __hadd2(*reinterpret_cast<const __half2*>(&x), Twice(0xe400 + kHalf));  // -(1024 + half)
    }
    static __device__ __forceinline__ __half2 High(uint32_t bytes) {
      const uint32_t x = (bytes & 0x00f000f0u) | 0x64006400u;
      return __hfma2(*reinterpret_cast<const __half2*>(&x), Twice(0x2c00), Twice(0xd400 + 16 * kHalf));  // / 16
    }
  };

  struct Side {
    uint32_t segments;      // offset in the record of the codes of this warp's first segment
    uint32_t next_segment;  // from there to the second's
    uint32_t widths;        // of both, in bytes
    uint32_t tops, steps, minima;
    uint32_t norms, norm_top;  // 0: there are none

    __device__ __forceinline__ int width(int k) const { return static_cast<int>(widths >> 8 * k & 0xff); }

    __device__ __forceinline__ void Open(const PrefillParams& p, int kv_head, int side_index) {
      const HackDeviceSide& side = Heads::Of(p)[kv_head].side[side_index];
      const int warp = threadIdx.x / 32 % 4, first = warp * kWarpSegments, second = first + kWarpSegments - 1;
      segments = side.codes + side.segment_offset[first];
      next_segment = static_cast<uint32_t>(side.segment_offset[second]) - side.segment_offset[first];
      widths = side.segment_bits[first] | static_cast<uint32_t>(side.segment_bits[second]) << 8;
      tops = side.tops, steps = side.steps + warp * kWarpChannels, minima = side.minima + warp * kWarpChannels;
      norms = side.norms, norm_top = side.norm_top;
    }

    /// Steps, then middles, of the warp's channels, into scratch memory.
    __device__ __forceinline__ void ReadMeta(const uint8_t* record, uint8_t* scratch) const {
      const int lane = threadIdx.x % 32;
      Number* const to = reinterpret_cast<Number*>(scratch);
      if (kWarpChannels == 32 || lane < kWarpChannels) {
        const int levels = (1 << width(lane / 16)) - 1;
        const __half2 top = *reinterpret_cast<const __half2*>(record + tops);
        // Of norms in 256ths.
        const float unit =
            norms == 0 ? 1.f : __half2float(*reinterpret_cast<const __half*>(record + norm_top)) * (256 / 255.f);
        float step = unit * __low2float(top) * (static_cast<float>(record[steps + lane]) * (1 / 255.f));
        const float minimum =
            unit * __high2float(top) * (static_cast<float>(static_cast<int8_t>(record[minima + lane])) * (1 / 127.f));
        // The topmost value stays finite, which rounding might exceed.
        if constexpr (!kBFloat16) {
          step = fminf(step, __fdividef(65000.f - minimum, static_cast<float>(max(levels, 1))));
        }
        to[lane] = Pair::ToNumber(step);
        to[kWarpChannels + lane] = Pair::ToNumber(fmaf(static_cast<float>((levels + 1) >> 1), step, minimum));
      }
      __syncwarp();
    }

    /// Calls fill(width, first segment, segments): as many at once as are alike.
    template <bool kMayBeWide, class Fill>
    __device__ __forceinline__ void ForSegments(const Fill& fill) const {
      if (kWarpSegments == 1 || width(0) == width(1)) {
        WithWidth<kMayBeWide>(width(0), [&](auto w) { fill(w, 0, std::integral_constant<int, kWarpSegments>()); });
      } else {
#pragma unroll 1
        for (int k = 0; k < kWarpSegments; ++k) {
          WithWidth<kMayBeWide>(width(k), [&](auto w) { fill(w, k, std::integral_constant<int, 1>()); });
        }
      }
    }

    /// A lane has tokens 16 i + r of 8 channels, i = 0..3: a chunk of each.
    __device__ __forceinline__ void FillKeys(const uint8_t* record, uint32_t tile, int first_token,
                                             uint8_t* scratch) const {
      ReadMeta(record, scratch);
      const int lane = threadIdx.x % 32, h = lane / 16, r = lane % 16;
      ForSegments<true>([&](auto width, int first, auto count) {
        using Of = Codes<decltype(width)::value>;
#pragma unroll
        for (int n = 0; n < decltype(count)::value; ++n) {
          const int k = first + n;
          const uint8_t* const segment = record + segments + k * next_segment;
          uint32_t rows[4][4];
#pragma unroll
          for (int p = 0; p < 2; ++p) {
            const Number* const of = reinterpret_cast<const Number*>(scratch) + 16 * k + 8 * h + 4 * p;
            const typename Pair::Meta one = Pair::Of(of, of + kWarpChannels);
            const typename Pair::Meta two = Pair::Of(of + 2, of + 2 + kWarpChannels);
            // Channels 0 and 1 in bytes 0 and 2, channels 2 and 3 above them.
            constexpr uint32_t kApart = 0x3120;
            if constexpr (decltype(width)::value == kWideWidth) {
              const uint8_t* const words = segment + 256 * (2 * h + p) + 4 * r;
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const uint32_t x = __byte_perm(*reinterpret_cast<const uint32_t*>(words + 64 * i), 0, kApart);
                rows[i][2 * p] = Pair::Value(Of::Bytes(x), one);
                rows[i][2 * p + 1] = Pair::Value(Of::Bytes(x >> 8), two);
              }
            } else {
              const Nibbles nibbles = ReadNibbles<decltype(width)::value>(segment, 2 * h + p, r);
#pragma unroll
              for (int odd = 0; odd < 2; ++odd) {
                const uint32_t x = __byte_perm(odd == 0 ? nibbles.even : nibbles.odd, 0, kApart);
                rows[odd][2 * p] = Pair::Value(Of::Low(x), one);
                rows[odd][2 * p + 1] = Pair::Value(Of::Low(x >> 8), two);
                rows[2 + odd][2 * p] = Pair::Value(Of::High(x), one);
                rows[2 + odd][2 * p + 1] = Pair::Value(Of::High(x >> 8), two);
              }
            }
          }
          const int chunk = 2 * (threadIdx.x / 32 % 4 * kWarpSegments + k) + h;
          const uint32_t to = tile + Tile::At(first_token + r, chunk);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 16 * 128), "r"(rows[i][0]),
                         "r"(rows[i][1]), "r"(rows[i][2]), "r"(rows[i][3])
                         : "memory");
          }
        }
      });
    }

    /// A lane has tokens 16 i + 8 h + 2 t and + 1 of channels g and g + 8: fragments of matrices that are stored
    /// transposed.
    __device__ __forceinline__ void FillValues(const uint8_t* record, uint32_t tile, int first_token,
                                               uint8_t* scratch) const {
      ReadMeta(record, scratch);
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const uint32_t bytes = t % 2 == 0 ? 0x4140 : 0x4342;  // tokens 2t and 2t + 1 in bytes 0 and 2
      ForSegments<false>([&](auto width, int first, auto count) {
        using Of = Codes<decltype(width)::value>;
#pragma unroll
        for (int n = 0; n < decltype(count)::value; ++n) {
          const int k = first + n;
          const uint8_t* const segment = record + segments + k * next_segment;
          uint32_t matrices[4][4];  // [i][2 h + channel / 8]
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const Number* const of = reinterpret_cast<const Number*>(scratch) + 16 * k + 8 * u + g;
            const typename Pair::Meta meta = Pair::Twice(of, of + kWarpChannels);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const Nibbles nibbles = ReadNibbles<decltype(width)::value>(segment, 2 * h + t / 2, 8 * u + g);
#pragma unroll
              for (int odd = 0; odd < 2; ++odd) {
                const uint32_t x = __byte_perm(odd == 0 ? nibbles.even : nibbles.odd, 0, bytes);
                matrices[odd][2 * h + u] = Pair::Value(Of::Low(x), meta);
                matrices[2 + odd][2 * h + u] = Pair::Value(Of::High(x), meta);
              }
            }
          }
          if (norms != 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const auto of =
                    Pair::Norms(*reinterpret_cast<const uint16_t*>(record + norms + 16 * i + 8 * h + 2 * t));
#pragma unroll
                for (int u = 0; u < 2; ++u) matrices[i][2 * h + u] = Pair::Times(matrices[i][2 * h + u], of);
              }
            }
          }
          // Lane l gives row l % 8 of matrix l / 8.
          const int chunk = 2 * (threadIdx.x / 32 % 4 * kWarpSegments + k) + lane / 8 % 2;
          const uint32_t to = tile + Tile::At(first_token + lane / 16 * 8 + lane % 8, chunk);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 16 * 128),
                "r"(matrices[i][0]), "r"(matrices[i][1]), "r"(matrices[i][2]), "r"(matrices[i][3])
                : "memory");
          }
        }
      });
    }
  };
};

}  // namespace kvmanager::hack::device
