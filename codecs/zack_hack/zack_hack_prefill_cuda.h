// Attention by many query tokens over ZACK+HACK pages on a GPU.
#pragma once

#include "codecs/device/prefill_params.h"
#include "codecs/hack/hack_device_format.h"
#include "codecs/zack/zack_device.h"

namespace kvmanager::zack_hack {

/// PrefillParams::format; pointers are the device's.
struct ZackHackPrefillLayer {
  zack::ZackPrefillLayer space;
  const hack::HackDeviceHead* heads;  // [kv_heads]
};

/// folds: outputs stay in the space. nullptr: another head_dim than 64 and 128, or built without CUDA.
const device::PrefillKernels* ZackHackPrefillKernels(int head_dim, bool folds);

}  // namespace kvmanager::zack_hack
