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
  using ByRows = device::AttendByRows<Kernel>;
  // Its bytes, and as many as would take the time that its instructions take beyond them.
  static constexpr uint32_t kCost = kRecordBytes + 2600 * kHeadDim / 128;
  static constexpr AttendKernels kKernels = {{WarpsFor(4), kBlocksPerSm}, kCost, ByRows::Launch, ByRows::Prepare};
};

template <int kHeadDim, int kKBits, int kVBits>
constexpr AttendKernels kKernelsOf = HackAttend<kHeadDim, kKBits, kVBits>::kKernels;

template <int kHeadDim>
const AttendKernels* Find(int k_bits, int v_bits) {
  switch (10 * k_bits + v_bits) {
    case 21:
      return &kKernelsOf<kHeadDim, 2, 1>;
    case 22:
      return &kKernelsOf<kHeadDim, 2, 2>;
    case 32:
      return &kKernelsOf<kHeadDim, 3, 2>;
    case 43:
      return &kKernelsOf<kHeadDim, 4, 3>;
    case 44:
      return &kKernelsOf<kHeadDim, 4, 4>;
    default:
      return nullptr;
  }
}

}  // namespace

const AttendKernels* FindHackAttention(int head_dim, int k_bits, int v_bits) {
  return head_dim == 64 ? Find<64>(k_bits, v_bits) : head_dim == 128 ? Find<128>(k_bits, v_bits) : nullptr;
}

}  // namespace kvmanager::hack
