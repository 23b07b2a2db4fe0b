#include "codecs/million/million_prefill_cuda.h"
#include "codecs/million/million_prefill_device.cuh"

namespace kvmanager::million {
namespace {

struct FormatLayer {
  static __device__ __forceinline__ const MillionAnyLayer& Of(const device::PrefillParams& p) {
    return *static_cast<const MillionAnyLayer*>(p.format);
  }
};

template <int kHeadDim>
struct PagesOf {
  template <bool kBFloat16>
  using Type = device::MillionPrefillPages<kHeadDim, kBFloat16, FormatLayer, false>;
};
template <int kHeadDim>
constexpr const device::PrefillKernels& kKernelsOf =
    device::PrefillLaunch<kHeadDim, PagesOf<kHeadDim>::template Type>::kKernels;

}  // namespace

const device::PrefillKernels* MillionPrefillKernels(int head_dim) {
  return head_dim == 64 ? &kKernelsOf<64> : head_dim == 128 ? &kKernelsOf<128> : nullptr;
}

}  // namespace kvmanager::million
