// Attention directly on ZACK+HACK pages on a GPU: the kernels that were compiled.
#pragma once

#include <cstdint>

#include "codecs/device/attend_launch.h"
#include "codecs/zack_hack/zack_hack_device.h"

namespace kvmanager::zack_hack {

/// Room that a head's record needs where a kernel reads it, which is its bytes, or more where K has very few: what is
/// read of K makes room for what attention makes of V's metadata.
constexpr uint32_t RoomOf(const ZackHackHead& head, int head_dim) {
  const uint32_t k_bytes = 128 * SumOfWidths(head.widths[0]) + 16 + 2 * uint32_t(head_dim);
  const uint32_t staged = 8 * uint32_t(head_dim) + 64;  // StepFold::kStagedBytes
  return head.bytes + (k_bytes >= staged ? 0 : staged);
}

/// For pages of 64 tokens whose heads need at most `record_bytes` of room, with or without V's norms; wide: some
/// segments of K have kDeviceWideWidth. AttendParams::codec points to a device::MappedSpace with a ZackHackHead for
/// each KV head behind it. nullptr: none, or built without CUDA.
const device::AttendKernels* FindZackHackAttention(int head_dim, uint32_t record_bytes, bool v_norms, bool wide);

}  // namespace kvmanager::zack_hack
