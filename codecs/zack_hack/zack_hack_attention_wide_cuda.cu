#include "codecs/zack_hack/zack_hack_attention_launch.cuh"

namespace kvmanager::zack_hack {

const device::AttendKernels* FindWideAttention(int head_dim, uint32_t record_bytes, bool v_norms) {
  return FindAttention<true>(head_dim, record_bytes, v_norms);
}

}  // namespace kvmanager::zack_hack
