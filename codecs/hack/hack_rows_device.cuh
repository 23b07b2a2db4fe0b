// Rows of a strip as floats, where the encoder and the decoder rotate them or have norms for them.
#pragma once

#include <cstdint>

#include "codecs/hack/hack_codes_device.cuh"

namespace kvmanager::hack::device {

/// How a block of kDim threads shares 64 rows: kLanes lanes have a row, each four times four channels, so that what
/// they read or write at once is contiguous. In shared memory rows have a pitch that spreads columns over the banks.
template <int kDim>
struct StripRows {
  static constexpr int kLanes = kDim / 16, kRowsAtOnce = kDim / kLanes, kGroups = kStripTokens / kRowsAtOnce;
  static constexpr int kPitch = kDim + 4, kFloats = kStripTokens * kPitch;
  static_assert(kGroups * kRowsAtOnce == kStripTokens);

  int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;

  __device__ __forceinline__ int Token(int group) const { return group * kRowsAtOnce + row; }
  /// First of the j-th four channels.
  __device__ __forceinline__ int Channel(int j) const { return j * (kDim / 4) + 4 * lane; }

  __device__ __forceinline__ void Read(const float* rows, int token, float (&x)[16]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 four = *reinterpret_cast<const float4*>(rows + token * kPitch + Channel(j));
      x[4 * j] = four.x, x[4 * j + 1] = four.y, x[4 * j + 2] = four.z, x[4 * j + 3] = four.w;
    }
  }
  __device__ __forceinline__ void Write(const float (&x)[16], int token, float* rows) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<float4*>(rows + token * kPitch + Channel(j)) = {x[4 * j], x[4 * j + 1], x[4 * j + 2],
                                                                        x[4 * j + 3]};
    }
  }

  /// The row of these lanes times the normalised Walsh-Hadamard matrix, in the reference's order.
  static __device__ __forceinline__ void Rotate(float (&x)[16], float norm) {
    const auto within = [&](int half) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if ((i & half) != 0) continue;
        const float low = x[i], high = x[i + half];
        x[i] = low + high, x[i + half] = low - high;
      }
    };
    within(1), within(2);
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) {
      const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
      for (float& value : x) {
        const float other = __shfl_xor_sync(0xffffffffu, value, bit);
        value = upper ? other - value : value + other;
      }
    }
    within(4), within(8);
#pragma unroll
    for (float& value : x) value *= norm;
  }
  /// The largest of the row's lanes.
  static __device__ __forceinline__ float MaxOfRow(float x) {
#pragma unroll
    for (int bit = 1; bit < kLanes; bit *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, bit));
    return x;
  }
};

}  // namespace kvmanager::hack::device
