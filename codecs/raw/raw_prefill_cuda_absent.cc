// Where there is no CUDA Toolkit.
#include "codecs/raw/raw_prefill_cuda.h"

namespace kvmanager {

const device::PrefillKernels* RawPrefillKernels(int) { return nullptr; }

}  // namespace kvmanager
