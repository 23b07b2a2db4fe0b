// What a policy does on a GPU: each layer as its codec does.
#pragma once

#include <memory>

#include "codecs/codec.h"
#include "codecs/device/device_codec.h"
#include "codecs/layer_group.h"

namespace kvmanager {

/// Made of the device codecs of the policy's groups; nullptr where one of them has none. info: the policy's.
std::unique_ptr<DeviceCodec> MakePolicyDeviceCodec(const LayerGroups& groups, const CodecInfo& info);

}  // namespace kvmanager
