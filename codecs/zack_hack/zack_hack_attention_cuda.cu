#include "codecs/zack_hack/zack_hack_attention_cuda.h"
#include "codecs/zack_hack/zack_hack_attention_launch.cuh"

namespace kvmanager::zack_hack {

const device::AttendKernels* FindZackHackAttention(int head_dim, uint32_t record_bytes, bool v_norms, bool wide) {
  return wide ? FindWideAttention(head_dim, record_bytes, v_norms)
              : FindAttention<false>(head_dim, record_bytes, v_norms);
}

}  // namespace kvmanager::zack_hack
