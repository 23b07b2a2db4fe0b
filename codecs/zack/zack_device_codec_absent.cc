// Where there is no CUDA Toolkit.
#include "codecs/zack/zack_device_codec.h"

namespace kvmanager::zack {

std::unique_ptr<DeviceCodec> MakeZackDeviceCodec(const ZackFormat&) { return nullptr; }

}  // namespace kvmanager::zack
