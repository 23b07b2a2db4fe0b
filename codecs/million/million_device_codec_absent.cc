// Where there is no CUDA Toolkit.
#include "codecs/million/million_device_codec.h"

namespace kvmanager::million {

std::unique_ptr<DeviceCodec> MakeMillionDeviceCodec(const MillionFormat&, const MillionTables&) { return nullptr; }

}  // namespace kvmanager::million
