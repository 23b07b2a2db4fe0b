#include "codecs/million/million_prefill_device.cuh"
#include "codecs/zack/mapped_prefill_launch.cuh"
#include "codecs/zack_million/zack_million_prefill_cuda.h"

namespace kvmanager {
namespace {

struct FormatLayer {
  static __device__ __forceinline__ const million::MillionAnyLayer& Of(const device::PrefillParams& p) {
    return *static_cast<const ZackMillionPrefillLayer*>(p.format)->codes;
  }
};

template <int kHeadDim>
struct PagesOf {
  template <bool>
  using Type = device::MillionPrefillPages<kHeadDim, false, FormatLayer, true>;
};

template <int kHeadDim>
const device::PrefillKernels* KernelsOf(bool folds) {
  using Prefill = zack::MappedPrefill<kHeadDim, PagesOf<kHeadDim>::template Type>;
  return folds ? &Prefill::template kKernels<true> : &Prefill::template kKernels<false>;
}

}  // namespace

const device::PrefillKernels* ZackMillionPrefillKernels(int head_dim, bool folds) {
  return head_dim == 64 ? KernelsOf<64>(folds) : head_dim == 128 ? KernelsOf<128>(folds) : nullptr;
}

}  // namespace kvmanager
