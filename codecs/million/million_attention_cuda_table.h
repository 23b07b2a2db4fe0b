// The kernels that were compiled.
#pragma once

#include "codecs/device/attend_launch.h"

namespace kvmanager::million {

/// For head_dim 128, 64 tokens to a page, and on both sides 64 subspaces of 8 bits. nullptr: none.
const device::AttendKernels* MillionPairKernels();

}  // namespace kvmanager::million
