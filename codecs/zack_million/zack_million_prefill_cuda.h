// Attention by many query tokens over ZACK+MILLION pages on a GPU.
#pragma once

#include "codecs/device/prefill_params.h"
#include "codecs/million/million_device_format.h"
#include "codecs/zack/zack_device.h"

namespace kvmanager {

/// PrefillParams::format; pointers are the device's.
struct ZackMillionPrefillLayer {
  zack::ZackPrefillLayer space;
  const million::MillionAnyLayer* codes;
};

/// folds: outputs stay in the space. Of records as MillionPrefillKernels. nullptr: as there.
const device::PrefillKernels* ZackMillionPrefillKernels(int head_dim, bool folds);

}  // namespace kvmanager
