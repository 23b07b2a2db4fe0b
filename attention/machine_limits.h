// What this machine can read and multiply at most: the limits that benchmarks print beside their results.
//
// Measured on first use, per number of threads; one thread asks.
#pragma once

#include <cstddef>

namespace kvmanager {

struct MachineLimits {
  double read_bytes_per_second = 0;  // a streaming read of memory larger than the caches, all threads together
  double fma_per_second = 0;         // fp32 multiply-adds in registers, all threads together
  double byte_fma_per_second = 0;    // multiply-adds of 8 bits into 32 (vpdpbusd where there is one), likewise
  double look_ups_per_second = 0;    // of bytes in tables of 256 (vpermi2b where there is one), likewise
};

/// threads: 1..64.
const MachineLimits& MeasuredLimits(int threads);

/// `bytes` of memory, 2 MiB aligned and asked to lie in huge pages; freed by std::free. nullptr if there is none.
void* AllocateHuge(size_t bytes);

}  // namespace kvmanager
