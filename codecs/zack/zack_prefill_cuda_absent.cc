// Where there is no CUDA Toolkit.
#include "codecs/zack/zack_prefill_cuda.h"

namespace kvmanager::zack {

const device::PrefillKernels* ZackPrefillKernels(int, bool) { return nullptr; }

}  // namespace kvmanager::zack
