// Where there is no CUDA Toolkit.
#include "codecs/zack_million/zack_million_device_codec.h"

namespace kvmanager {

std::unique_ptr<DeviceCodec> MakeZackMillionDeviceCodec(const zack::RotatedCodec&) { return nullptr; }

}  // namespace kvmanager
