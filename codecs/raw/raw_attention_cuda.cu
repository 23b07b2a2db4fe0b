#include <algorithm>

#include "codecs/device/attend_launch.cuh"
#include "codecs/raw/raw_attention_cuda.h"
#include "codecs/raw/raw_attention_device.cuh"

namespace kvmanager {
namespace {

using device::AttendKernels;

template <int kHeadDim>
struct RawAttend {
  static constexpr int kBlocksPerSm = 1, kStages = 3 * 128 / kHeadDim;
  // As many as shared memory holds: each has bytes on their way, and a state to leave.
  static constexpr int WarpsFor(int rows) {
    const int bytes = kStages * 32 * kHeadDim + rows * (kHeadDim * 4 + 8) + 160;
    return std::min(16, 226 * 1024 / bytes);
  }
  template <int kRows>
  using Kernel = device::Attend<device::RawPages<kHeadDim, kRows>, device::RawPages<kHeadDim, kRows>, WarpsFor(kRows),
                                kStages, kBlocksPerSm>;
  static int Launch(const device::AttendParams& params, int rows_max, int blocks, CUstream_st* stream) {
    return rows_max <= 4 ? Kernel<4>::Launch(params, blocks, stream) : Kernel<8>::Launch(params, blocks, stream);
  }
  static int Prepare() {
    const int error = Kernel<4>::Prepare();
    return error != 0 ? error : Kernel<8>::Prepare();
  }
  static constexpr AttendKernels kKernels = {{WarpsFor(4), kBlocksPerSm}, 64 * 4 * kHeadDim, Launch, Prepare};
};

}  // namespace

const AttendKernels* RawAttentionKernels(int head_dim) {
  static constexpr AttendKernels k64 = RawAttend<64>::kKernels, k128 = RawAttend<128>::kKernels;
  return head_dim == 64 ? &k64 : head_dim == 128 ? &k128 : nullptr;
}

}  // namespace kvmanager
