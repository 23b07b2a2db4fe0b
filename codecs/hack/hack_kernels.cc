#include "codecs/hack/hack_kernels.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kvmanager/base/half.h"

#define KV_KERNEL_INLINE static inline __attribute__((always_inline))

namespace kvmanager::hack {
namespace {

/// Scratch of one head's side. Everything that quantises sees elements by entries (hack_reference.h: an entry has its
/// own step and minimum in each partition): [token][channel] where partitions run along tokens, [channel][token]
/// otherwise.
struct Workspace {
  static constexpr int kElementsMax = PageLayout::kPageTokensMax * PageLayout::kHeadDimMax;
  static constexpr int kMetaMax = 8 * 256;  // partitions of 32 of 256 elements, 256 entries

  alignas(64) float x[kElementsMax];
  alignas(64) float rotated[PageLayout::kHeadDimMax];
  alignas(64) uint8_t codes[kElementsMax];  // [segment][token][16 channels]
  alignas(64) float lo[kMetaMax];
  alignas(64) float hi[kMetaMax];
  alignas(64) float mid[kMetaMax];
  alignas(64) float half[kMetaMax];
  alignas(64) float best[kMetaMax];
  alignas(64) float mean[kMetaMax];
  alignas(64) float step[kMetaMax];
  alignas(64) float minimum[kMetaMax];
  alignas(64) uint16_t stored_step[kMetaMax];
  alignas(64) uint16_t stored_minimum[kMetaMax];
  alignas(64) uint32_t seeds[PageLayout::kPageTokensMax];
  alignas(64) float norms[PageLayout::kPageTokensMax];  // of V's rows, then their inverses as the page rounds them
};

/// One side of one head, as the kernels need it.
struct Side {
  const SideLayout* layout;
  DType dtype;
  int tokens;
  int channels;
  bool along_tokens;
  bool is_v;
  bool rotate;
  bool norms;
  bool meta8;
  bool stochastic;
  int elements() const { return along_tokens ? tokens : channels; }
  int entries() const { return along_tokens ? channels : tokens; }
  /// Width of the codes of `entry` in `partition`; 16 entries from a multiple of 16 on have one.
  int width(int partition, int entry) const {
    return layout->segment_bits[(along_tokens ? entry : partition * layout->partition) / kSegmentChannels];
  }
  bool least_squares(int partition, int entry) const {
    return layout->segment_least_squares[(along_tokens ? entry : partition * layout->partition) / kSegmentChannels];
  }
};

Side MakeSide(const HackFormat& format, int head, int side) {
  return {&format.heads[head].side[side],
          format.layout.dtype,
          format.layout.page_tokens,
          format.layout.head_dim,
          side == 1 || format.parameters.k_axis == Axis::kChannel,
          side == 1,
          format.parameters.rotation == Rotation::kHadamard,
          format.heads[head].side[side].norms != 0,
          format.parameters.meta_bits == 8,
          format.parameters.rounding == Rounding::kStochastic};
}

/// [width index][shift index] factors of the least-squares grid: lower and upper bound, in halves of the range about
/// its middle.
struct RangeGrid {
  static constexpr int kTries = 12 * 5;
  float below[kTries], above[kTries];
};
constexpr RangeGrid MakeRangeGrid() {
  RangeGrid grid{};
  int n = 0;
  for (int percent = 45; percent <= 100; percent += 5) {
    for (double shift : {-0.15, -0.05, 0.0, 0.05, 0.15}) {
      grid.below[n] = float(shift - percent / 100.0);
      grid.above[n] = float(shift + percent / 100.0);
      ++n;
    }
  }
  return grid;
}
constexpr RangeGrid kRangeGrid = MakeRangeGrid();

/// As in hack_reference.h.
constexpr float kNegligible = 0x1p-100f;

/// fp16 bits of the least number that is not below f, which is 0 or more.
uint16_t RoundUpToHalf(float f) {
  const uint16_t bits = FloatToHalf(f);
  return HalfToFloat(bits) < f ? uint16_t(bits + 1) : bits;
}

float LoadHalf(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return HalfToFloat(bits);
}

uint64_t Mix64(uint64_t h) {
  h += 0x9e3779b97f4a7c15;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9;
  h = (h ^ (h >> 27)) * 0x94d049bb133111eb;
  return h ^ (h >> 31);
}

/// Seeds of stochastic rounding, one per token (hack_reference.h, RoundingNoise).
void MakeSeeds(uint32_t layer, int head, int side, uint64_t first_token, int tokens, uint32_t* seeds) {
  const uint64_t place = Mix64(uint64_t(layer) << 32 | uint64_t(head) << 1 | uint64_t(side));
  for (int t = 0; t < tokens; ++t) seeds[t] = uint32_t(Mix64(place ^ (first_token + t)) >> 32);
}

}  // namespace

#define KV_KERNEL_ISA portable
#define KV_KERNEL_LANES 4
#define KV_KERNEL_AVX512 0
#define KV_KERNEL_F16C 0
#include "codecs/hack/hack_kernels_impl.h"
#undef KV_KERNEL_ISA
#undef KV_KERNEL_LANES
#undef KV_KERNEL_AVX512
#undef KV_KERNEL_F16C

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#endif
#define KV_KERNEL_ISA avx2
#define KV_KERNEL_LANES 8
#define KV_KERNEL_AVX512 0
#define KV_KERNEL_F16C 1
#include "codecs/hack/hack_kernels_impl.h"
#undef KV_KERNEL_ISA
#undef KV_KERNEL_LANES
#undef KV_KERNEL_AVX512
#undef KV_KERNEL_F16C
#if defined(__clang__)
#pragma clang attribute pop
#endif
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c"))), \
                             apply_to = function)
#endif
#define KV_KERNEL_ISA avx512
#define KV_KERNEL_LANES 16
#define KV_KERNEL_AVX512 1
#define KV_KERNEL_F16C 1
#include "codecs/hack/hack_kernels_impl.h"
#undef KV_KERNEL_ISA
#undef KV_KERNEL_LANES
#undef KV_KERNEL_AVX512
#undef KV_KERNEL_F16C
#if defined(__clang__)
#pragma clang attribute pop
#endif
#pragma GCC pop_options
#endif

const HackKernels& HackKernelsFor(Isa isa) {
  static constexpr HackKernels kPortable = {portable::Encode, portable::Decode};
#if defined(__x86_64__)
  static constexpr HackKernels kAvx2 = {avx2::Encode, avx2::Decode};
  static constexpr HackKernels kAvx512 = {avx512::Encode, avx512::Decode};
  if (isa == Isa::kAvx512) return kAvx512;
  if (isa == Isa::kAvx2) return kAvx2;
#endif
  return kPortable;
}

size_t HackEncodeWorkspaceBytes(const HackFormat& format) { return sizeof(Workspace); }

}  // namespace kvmanager::hack
