// Random contents of device memory for attention_gpu_bench.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace kvmanager {

/// Random bits everywhere. Returns a cudaError_t, as all here.
int FillRandomBits(void* to, size_t bytes, uint64_t seed);
/// Random values of this deviation, float16 or bfloat16.
int FillRandomElements(void* to, size_t count, uint64_t seed, float deviation, bool bfloat16);
/// In `count` records of `record_bytes`: at `offset`, a float16 pair (a, b).
int FillPairs(void* to, size_t count, size_t record_bytes, size_t offset, float a, float b);
/// Reads everything once, as fast as memory gives it.
int ReadAll(const void* from, size_t bytes, CUstream_st* stream);

}  // namespace kvmanager
