// Where there is no CUDA Toolkit.
#include "codecs/raw/raw_attention_cuda.h"

namespace kvmanager {

const device::AttendKernels* RawAttentionKernels(int) { return nullptr; }

}  // namespace kvmanager
