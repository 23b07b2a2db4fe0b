// Where there is no CUDA Toolkit.
#include "codecs/zack/zack_attention_cuda.h"

namespace kvmanager::zack {

const device::AttendKernels* ZackAttentionKernels(int) { return nullptr; }

}  // namespace kvmanager::zack
