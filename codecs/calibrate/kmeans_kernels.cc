#include "codecs/calibrate/kmeans_kernels.h"

#include <cfloat>
#include <cstring>

#define KV_KERNEL_INLINE static inline __attribute__((always_inline))

namespace kvmanager::calibrate {
namespace {

constexpr int kSumLanes = 16;  // sums are added up as by so many lanes, whatever a register has

#define KV_KERNEL_ISA portable
#define KV_KERNEL_LANES 4
#include "codecs/calibrate/kmeans_kernels_impl.h"
#undef KV_KERNEL_LANES
#undef KV_KERNEL_ISA

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define KV_KERNEL_ISA avx2
#define KV_KERNEL_LANES 8
#include "codecs/calibrate/kmeans_kernels_impl.h"
#undef KV_KERNEL_LANES
#undef KV_KERNEL_ISA
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define KV_KERNEL_ISA avx512
#define KV_KERNEL_LANES 16
#include "codecs/calibrate/kmeans_kernels_impl.h"
#undef KV_KERNEL_LANES
#undef KV_KERNEL_ISA
#pragma GCC pop_options
#endif

}  // namespace

const KmeansKernels& KernelsOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512::kKernels;
  if (isa == Isa::kAvx2) return avx2::kKernels;
#endif
  return portable::kKernels;
}

}  // namespace kvmanager::calibrate
