// Attention on raw pages on a GPU.
#pragma once

#include "codecs/device/attend_launch.h"

namespace kvmanager {

/// nullptr: no kernel for this head_dim (64 and 128 have one), or built without CUDA.
const device::AttendKernels* RawAttentionKernels(int head_dim);

}  // namespace kvmanager
