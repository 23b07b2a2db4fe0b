#include "codecs/zack_hack/zack_hack_device_codec.h"

namespace kvmanager::zack_hack {

std::unique_ptr<DeviceCodec> MakeZackHackDeviceCodec(const zack::RotatedCodec&) { return nullptr; }

}  // namespace kvmanager::zack_hack
