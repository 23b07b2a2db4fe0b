// The kernels that were compiled.
#pragma once

#include <cstdint>

#include "codecs/device/attend_launch.h"

namespace kvmanager::million {

/// For head_dim 128, 64 tokens to a page, and on both sides 64 subspaces of 8 bits. apart: of rotated K and V. nullptr:
/// none.
const device::AttendKernels* MillionPairKernels(bool apart);
/// Of every format with 64 tokens to a page and head_dim 64 or 128. piece_bytes: MillionAnySide::bytes of the larger.
const device::AttendKernels* MillionAnyKernels(int head_dim, uint32_t piece_bytes, bool apart);

}  // namespace kvmanager::million
