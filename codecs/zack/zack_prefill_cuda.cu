#include "codecs/zack/mapped_prefill_launch.cuh"
#include "codecs/zack/zack_prefill_cuda.h"

namespace kvmanager::zack {
namespace {

template <int kHeadDim>
struct PagesOf {
  template <bool>
  using Type = device::ZackPrefillPages<kHeadDim>;
};

template <int kHeadDim>
const device::PrefillKernels* KernelsOf(bool folds) {
  using Prefill = MappedPrefill<kHeadDim, PagesOf<kHeadDim>::template Type>;
  return folds ? &Prefill::template kKernels<true> : &Prefill::template kKernels<false>;
}

}  // namespace

const device::PrefillKernels* ZackPrefillKernels(int head_dim, bool folds) {
  return head_dim == 64 ? KernelsOf<64>(folds) : head_dim == 128 ? KernelsOf<128>(folds) : nullptr;
}

}  // namespace kvmanager::zack
