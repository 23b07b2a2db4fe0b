// Raw pages on a GPU, as the seam that caches see (codecs/device/device_codec.h): attention alone.
#pragma once

#include <memory>

#include "codecs/device/device_codec.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

/// nullptr: built without CUDA, or no kernel for this head_dim (64 and 128 have one).
KV_NEEDS_CUDA(std::unique_ptr<DeviceCodec> MakeRawDeviceCodec(const PageLayout& layout));

}  // namespace kvmanager
