// From MixedHackPages to tables of kernels.
#pragma once

#include <algorithm>

#include "codecs/device/attend_launch.cuh"
#include "codecs/raw/raw_attention_device.cuh"
#include "codecs/zack_hack/zack_hack_attention_cuda.h"
#include "codecs/zack_hack/zack_hack_attention_device.cuh"

namespace kvmanager::zack_hack {

template <int kHeadDim, int kRecordBytes, bool kWide>
struct ZackHackAttend {
  static constexpr int kStages = 2, kBlocksPerSm = 1;
  // As many as registers (more rows take more) and shared memory hold: each has a record that it reads, one on its way,
  // and a state to leave in either space.
  static constexpr int WarpsFor(int rows) {
    const int bytes = kStages * std::max(kRecordBytes, 32 * kHeadDim) + rows * (kHeadDim * (kWide ? 10 : 9) + 16) + 160;
    return std::min(rows <= 4 ? 16 : 12, 226 * 1024 / bytes);
  }
  template <int kRows>
  using Kernel = device::AttendApart<device::RawPages<kHeadDim, kRows>,
                                     device::MixedHackPages<kHeadDim, kRows, kRecordBytes, kWide>, WarpsFor(kRows),
                                     kStages, kBlocksPerSm>;
  using ByRows = device::AttendByRows<Kernel>;
  // What its instructions take, in bytes that would take as long.
  static constexpr uint32_t kCost = 6400 * kHeadDim / 128;

  template <bool kVNorms>
  static int Launch(const device::AttendParams& params, int rows_max, int blocks, CUstream_st* stream) {
    device::AttendParams mine = params;
    mine.v_norms = kVNorms;
    return ByRows::Launch(mine, rows_max, blocks, stream);
  }
  template <bool kVNorms>
  static constexpr device::AttendKernels kKernels = {
      {WarpsFor(4), kBlocksPerSm}, kCost, Launch<kVNorms>, ByRows::Prepare, true};
};

/// FindZackHackAttention of formats with segments of 8 bits, or without.
template <bool kWide>
const device::AttendKernels* FindAttention(int head_dim, uint32_t record_bytes, bool v_norms) {
  // Of records: as many bytes as leave room for 16 warps, and 4 bits throughout.
  constexpr int kUsual128 = 4800, kLargest128 = 8832, kLargest64 = 4480;
  const auto kernels = [&](auto of) -> const device::AttendKernels* {
    using Kernels = decltype(of);
    return v_norms ? &Kernels::template kKernels<true> : &Kernels::template kKernels<false>;
  };
  if (head_dim == 128 && record_bytes <= kUsual128) return kernels(ZackHackAttend<128, kUsual128, kWide>());
  if (head_dim == 128 && record_bytes <= kLargest128) return kernels(ZackHackAttend<128, kLargest128, kWide>());
  if (head_dim == 64 && record_bytes <= kLargest64) return kernels(ZackHackAttend<64, kLargest64, kWide>());
  return nullptr;
}

/// FindAttention<true>, in a file of its own, as it takes long to compile.
const device::AttendKernels* FindWideAttention(int head_dim, uint32_t record_bytes, bool v_norms);

}  // namespace kvmanager::zack_hack
