// Moves many small pages between device slots and pinned host slots, in one launch for each direction.
//
// Separate copies of 16 or 64 KiB reach 6 or 18 of the 55 GB/s that large ones reach, so pages go by a kernel that
// reads or writes pinned host memory in place, or by CUDA's batched copy (docs/kernels.md, "Moving pages"). Slots are
// 64-byte aligned on both sides, so pages are moved in whole pieces of 16 bytes.
//
// Enqueues only; any thread for which the stream's device is current. The memory stays as it is until the stream has
// passed the copies; the list itself is taken over at once.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/page_mover.h"

namespace kvmanager {

enum class PageCopyMethod : uint8_t {
  kBest,    // kBatch for pages of 1 MiB and more, kKernel for smaller ones: the faster as measured
  kKernel,  // one thread of each of a few blocks drives Hopper's bulk copies by way of shared memory
  kBatch,   // cudaMemcpyBatchAsync: the copy engines; slower for small pages, but kernels beside it hardly notice
};

/// Enqueues all of `copies`, in no particular order among themselves; neighbours in the list that have equal sizes go
/// in one launch of up to 2,000 pages and 48 MiB. `blocks`: of kKernel; 0: as few as keep the link busy. Errors:
/// INVALID_ARGUMENT, and nothing is enqueued; UNAVAILABLE.
KV_NEEDS_CUDA(absl::Status EnqueuePageCopies(PageDirection direction, absl::Span<const PageCopy> copies,
                                             CUstream_st* stream, PageCopyMethod method = PageCopyMethod::kBest,
                                             int blocks = 0));

}  // namespace kvmanager
