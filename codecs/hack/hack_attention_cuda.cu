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
    const int bytes = kStages * std::max(kRecordBytes, 32 * kHeadDim) + rows * (kHeadDim * 5 + 8) + 96;
    const int of_all = rows <= 4 ? 2 * rows * kHeadDim * 4 + 256 : 256;
    return std::min(rows <= 4 ? 16 : 12, (227 * 1024 - of_all) / bytes);
  }
  template <int kRows>
  using Kernel = device::Attend<device::RawPages<kHeadDim, kRows>, device::HackPages<kHeadDim, kKBits, kVBits, kRows>,
                                WarpsFor(kRows), kStages, kBlocksPerSm>;
  using ByRows = device::AttendByRows<Kernel>;
  // Its bytes, and as many as would take the time that its instructions take beyond them.
  static constexpr uint32_t kCost = kRecordBytes + 2600 * kHeadDim / 128;

  template <bool kRotates, bool kVNorms>
  static int Launch(const device::AttendParams& params, int rows_max, int blocks, CUstream_st* stream) {
    device::AttendParams mine = params;
    mine.rotates = kRotates, mine.v_norms = kVNorms;
    return ByRows::Launch(mine, rows_max, blocks, stream);
  }
  template <bool kRotates, bool kVNorms>
  static constexpr AttendKernels kKernels = {
      {WarpsFor(4), kBlocksPerSm}, kCost, Launch<kRotates, kVNorms>, ByRows::Prepare};
  static const AttendKernels* Find(bool rotates, bool v_norms) {
    if (rotates) return v_norms ? &kKernels<true, true> : &kKernels<true, false>;
    return v_norms ? &kKernels<false, true> : &kKernels<false, false>;
  }
};

template <int kHeadDim>
const AttendKernels* Find(int k_bits, int v_bits, bool rotates, bool v_norms) {
  switch (10 * k_bits + v_bits) {
    case 21:
      return HackAttend<kHeadDim, 2, 1>::Find(rotates, v_norms);
    case 22:
      return HackAttend<kHeadDim, 2, 2>::Find(rotates, v_norms);
    case 32:
      return HackAttend<kHeadDim, 3, 2>::Find(rotates, v_norms);
    case 43:
      return HackAttend<kHeadDim, 4, 3>::Find(rotates, v_norms);
    case 44:
      return HackAttend<kHeadDim, 4, 4>::Find(rotates, v_norms);
    default:
      return nullptr;
  }
}

}  // namespace

const AttendKernels* FindHackAttention(int head_dim, int k_bits, int v_bits, bool rotates, bool v_norms) {
  if (head_dim == 64) return Find<64>(k_bits, v_bits, rotates, v_norms);
  return head_dim == 128 ? Find<128>(k_bits, v_bits, rotates, v_norms) : nullptr;
}

}  // namespace kvmanager::hack
