#include "codecs/device/prefill_device.cuh"
#include "codecs/raw/raw_prefill_cuda.h"

namespace kvmanager {
namespace {

template <int kHeadDim>
constexpr const device::PrefillKernels& kKernelsOf = device::PrefillLaunch<kHeadDim, device::NoEncodedPages>::kKernels;

}  // namespace

const device::PrefillKernels* RawPrefillKernels(int head_dim) {
  return head_dim == 64 ? &kKernelsOf<64> : head_dim == 128 ? &kKernelsOf<128> : nullptr;
}

}  // namespace kvmanager
