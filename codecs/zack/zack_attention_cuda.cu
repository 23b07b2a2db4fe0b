#include <algorithm>

#include "codecs/device/attend_launch.cuh"
#include "codecs/zack/zack_attention_cuda.h"
#include "codecs/zack/zack_attention_device.cuh"

namespace kvmanager::zack {
namespace {

using device::AttendKernels;

template <int kHeadDim>
struct ZackAttend {
  static constexpr int kStages = 2, kBlocksPerSm = 1;
  // As many as shared memory holds: each has a unit that it reads, one on its way, and a state to leave in either
  // space.
  static constexpr int WarpsFor(int rows) {
    const int bytes = kStages * int(kUnitBytes) + rows * (kHeadDim * 8 + 16) + 128;
    return std::min(12, 226 * 1024 / bytes);
  }
  template <int kRows>
  using Kernel = device::AttendApart<device::RawPages<kHeadDim, kRows>, device::ZackPages<kHeadDim, kRows>,
                                     WarpsFor(kRows), kStages, kBlocksPerSm>;
  using ByRows = device::AttendByRows<Kernel>;
  // Where nobody says what heads cost: as if half of all dimensions were kept.
  static constexpr uint32_t kCost = kDevicePageTokens * 2 * kHeadDim;
  static constexpr AttendKernels kKernels = {
      {WarpsFor(4), kBlocksPerSm}, kCost, ByRows::Launch, ByRows::Prepare, true, 2};
};

}  // namespace

const AttendKernels* ZackAttentionKernels(int head_dim) {
  static constexpr AttendKernels k64 = ZackAttend<64>::kKernels, k128 = ZackAttend<128>::kKernels;
  return head_dim == 64 ? &k64 : head_dim == 128 ? &k128 : nullptr;
}

}  // namespace kvmanager::zack
