// A codec's part on one GPU of the daemon.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "codecs/codec.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/gpu/device_stream.h"

namespace kvmanager {

/// What the codec does on this GPU, whose streams are `streams`. Any thread; the result is destroyed on the loop's.
/// Errors: FAILED_PRECONDITION where there are no kernels for its pages; CUDA's.
absl::StatusOr<std::shared_ptr<const DeviceCodec>> MakeDeviceCodec(const Device* device, DeviceStreams* streams,
                                                                   const Codec& codec, int layers);

}  // namespace kvmanager
