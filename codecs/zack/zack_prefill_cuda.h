// Attention by many query tokens over ZACK's pages on a GPU.
#pragma once

#include "codecs/device/prefill_params.h"

namespace kvmanager::zack {

/// PrefillParams::format is a ZackPrefillLayer. folds: outputs stay in V's space. nullptr: no kernel for this head_dim
/// (64 and 128 have one), or built without CUDA.
const device::PrefillKernels* ZackPrefillKernels(int head_dim, bool folds);

}  // namespace kvmanager::zack
