// Look-ups of MILLION's centroids by address, four channels of a token at a time: a *quad*, in one look-up, two or
// four, as wide as subspaces are.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "codecs/million/million_device_format.h"

namespace kvmanager::device {

struct MillionQuads {
  using Side = million::MillionAnySide;

  /// body(N) where N, a constant, is as many channels as a look-up has.
  template <class Body>
  static __device__ __forceinline__ void WithWidth(const Side& side, const Body& body) {
    if (side.width_log2 >= 2) {
      body(std::integral_constant<int, 4>());
    } else if (side.width_log2 == 1) {
      body(std::integral_constant<int, 2>());
    } else {
      body(std::integral_constant<int, 1>());
    }
  }

  /// Two codes, in bytes i and j of a word, as float16.
  template <int i, int j>
  static __device__ __forceinline__ uint32_t Halves(uint32_t word) {
    constexpr uint32_t kMany = 0x64646464, kBias = 0x64806480;  // an integer n below 1024 is the float16 1024 + n
    const uint32_t biased = __byte_perm(word, kMany, 0x4040 | j << 8 | i);
    const __half2 two = __hsub2(*reinterpret_cast<const __half2*>(&biased), *reinterpret_cast<const __half2*>(&kBias));
    return *reinterpret_cast<const uint32_t*>(&two);
  }

  static __device__ __forceinline__ uint32_t IndexOf(const Side& side, const uint8_t* piece, int subspace, int token) {
    if (side.bits == 8) return piece[subspace * 64 + token];
    uint32_t index = 0, low = 0;
#pragma unroll
    for (int i = 0; i < million::kPlanes; ++i) {
      constexpr int kBits[] = {8, 4, 2, 1};
      const int b = kBits[i];
      if (side.plane[i] == Side::kNoPlane) continue;
      const int byte = b == 1 ? token / 8 : token % (8 * b), shift = b == 1 ? token % 8 : token / (8 * b) * b;
      index |= (piece[side.plane[i] + subspace * 8 * b + byte] >> shift & ((1u << b) - 1)) << low;
      low += b;
    }
    return index;
  }

  /// The quad's codes + 128 of a token: a byte each. codes: of the head; piece: the strip of one side; kWidth: of a
  /// look-up.
  template <int kWidth>
  static __device__ __forceinline__ uint32_t Of(const Side& side, const uint8_t* codes, const uint8_t* piece, int quad,
                                                int token) {
    const uint8_t* const of_side = codes + side.codes;
    if constexpr (kWidth == 4) {
      const int subspace = 4 * quad >> side.width_log2;
      const uint32_t index = IndexOf(side, piece, subspace, token);
      const uint32_t at =
          ((uint32_t(subspace) << side.bits | index) << side.width_log2) + (4 * quad & ((1 << side.width_log2) - 1));
      return *reinterpret_cast<const uint32_t*>(of_side + at);
    } else {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4 / kWidth; ++i) {
        const int subspace = 4 / kWidth * quad + i;
        const uint32_t at = uint32_t(subspace) << side.bits | IndexOf(side, piece, subspace, token);
        if constexpr (kWidth == 2) {
          word |= uint32_t{reinterpret_cast<const uint16_t*>(of_side)[at]} << 16 * i;
        } else {
          word |= uint32_t{of_side[at]} << 8 * i;
        }
      }
      return word;
    }
  }
};

}  // namespace kvmanager::device
