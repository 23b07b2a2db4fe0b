#include "codecs/raw/raw_attention_cuda.h"
#include "codecs/raw/raw_attention_device.cuh"
#include "codecs/raw/raw_attention_launch.cuh"

namespace kvmanager {

const device::AttendKernels* RawAttentionKernels(int head_dim) {
  return device::FindAttendRaw<device::RawPages>(head_dim);
}

}  // namespace kvmanager
