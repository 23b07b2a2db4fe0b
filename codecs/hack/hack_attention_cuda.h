// Attention directly on HACK pages on a GPU.
#pragma once

#include "codecs/device/attend_launch.h"
#include "codecs/hack/hack_format.h"

namespace kvmanager {

/// The kernels for pages of this format, which attend to raw pages beside them. nullptr: there are none (k_axis=token,
/// 16-bit metadata, partitions other than 64, pages of more than 64 tokens, head_dim other than 64 or 128, hadamard,
/// segments of unlike widths), or built without CUDA; such pages are decoded first.
const device::AttendKernels* HackAttentionKernels(const hack::HackFormat& format);

}  // namespace kvmanager
