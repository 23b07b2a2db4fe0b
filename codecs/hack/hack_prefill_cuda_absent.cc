// Where there is no CUDA Toolkit.
#include "codecs/hack/hack_prefill_cuda.h"

namespace kvmanager::hack {

const device::PrefillKernels* HackPrefillKernels(const HackDeviceFormat&) { return nullptr; }

}  // namespace kvmanager::hack
