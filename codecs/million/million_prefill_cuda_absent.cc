// Where there is no CUDA Toolkit.
#include "codecs/million/million_prefill_cuda.h"

namespace kvmanager::million {

const device::PrefillKernels* MillionPrefillKernels(int) { return nullptr; }

}  // namespace kvmanager::million
