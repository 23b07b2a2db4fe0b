#include "tests/device_cache_kernels.h"

namespace kvmanager::testing {
namespace {

__global__ void Scribble(uint4* data, uint64_t count, uint32_t word, uint64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
      data[i] = make_uint4(word, word, word, word);
    }
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

int EnqueueScribble(uint8_t* data, uint64_t bytes, uint8_t value, int milliseconds, CUstream_st* stream) {
  Scribble<<<8, 256, 0, stream>>>(reinterpret_cast<uint4*>(data), bytes / sizeof(uint4), 0x01010101u * value,
                                  uint64_t{1000000} * milliseconds);
  return cudaGetLastError();
}

}  // namespace kvmanager::testing
