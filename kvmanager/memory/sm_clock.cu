#include "kvmanager/memory/sm_clock.h"

namespace kvmanager {
namespace {

constexpr uint64_t kSampleNs = 10000;  // many times the step of the timer, about 1 us at most

__device__ uint64_t GlobalNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void SampleKernel(SmClockSample* sample) {
  const uint64_t begin_ns = GlobalNs(), begin = clock64();
  uint64_t ns;
  do {
    ns = GlobalNs() - begin_ns;
  } while (ns < kSampleNs);
  *sample = {uint64_t(clock64()) - begin, ns};
}

}  // namespace

int SampleSmClock(SmClockSample* sample, CUstream_st* stream) {
  SampleKernel<<<1, 1, 0, stream>>>(sample);
  return cudaGetLastError();
}

}  // namespace kvmanager
