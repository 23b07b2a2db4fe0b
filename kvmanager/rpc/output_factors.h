// The way back out of a codec's space, for clients that fold it into W_O (Cache.outputFactors).
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/page_layout.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

/// Of one head.
inline size_t OutputFactorValues(const PageLayout& layout) { return size_t{layout.head_dim} * layout.head_dim; }
inline uint64_t OutputFactorBytes(const PageLayout& layout) {
  return layout.kv_heads * OutputFactorValues(layout) * sizeof(float);
}

/// [kv_heads][head_dim][head_dim] floats of a layer that folds its output. Where the codec may be called. Errors:
/// RESOURCE_EXHAUSTED; UNAVAILABLE (a plug-in failed).
inline absl::StatusOr<AlignedBuffer> MakeOutputFactors(const Codec& codec, const PageLayout& layout, int layer) {
  KV_ASSIGN_OR_RETURN(AlignedBuffer factors, AlignedBuffer::Make("factors", OutputFactorBytes(layout)));
  const size_t values = OutputFactorValues(layout);
  float* const out = reinterpret_cast<float*>(factors.data());
  for (int head = 0; head < layout.kv_heads; ++head) {
    if (codec.OutputFactor(layer, head, absl::MakeSpan(out + head * values, values))) continue;
    return absl::UnavailableError(absl::StrCat("codec ", codec.info().name,
                                               ", a plug-in, failed to say the factor of layer ", layer, ", head ",
                                               head, ": see the log"));
  }
  return factors;
}

}  // namespace kvmanager
