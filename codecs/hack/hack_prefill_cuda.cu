#include "codecs/hack/hack_prefill_cuda.h"
#include "codecs/hack/hack_prefill_device.cuh"
#include "codecs/zack_hack/zack_hack_prefill_cuda.h"

namespace kvmanager::hack {
namespace {

template <int kHeadDim>
struct Pages {
  template <bool kBFloat16>
  using Of = device::HackPrefillPages<kHeadDim, kBFloat16>;
};
template <int kHeadDim>
constexpr const kvmanager::device::PrefillKernels& kKernelsOf =
    kvmanager::device::PrefillLaunch<kHeadDim, Pages<kHeadDim>::template Of>::kKernels;

}  // namespace

const kvmanager::device::PrefillKernels* HackPrefillKernels(const HackDeviceFormat& format) {
  const HackDeviceShape& shape = format.shape;
  if (!shape.k_along_tokens || !shape.meta8 || shape.partition != 64 || shape.page_tokens != 64) return nullptr;
  if (shape.head_dim != 64 && shape.head_dim != 128) return nullptr;
  const int segments = shape.head_dim / 16;
  for (const HackDeviceHead& head : format.heads) {
    int bits = 0;
    for (int side = 0; side < 2; ++side) {
      for (int s = 0; s < segments; ++s) {
        const int width = head.side[side].segment_bits[s];
        if (width > device::kWidthMax && (side != 0 || width != device::kWideWidth)) return nullptr;
        bits += width;
      }
    }
    if (bits > 2 * device::kWidthMax * segments) return nullptr;  // there is no room for such a record
  }
  // Rotated pages are attended to in a space of their own.
  if (shape.hadamard) return zack_hack::ZackHackPrefillKernels(shape.head_dim, /*folds=*/false);
  return shape.head_dim == 64 ? &kKernelsOf<64> : &kKernelsOf<128>;
}

}  // namespace kvmanager::hack
