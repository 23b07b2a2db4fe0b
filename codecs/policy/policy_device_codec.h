// What a policy does on a GPU: each layer as its codec does.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codecs/codec.h"
#include "codecs/device/device_codec.h"

namespace kvmanager {

/// codec_of: [layers of the model], among `codecs`. info: the policy's. nullptr where one of the codecs is.
std::unique_ptr<DeviceCodec> MakePolicyDeviceCodec(std::vector<std::unique_ptr<DeviceCodec>> codecs,
                                                   std::vector<size_t> codec_of, const CodecInfo& info);

}  // namespace kvmanager
