// What a policy does on a GPU: each layer as its codec does.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codecs/device/device_codec.h"

namespace kvmanager {

struct PolicyDeviceLayer {
  size_t codec = 0;        // among the policy's
  bool keeps_raw = false;  // none of its pages is encoded
};

/// layers: [layers of the model]. sinks: tokens at the beginning of a context whose pages stay raw; whole pages.
/// nullptr where one of the codecs is.
std::unique_ptr<DeviceCodec> MakePolicyDeviceCodec(std::vector<std::unique_ptr<DeviceCodec>> codecs,
                                                   std::vector<PolicyDeviceLayer> layers, uint64_t sinks);

}  // namespace kvmanager
