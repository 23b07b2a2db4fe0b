// Where there is no CUDA Toolkit.
#include "codecs/hack/hack_attention_cuda_table.h"

namespace kvmanager::hack {

const device::AttendKernels* FindHackAttention(int, int, int, bool, bool) { return nullptr; }

}  // namespace kvmanager::hack
