#include "codecs/million/million_attention_cuda.h"

#include "codecs/million/million_attention_cuda_table.h"
#include "codecs/million/million_device_format.h"

namespace kvmanager {

const device::AttendKernels* MillionAttentionKernels(const million::MillionFormat& format) {
  return million::MillionPairs(format) ? million::MillionPairKernels() : nullptr;
}

}  // namespace kvmanager
