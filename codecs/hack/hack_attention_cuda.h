// Attention directly on HACK pages on a GPU.
#pragma once

#include "codecs/device/attend_launch.h"
#include "codecs/hack/hack_format.h"

namespace kvmanager {

/// The kernels for pages of this format, which attend to raw pages beside them: k_axis=channel, 8-bit metadata, 64
/// tokens to page and partition, head_dim 64 or 128, K and V in 2 and 1, 2 and 2, 3 and 2, 4 and 3, or 4 and 4 bits
/// throughout. nullptr: another format, which is decoded first, or built without CUDA.
const device::AttendKernels* HackAttentionKernels(const hack::HackFormat& format);

}  // namespace kvmanager
