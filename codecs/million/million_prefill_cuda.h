// Attention by many query tokens over MILLION pages on a GPU.
#pragma once

#include "codecs/device/prefill_params.h"

namespace kvmanager::million {

/// For pages of a format that MillionAny, whose records have at most kPrefillRecordBytesMax bytes;
/// PrefillParams::format is a MillionAnyLayer. nullptr: another head_dim than 64 and 128, or built without CUDA.
const device::PrefillKernels* MillionPrefillKernels(int head_dim);

}  // namespace kvmanager::million
