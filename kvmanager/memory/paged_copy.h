// Copies of whole blocks between an engine's paged KV cache and raw pages, on a GPU: all layers in one kernel.
//
// A layer's cache is K and V of blocks of tokens; where a token's row of a head lies is said by strides, the same for
// all layers. Enqueues only; any thread for which the stream's device is current.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/memory/device.h"

namespace kvmanager {

/// Sizes and strides in bytes, multiples of 16. A block has `tokens` tokens, in pieces of piece_tokens.
struct PagedShape {
  uint32_t layers = 0, heads = 0, tokens = 0, piece_tokens = 0, row_bytes = 0;
  int64_t block_stride = 0, piece_stride = 0, token_stride = 0, head_stride = 0;
};

/// One layer's cache.
struct PagedLayer {
  uint8_t* side[2] = {};  // K and V of block 0, on the device, 16-byte aligned
  uint64_t group = 0;     // of block ids
};

/// Blocks that are copied, and their raw pages.
struct PagedBlocks {
  uint8_t* raw = nullptr;        // [count][layers][K, V][heads][tokens][row_bytes], on the device, 16-byte aligned
  const int64_t* ids = nullptr;  // [groups][ids_stride], in memory that the device reads; 0: no block, left alone
  uint32_t ids_stride = 0;
  uint32_t count = 0;
};

/// layers: [shape.layers], in memory that the device reads; it and the ids stay until the stream has passed. Errors:
/// INVALID_ARGUMENT, and nothing is enqueued; UNAVAILABLE.
KV_NEEDS_CUDA(absl::Status EnqueuePagedCopy(const PagedShape& shape, const PagedLayer* layers,
                                            const PagedBlocks& blocks, bool into_cache, CUstream_st* stream));

}  // namespace kvmanager
