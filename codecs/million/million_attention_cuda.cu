#include <type_traits>

#include "codecs/device/attend_launch.cuh"
#include "codecs/million/million_attention_cuda_table.h"
#include "codecs/million/million_attention_device.cuh"
#include "codecs/raw/raw_attention_device.cuh"

namespace kvmanager::million {
namespace {

using device::AttendKernels;

// As many as registers and shared memory hold: tables take 64 KB of it, and a place for outputs apart 512 bytes a row.
template <bool kApart>
constexpr int WarpsFor(int rows) {
  return kApart ? (rows <= 4 ? 12 : 9) : (rows <= 4 ? 15 : 12);
}

template <bool kApart>
struct MillionAttend {
  template <int kRows>
  using Tables = device::AttendTables<device::RawPages<128, kRows>, device::MillionPages<kRows, kApart>,
                                      WarpsFor<kApart>(kRows), 2>;
  template <int kRows>
  using Kernel = std::conditional_t<kApart, device::LaunchApart<Tables<kRows>>, Tables<kRows>>;
  using ByRows = device::AttendByRows<Kernel>;
  // Its bytes, and as many as would take the time that it takes beyond them.
  static constexpr AttendKernels kKernels = {{WarpsFor<kApart>(4), 1}, 10000, ByRows::Launch, ByRows::Prepare, kApart};
};

}  // namespace

const AttendKernels* MillionPairKernels(bool apart) {
  return apart ? &MillionAttend<true>::kKernels : &MillionAttend<false>::kKernels;
}

}  // namespace kvmanager::million
