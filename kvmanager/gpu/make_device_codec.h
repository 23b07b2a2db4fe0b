// A codec's part on one GPU of the daemon.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "codecs/codec.h"
#include "kvmanager/gpu/device_context.h"

namespace kvmanager {

/// What the codec does on the GPU of this cache. Any thread; the result goes on the loop's. Errors: FAILED_PRECONDITION
/// where there are no kernels for its pages; CUDA's.
absl::StatusOr<std::shared_ptr<const DeviceCodec>> MakeDeviceCodec(const DeviceContext& device, const Codec& codec,
                                                                   int layers);

}  // namespace kvmanager
