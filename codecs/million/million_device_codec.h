// MILLION on a GPU, as the seam that caches see (codecs/device/device_codec.h).
#pragma once

#include <memory>

#include "codecs/device/device_codec.h"
#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"
#include "kvmanager/base/needs_cuda.h"

namespace kvmanager::million {

/// For the calling thread's device, on which it keeps the codebooks of all layers and heads: for 64 subspaces of 8 bits
/// about 130 KB each. nullptr: built without CUDA, or the device has no memory for them. `tables` are read before this
/// returns.
KV_NEEDS_CUDA(std::unique_ptr<DeviceCodec> MakeMillionDeviceCodec(const MillionFormat& format,
                                                                  const MillionTables& tables));

}  // namespace kvmanager::million
