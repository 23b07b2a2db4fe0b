// Rows of float16 and bfloat16 to fp32 and back, nearest even, by the processor's conversions where it has them; the
// bits are those of kvmanager/base/half.h. Pure functions; any thread.
#pragma once

#include <cstddef>

#include "kvmanager/base/page_layout.h"

namespace kvmanager::recompute {

/// to[i] = from[i], `count` elements of `dtype` at any alignment; of none the pointers may be null.
void Widen(const void* from, DType dtype, size_t count, float* to);
/// The other way; a float16 that overflows is infinity.
void Narrow(const float* from, size_t count, DType dtype, void* to);

}  // namespace kvmanager::recompute
