// The kernels that were compiled, by what they differ in.
#pragma once

#include "codecs/device/attend_launch.h"

namespace kvmanager::hack {

/// For k_axis=channel, 8-bit metadata, 64 tokens to page and partition, with or without rotation=hadamard and v_norm=1.
/// nullptr: none.
const device::AttendKernels* FindHackAttention(int head_dim, int k_bits, int v_bits, bool rotates, bool v_norms);

}  // namespace kvmanager::hack
