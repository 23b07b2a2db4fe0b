// Where there is no CUDA Toolkit.
#include "codecs/million/million_attention_cuda_table.h"

namespace kvmanager::million {

const device::AttendKernels* MillionPairKernels() { return nullptr; }

}  // namespace kvmanager::million
