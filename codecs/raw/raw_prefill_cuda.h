// Attention by many query tokens over raw pages on a GPU.
#pragma once

#include "codecs/device/prefill_params.h"

namespace kvmanager {

/// nullptr: no kernel for this head_dim (64 and 128 have one), or built without CUDA.
const device::PrefillKernels* RawPrefillKernels(int head_dim);

}  // namespace kvmanager
