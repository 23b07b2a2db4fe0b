#include "codecs/device/attend_tables.cuh"
#include "codecs/million/million_attention_cuda_table.h"
#include "codecs/million/million_attention_device.cuh"
#include "codecs/raw/raw_attention_device.cuh"

namespace kvmanager::million {
namespace {

using device::AttendKernels;

// As many as registers and shared memory hold: tables take 64 KB of it.
constexpr int WarpsFor(int rows) { return rows <= 4 ? 15 : 12; }

struct MillionAttend {
  template <int kRows>
  using Kernel = device::AttendTables<device::RawPages<128, kRows>, device::MillionPages<kRows>, WarpsFor(kRows), 2>;
  static int Launch(const device::AttendParams& params, int rows_max, int blocks, CUstream_st* stream) {
    return rows_max <= 4 ? Kernel<4>::Launch(params, blocks, stream) : Kernel<8>::Launch(params, blocks, stream);
  }
  static int Prepare() {
    const int error = Kernel<4>::Prepare();
    return error != 0 ? error : Kernel<8>::Prepare();
  }
  // Its bytes, and as many as would take the time that it takes beyond them.
  static constexpr AttendKernels kKernels = {{WarpsFor(4), 1}, 10000, Launch, Prepare};
};

}  // namespace

const AttendKernels* MillionPairKernels() { return &MillionAttend::kKernels; }

}  // namespace kvmanager::million
