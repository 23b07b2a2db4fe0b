// PQ on a GPU, as the seam that caches see (codecs/device/device_codec.h).
#pragma once

#include <memory>

#include "codecs/codec.h"
#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_parameters.h"
#include "kvmanager/base/needs_cuda.h"

namespace kvmanager {

/// For the calling thread's device. raw: of the same layout. nullptr: built without CUDA, no kernels for this shape,
/// or parameters that are for the CPU alone: the oracle's scores, and codebooks that are made anew.
KV_NEEDS_CUDA(std::unique_ptr<DeviceCodec> MakePqDeviceCodec(const Codec& raw, const pq::DeviceShape& shape,
                                                             const pq::Parameters& parameters));

}  // namespace kvmanager
