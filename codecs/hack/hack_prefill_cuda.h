// Attention by many query tokens over HACK pages on a GPU: codes become float16 or bfloat16 on their way to the tensor
// cores.
#pragma once

#include "codecs/device/prefill_params.h"
#include "codecs/hack/hack_device_format.h"

namespace kvmanager::hack {

/// For k_axis=channel, 8-bit metadata, 64 tokens to page and partition, head_dim 64 or 128, segments of at most 4 bits,
/// of K also of 8 where a head's record is no larger than with 4 throughout. PrefillParams::format is the format's
/// table of heads, on the device; with rotation=hadamard, where kernels map, a zack_hack::ZackHackPrefillLayer.
/// nullptr: another format, or built without CUDA.
const device::PrefillKernels* HackPrefillKernels(const HackDeviceFormat& format);

}  // namespace kvmanager::hack
