// Where there is no CUDA Toolkit.
#include "codecs/million/million_attention_cuda_table.h"

namespace kvmanager::million {

const device::AttendKernels* MillionPairKernels(bool) { return nullptr; }
const device::AttendKernels* MillionAnyKernels(int, uint32_t, bool) { return nullptr; }

}  // namespace kvmanager::million
