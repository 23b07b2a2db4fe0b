// A kernel that takes the GPU as attention does, for benchmarks of what runs beside it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

struct CUstream_st;

namespace kvmanager {

/// Reads `bytes` (a multiple of 16) of device memory once: one block of threads per multiprocessor, each with 200 KiB
/// of shared memory. `sums`: [multiprocessors * 256] words on the device.
absl::Status EnqueueNeighbour(const uint8_t* data, uint64_t bytes, int multiprocessors, uint32_t* sums,
                              CUstream_st* stream);

}  // namespace kvmanager
