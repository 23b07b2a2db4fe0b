#include "codecs/zack_hack/zack_hack_attention_cuda.h"

namespace kvmanager::zack_hack {

const device::AttendKernels* FindZackHackAttention(int, uint32_t, bool, bool) { return nullptr; }

}  // namespace kvmanager::zack_hack
