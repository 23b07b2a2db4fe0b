// Attention directly on MILLION pages on a GPU.
#pragma once

#include "codecs/device/attend_launch.h"
#include "codecs/million/million_format.h"

namespace kvmanager {

/// The kernels for pages of this format, which attend to raw pages beside them: head_dim 128, 64 tokens to a page, K
/// and V in 64 subspaces of 8 bits. They read AttendParams::codec as million::MillionPairTables [kv_heads]. nullptr:
/// another format, which is decoded first, or built without CUDA.
const device::AttendKernels* MillionAttentionKernels(const million::MillionFormat& format);

}  // namespace kvmanager
