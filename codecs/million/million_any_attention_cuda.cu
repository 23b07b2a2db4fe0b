#include <algorithm>

#include "codecs/device/attend_launch.cuh"
#include "codecs/million/million_any_attention_device.cuh"
#include "codecs/million/million_attention_cuda_table.h"

namespace kvmanager::million {
namespace {

using device::AttendKernels;

/// kPieceBytes: of a side of a page of one head, at most.
template <int kHeadDim, int kPieceBytes, bool kApart>
struct MillionAnyAttend {
  // As many as shared memory holds beside the codes: each has a side that it reads, one on its way if there is room,
  // and a state to leave.
  static constexpr int kUsual = 6144, kStages = kPieceBytes <= kUsual ? 2 : 1;
  static constexpr int kWarpBytes =
      kStages * (std::max(kPieceBytes, 32 * kHeadDim) + 8) + 8 * (kApart ? kHeadDim * 8 + 24 : kHeadDim * 4 + 8) + 80;
  static constexpr int kWarpsMax = kHeadDim == 128 ? 8 : 12;  // more would lack registers
  static constexpr int kWarps = std::min(kWarpsMax, (227 * 1024 - 128 - 2 * 256 * kHeadDim) / kWarpBytes);
  using Tables = device::AttendTables<device::RawPages<kHeadDim, device::kTileRows>,
                                      device::MillionAnyPages<kHeadDim, kPieceBytes, kApart>, kWarps, kStages>;
  using Kernel = std::conditional_t<kApart, device::LaunchApart<Tables>, Tables>;
  static int Launch(const device::AttendParams& params, int, int blocks, CUstream_st* stream) {
    return Kernel::Launch(params, blocks, stream);
  }
  // What look-ups take, in bytes that would take as long: of the slowest format that was measured (m=64,bits=6), 3.3
  // times that of the fastest.
  static constexpr uint32_t kCost = 150000 * kHeadDim / 128;
  static constexpr AttendKernels kKernels = {{kWarps, 1}, kCost, Launch, Kernel::Prepare, kApart};
};

template <bool kApart>
const AttendKernels* KernelsOf(int head_dim, uint32_t piece_bytes) {
  static constexpr AttendKernels k64 = MillionAnyAttend<64, 6144, kApart>::kKernels,
                                 k128 = MillionAnyAttend<128, 6144, kApart>::kKernels,
                                 kLarge = MillionAnyAttend<128, 12288, kApart>::kKernels;
  if (head_dim == 64) return &k64;
  if (head_dim != 128) return nullptr;
  return piece_bytes <= 6144 ? &k128 : &kLarge;
}

}  // namespace

const AttendKernels* MillionAnyKernels(int head_dim, uint32_t piece_bytes, bool apart) {
  return apart ? KernelsOf<true>(head_dim, piece_bytes) : KernelsOf<false>(head_dim, piece_bytes);
}

}  // namespace kvmanager::million
