// A kernel of an engine that never ends its step in time.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace kvmanager::testing {

/// Writes `value` over all of `data` again and again, for about `milliseconds`, on a few multiprocessors. Returns a
/// cudaError_t.
int EnqueueScribble(uint8_t* data, uint64_t bytes, uint8_t value, int milliseconds, CUstream_st* stream);

}  // namespace kvmanager::testing
