// Where there is no CUDA Toolkit.
#include "codecs/zack_hack/zack_hack_prefill_cuda.h"

namespace kvmanager::zack_hack {

const device::PrefillKernels* ZackHackPrefillKernels(int, bool) { return nullptr; }

}  // namespace kvmanager::zack_hack
