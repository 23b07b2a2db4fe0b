// ZACK on a GPU, as the seam that caches see (codecs/device/device_codec.h).
#pragma once

#include <memory>

#include "codecs/device/device_codec.h"
#include "codecs/zack/zack_format.h"
#include "kvmanager/base/needs_cuda.h"

namespace kvmanager::zack {

/// For the calling thread's device, on which it keeps the format and its factors. nullptr: built without CUDA, head_dim
/// other than 64 or 128, pages of other than 64 tokens, or the device has no memory for it.
KV_NEEDS_CUDA(std::unique_ptr<DeviceCodec> MakeZackDeviceCodec(const ZackFormat& format));

}  // namespace kvmanager::zack
