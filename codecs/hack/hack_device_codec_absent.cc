// Where there is no CUDA Toolkit.
#include "codecs/hack/hack_device_codec.h"

namespace kvmanager::hack {

std::unique_ptr<DeviceCodec> MakeHackDeviceCodec(const HackFormat&) { return nullptr; }

}  // namespace kvmanager::hack
