#include "codecs/raw/raw_attention_cuda.h"
#include "codecs/raw/raw_attention_device.cuh"
#include "codecs/raw/raw_attention_launch.cuh"

namespace kvmanager {
namespace {

template <int kHeadDim, int kRows>
struct Pages : device::RawPages<kHeadDim, kRows> {
  static constexpr bool kLaunchedIntoEnd = true;
};

}  // namespace

const device::AttendKernels* RawAttentionKernels(int head_dim) { return device::FindAttendRaw<Pages>(head_dim); }

}  // namespace kvmanager
