#include <algorithm>

#include "codecs/device/attend_launch.cuh"
#include "codecs/hack/hack_attention_cuda_table.h"
#include "codecs/hack/hack_attention_device.cuh"
#include "codecs/raw/raw_attention_device.cuh"

namespace kvmanager::hack {
namespace {

using device::AttendKernels;

template <int kHeadDim, int kKBits, int kVBits>
struct HackAttend {
  static constexpr int kRecordBytes = device::HackPages<kHeadDim, kKBits, kVBits, 4>::kPieceBytes;
  static constexpr int kStages = 2, kBlocksPerSm = 1;
  // As many as registers (more rows take more) and shared memory hold: each has a record that it reads, one on its way,
  // and a state to leave.
  static constexpr int WarpsFor(int rows) {
    const int bytes = kStages * std::max(kRecordBytes, 32 * kHeadDim) + rows * (kHeadDim * 5 + 8) + 160;
    return std::min(rows <= 4 ? 16 : 12, 226 * 1024 / bytes);
  }
  template <int kRows>
  using Kernel = device::Attend<device::RawPages<kHeadDim, kRows>, device::HackPages<kHeadDim, kKBits, kVBits, kRows>,
                                WarpsFor(kRows), kStages, kBlocksPerSm>;
  static int Launch(const device::AttendParams& params, int rows_max, int blocks, CUstream_st* stream) {
    return rows_max <= 4 ? Kernel<4>::Launch(params, blocks, stream) : Kernel<8>::Launch(params, blocks, stream);
  }
  static int Prepare() {
    const int error = Kernel<4>::Prepare();
    return error != 0 ? error : Kernel<8>::Prepare();
  }
  static constexpr AttendKernels kKernels = {{WarpsFor(4), kBlocksPerSm}, Launch, Prepare};
};

}  // namespace

const AttendKernels* FindHackAttention(int head_dim, int k_bits, int v_bits) {
#define KVMANAGER_HACK(d, k, v)                                              \
  if (head_dim == d && k_bits == k && v_bits == v) {                         \
    static constexpr AttendKernels kKernels = HackAttend<d, k, v>::kKernels; \
    return &kKernels;                                                        \
  }
#ifdef KVMANAGER_FEW_KERNELS
  KVMANAGER_HACK(128, 2, 2)
  KVMANAGER_HACK(128, 3, 2)
#else
  KVMANAGER_HACK(128, 2, 2)
  KVMANAGER_HACK(128, 3, 2)
  KVMANAGER_HACK(128, 4, 3) KVMANAGER_HACK(128, 2, 1) KVMANAGER_HACK(128, 4, 4) KVMANAGER_HACK(64, 2, 2)
      KVMANAGER_HACK(64, 3, 2) KVMANAGER_HACK(64, 4, 3)
#endif
#undef KVMANAGER_HACK
  return nullptr;
}

}  // namespace kvmanager::hack
