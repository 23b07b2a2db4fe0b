// Attention directly on MILLION pages on a GPU.
#pragma once

#include "codecs/device/attend_launch.h"
#include "codecs/million/million_format.h"

namespace kvmanager {

/// The kernels for pages of this format, which attend to raw pages beside them: head_dim 64 or 128, 64 tokens to a
/// page. They read AttendParams::codec as million::MillionPairTables [kv_heads] where MillionPairs(format), else as a
/// million::MillionAnyLayer; apart, pages are of rotated K and V, and it is a million::MillionSpace. nullptr: another
/// format, or built without CUDA.
const device::AttendKernels* MillionAttentionKernels(const million::MillionFormat& format, bool apart = false);

}  // namespace kvmanager
