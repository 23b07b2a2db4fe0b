// A query row on its way into attention and out of it. Functions of their arguments; any thread.
#pragma once

#include <cmath>
#include <cstddef>

#include "codecs/page_attention.h"
#include "codecs/raw/raw_attention.h"

namespace kvmanager {

/// q [head_dim] of `dtype` as fp32.
inline void LoadRow(const void* q, DType dtype, size_t head_dim, float* to, Isa isa) {
  ConvertToFloat(q, dtype, head_dim, to, isa);
}

/// Row r's output, normalised, as [head_dim] of `dtype`, and its log-sum-exp, if wanted. acc is spoiled.
inline void StoreRow(const SoftmaxRows& state, size_t r, DType dtype, size_t head_dim, void* out, float* lse, Isa isa) {
  float* acc = state.acc + r * head_dim;
  const float inverse = 1.0f / state.sum[r];
  for (size_t c = 0; c < head_dim; ++c) acc[c] *= inverse;
  ConvertFromFloat(acc, dtype, head_dim, out, isa);
  if (lse != nullptr) *lse = state.max[r] + std::log(state.sum[r]);
}

}  // namespace kvmanager
