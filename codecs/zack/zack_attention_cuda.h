// Attention directly on ZACK's pages on a GPU.
#pragma once

#include "codecs/device/attend_launch.h"

namespace kvmanager::zack {

/// For pages of 64 tokens; AttendParams::codec points to a device::MappedSpace with a ZackDeviceHead for each KV head
/// behind it, and columns and rows of its factors beyond a head's ranks are zero. nullptr: none for this head_dim (64
/// and 128 have one), or built without CUDA.
const device::AttendKernels* ZackAttentionKernels(int head_dim);

}  // namespace kvmanager::zack
