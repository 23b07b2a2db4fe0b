// The launches of kernels whose pages are raw ones, or rows in the forms of raw ones.
#pragma once

#include <algorithm>

#include "codecs/device/attend_launch.cuh"

namespace kvmanager::device {

/// Pages: a template of head_dim and of a tile's rows, RawPages or what reads as much in its pieces.
template <template <int kHeadDim, int kRows> class Pages, int kHeadDim>
struct AttendRaw {
  static constexpr int kBlocksPerSm = 1, kStages = 3 * 128 / kHeadDim;
  // As many as shared memory holds: each has bytes on their way, and a state to leave.
  static constexpr int WarpsFor(int rows) {
    const int bytes = kStages * 32 * kHeadDim + rows * (kHeadDim * 4 + 8) + 160;
    return std::min(16, 226 * 1024 / bytes);
  }
  template <int kRows>
  using Kernel = Attend<Pages<kHeadDim, kRows>, Pages<kHeadDim, kRows>, WarpsFor(kRows), kStages, kBlocksPerSm>;
  using ByRows = AttendByRows<Kernel>;
  static constexpr AttendKernels kKernels = {
      {WarpsFor(4), kBlocksPerSm}, 64 * 4 * kHeadDim, ByRows::Launch, ByRows::Prepare};
};

/// Of head_dim 64 and 128; nullptr: of others.
template <template <int kHeadDim, int kRows> class Pages>
const AttendKernels* FindAttendRaw(int head_dim) {
  static constexpr AttendKernels k64 = AttendRaw<Pages, 64>::kKernels, k128 = AttendRaw<Pages, 128>::kKernels;
  return head_dim == 64 ? &k64 : head_dim == 128 ? &k128 : nullptr;
}

}  // namespace kvmanager::device
