// HACK on a GPU, as the seam that caches see (codecs/device/device_codec.h).
#pragma once

#include <memory>

#include "codecs/device/device_codec.h"
#include "codecs/hack/hack_format.h"
#include "kvmanager/base/needs_cuda.h"

namespace kvmanager::hack {

/// For the calling thread's device, on which it keeps a table of the format's heads. nullptr: built without CUDA, or
/// the device has no memory for it.
KV_NEEDS_CUDA(std::unique_ptr<DeviceCodec> MakeHackDeviceCodec(const HackFormat& format));

}  // namespace kvmanager::hack
