// Copies of pages that are still being filled, on a GPU: their tokens so far, and zeros behind them, whatever is
// appended meanwhile.
//
// Enqueues only; any thread for which the stream's device is current.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/memory/device.h"

namespace kvmanager {

struct OpenPageCopy {
  const uint8_t* from = nullptr;  // on the device, 16-byte aligned, as `to`
  uint8_t* to = nullptr;
};
/// A raw page: `rows` (K and V of each KV head) of row_bytes, of which the first kept_bytes are those of its tokens.
/// Both are multiples of 16.
struct OpenPageShape {
  uint32_t rows = 0;
  uint32_t row_bytes = 0;
  uint32_t kept_bytes = 0;
};

/// Errors: INVALID_ARGUMENT, and nothing is enqueued; UNAVAILABLE.
KV_NEEDS_CUDA(absl::Status EnqueueOpenPageCopies(absl::Span<const OpenPageCopy> pages, const OpenPageShape& shape,
                                                 CUstream_st* stream));

}  // namespace kvmanager
