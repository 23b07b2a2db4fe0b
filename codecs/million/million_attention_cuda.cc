#include "codecs/million/million_attention_cuda.h"

#include <algorithm>

#include "codecs/million/million_attention_cuda_table.h"
#include "codecs/million/million_device_format.h"

namespace kvmanager {

const device::AttendKernels* MillionAttentionKernels(const million::MillionFormat& format, bool apart) {
  if (million::MillionPairs(format)) return million::MillionPairKernels(apart);
  if (!million::MillionAny(format)) return nullptr;
  const uint32_t largest = std::max(format.side[million::kSideK].strip_bytes, format.side[million::kSideV].strip_bytes);
  return million::MillionAnyKernels(format.layout.head_dim, largest, apart);
}

}  // namespace kvmanager
