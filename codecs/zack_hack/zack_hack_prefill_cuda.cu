#include "codecs/hack/hack_prefill_device.cuh"
#include "codecs/zack/mapped_prefill_launch.cuh"
#include "codecs/zack_hack/zack_hack_prefill_cuda.h"

namespace kvmanager::zack_hack {
namespace {

struct FormatHeads {
  static __device__ __forceinline__ const hack::HackDeviceHead* Of(const device::PrefillParams& p) {
    return static_cast<const ZackHackPrefillLayer*>(p.format)->heads;
  }
};

template <int kHeadDim>
struct PagesOf {
  template <bool>
  struct Type : hack::device::HackPrefillPages<kHeadDim, false, FormatHeads> {
    static constexpr bool kMaps = true, kAllColumns = true;
  };
};

template <int kHeadDim>
const device::PrefillKernels* KernelsOf(bool folds) {
  using Prefill = zack::MappedPrefill<kHeadDim, PagesOf<kHeadDim>::template Type>;
  return folds ? &Prefill::template kKernels<true> : &Prefill::template kKernels<false>;
}

}  // namespace

const device::PrefillKernels* ZackHackPrefillKernels(int head_dim, bool folds) {
  return head_dim == 64 ? KernelsOf<64>(folds) : head_dim == 128 ? KernelsOf<128>(folds) : nullptr;
}

}  // namespace kvmanager::zack_hack
