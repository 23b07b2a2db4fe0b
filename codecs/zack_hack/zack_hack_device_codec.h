// ZACK+HACK on a GPU, as the seam that caches see (codecs/device/device_codec.h).
#pragma once

#include <memory>

#include "codecs/device/device_codec.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "kvmanager/base/needs_cuda.h"

namespace kvmanager::zack_hack {

/// For the calling thread's device, on which it keeps the codec's factors and formats. codec: its inner codecs are
/// hack::HackCodec. nullptr: built without CUDA, head_dim other than 64 or 128, pages of other than 64 tokens, or the
/// device has no memory for it.
KV_NEEDS_CUDA(std::unique_ptr<DeviceCodec> MakeZackHackDeviceCodec(const zack::RotatedCodec& codec));

}  // namespace kvmanager::zack_hack
