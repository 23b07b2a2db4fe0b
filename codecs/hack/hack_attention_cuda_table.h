// The kernels that were compiled, by what they differ in.
#pragma once

#include "codecs/device/attend_launch.h"

namespace kvmanager::hack {

/// For k_axis=channel, 8-bit metadata, 64 tokens to page and partition. nullptr: none.
const device::AttendKernels* FindHackAttention(int head_dim, int k_bits, int v_bits);

}  // namespace kvmanager::hack
