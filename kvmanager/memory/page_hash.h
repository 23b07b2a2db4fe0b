// XXH3-64 of pages in a GPU's memory, by that GPU: the checksums that pages are kept, sent and verified with, without a
// way through the host.
//
// XXH3 hashes long inputs in blocks of 1 KiB whose sums do not depend on one another; only 64 bytes for each block are
// then folded in their order. So the threads of a block read a page at once, and eight of them fold (page_hash.cu). As
// fast as the memory is read.
//
// Enqueues only; any thread for which the stream's device is current. The memory stays as it is until the stream has
// passed; the list is taken over at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/memory/device.h"

namespace kvmanager {

struct PageBytes {
  const uint8_t* data = nullptr;  // on the device, or that it can reach; 16-byte aligned
  uint32_t bytes = 0;             // kPageHashBytesMin at least
};
/// XXH3 hashes what is shorter in other ways, which no page needs.
inline constexpr uint32_t kPageHashBytesMin = 241;

/// Stores the checksum of pages[i] to out[i], in memory that the device writes. Errors: INVALID_ARGUMENT, and nothing
/// is enqueued; UNAVAILABLE.
KV_NEEDS_CUDA(absl::Status EnqueuePageHashes(absl::Span<const PageBytes> pages, uint64_t* out, CUstream_st* stream));

}  // namespace kvmanager
