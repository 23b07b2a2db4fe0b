// The kernels of rotations, written once over simd_inl.h's vectors and compiled per instruction set, with contraction
// off (BUILD): what is to be fused says so.
//
// A block of rows is widened to fp32 once; then, for a tile of rows x channels held in registers, one step of d loads
// the tile's channels of one factor row and broadcasts one element of each row.
#pragma once

#include "codecs/simd_inl.h"
//
#include "codecs/zack/rotation_kernel.h"

namespace kvmanager::zack {
namespace {

constexpr int kDimMax = 256;  // PageLayout::kHeadDimMax
// Accumulators of a tile leave registers for the factor's vectors, the broadcast element and the product.
constexpr int kRegisters = kLanes == 16 ? 32 : 16;
constexpr int kTileRows = 6;

enum class Source { kHalf, kBFloat16, kFloat };

template <bool kFused, int kR, int kC>
KVMANAGER_INLINE void RotateTile(const float* x, size_t x_stride, int d, const float* factor, int n, float* out,
                                 size_t out_stride) {
  VecF acc[kR][kC] = {};
  for (int i = 0; i < d; ++i, factor += n) {
    VecF f[kC];
    KVMANAGER_UNROLL
    for (int c = 0; c < kC; ++c) f[c] = LoadF(factor + c * kLanes);
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) {
      const VecF element = SetF(x[r * x_stride + i]);
      KVMANAGER_UNROLL
      for (int c = 0; c < kC; ++c) {
        if constexpr (kFused) {
          acc[r][c] = MulAdd(element, f[c], acc[r][c]);
        } else {
          acc[r][c] = acc[r][c] + element * f[c];
        }
      }
    }
  }
  KVMANAGER_UNROLL
  for (int r = 0; r < kR; ++r) {
    KVMANAGER_UNROLL
    for (int c = 0; c < kC; ++c) StoreF(out + r * out_stride + c * kLanes, acc[r][c]);
  }
}

/// kR rows; as many channels at a time as the registers hold.
template <bool kFused, int kR>
void RotateTileRows(const float* x, size_t x_stride, int d, const float* factor, int n, float* out, size_t out_stride) {
  constexpr int kRoom = (kRegisters - 2) / (kR + 1);
  constexpr int kC = kRoom >= 8 ? 8 : kRoom >= 4 ? 4 : 2;
  int c = 0;
  for (; c + kC * kLanes <= n; c += kC * kLanes) {
    RotateTile<kFused, kR, kC>(x, x_stride, d, factor + c, n, out + c, out_stride);
  }
  if constexpr (kC > 4) {
    for (; c + 4 * kLanes <= n; c += 4 * kLanes) {
      RotateTile<kFused, kR, 4>(x, x_stride, d, factor + c, n, out + c, out_stride);
    }
  }
  if constexpr (kC > 2) {
    if (n - c == 3 * kLanes) {
      RotateTile<kFused, kR, 3>(x, x_stride, d, factor + c, n, out + c, out_stride);
      c = n;
    }
    for (; c + 2 * kLanes <= n; c += 2 * kLanes) {
      RotateTile<kFused, kR, 2>(x, x_stride, d, factor + c, n, out + c, out_stride);
    }
  }
  for (; c < n; c += kLanes) RotateTile<kFused, kR, 1>(x, x_stride, d, factor + c, n, out + c, out_stride);
}

template <Source kSource, bool kFused>
void Rotate(const RotationArguments& a) {
  alignas(64) float widened[kSource == Source::kFloat ? 1 : kTileRows * kDimMax];
  for (int row = 0; row < a.rows;) {
    const int left = a.rows - row;
    const int rows = left >= kTileRows ? kTileRows : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const float* x;
    size_t stride = a.x_stride;
    if constexpr (kSource == Source::kFloat) {
      x = static_cast<const float*>(a.x) + row * stride;
    } else {
      for (int r = 0; r < rows; ++r) {
        const uint16_t* from = static_cast<const uint16_t*>(a.x) + (row + r) * a.x_stride;
        for (int i = 0; i < a.d; i += kLanes) {
          StoreF(widened + r * a.d + i, Load16<kSource == Source::kBFloat16>(from + i));
        }
      }
      x = widened;
      stride = a.d;
    }
    float* out = a.out + row * a.out_stride;
    switch (rows) {
      case 1:
        RotateTileRows<kFused, 1>(x, stride, a.d, a.factor, a.n, out, a.out_stride);
        break;
      case 2:
        RotateTileRows<kFused, 2>(x, stride, a.d, a.factor, a.n, out, a.out_stride);
        break;
      case 4:
        RotateTileRows<kFused, 4>(x, stride, a.d, a.factor, a.n, out, a.out_stride);
        break;
      default:
        RotateTileRows<kFused, kTileRows>(x, stride, a.d, a.factor, a.n, out, a.out_stride);
        break;
    }
    row += rows;
  }
}

}  // namespace

#if defined(KVMANAGER_ISA_AVX512)
#define KVMANAGER_ROTATION_KERNELS kRotationKernelsAvx512
#elif defined(KVMANAGER_ISA_AVX2)
#define KVMANAGER_ROTATION_KERNELS kRotationKernelsAvx2
#else
#define KVMANAGER_ROTATION_KERNELS kRotationKernelsPortable
#endif

const RotationKernels KVMANAGER_ROTATION_KERNELS = {Rotate<Source::kHalf, false>, Rotate<Source::kBFloat16, false>,
                                                    Rotate<Source::kFloat, false>, Rotate<Source::kFloat, true>};

}  // namespace kvmanager::zack
