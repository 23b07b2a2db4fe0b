// Where there is no CUDA Toolkit.
#include "codecs/zack_million/zack_million_prefill_cuda.h"

namespace kvmanager {

const device::PrefillKernels* ZackMillionPrefillKernels(int, bool) { return nullptr; }

}  // namespace kvmanager
