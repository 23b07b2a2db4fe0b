// Attention directly on ZACK+HACK pages on a GPU: the kernels that were compiled.
#pragma once

#include <cstdint>

#include "codecs/device/attend_launch.h"

namespace kvmanager::zack_hack {

/// For pages of 64 tokens whose heads' records have at most `record_bytes`; AttendParams::codec points to a
/// device::MappedSpace with a ZackHackHead for each KV head behind it. nullptr: none, or built without CUDA.
const device::AttendKernels* FindZackHackAttention(int head_dim, uint32_t record_bytes);

}  // namespace kvmanager::zack_hack
