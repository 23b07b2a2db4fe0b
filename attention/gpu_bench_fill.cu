#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/gpu_bench_fill.h"

namespace kvmanager {
namespace {

__device__ uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

__global__ void Bits(uint64_t* to, size_t words, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words; i += size_t{gridDim.x} * blockDim.x) {
    to[i] = Mix(i * 0x9e3779b97f4a7c15ull + seed);
  }
}

__device__ void Round(float from, __half* to) { *to = __float2half(from); }
__device__ void Round(float from, __nv_bfloat16* to) { *to = __float2bfloat16(from); }

// The sum of four uniform values.
template <typename Element>
__global__ void Elements(Element* to, size_t count, uint64_t seed, float deviation) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = Mix(i * 0x9e3779b97f4a7c15ull + seed);
    float sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(bits >> (16 * j) & 0xffff) * (1 / 65536.f) - 0.5f;
    Round(sum * 1.7320508f * deviation, to + i);
  }
}

__global__ void Pairs(uint8_t* to, size_t count, size_t record_bytes, size_t offset, float a, float b) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    *reinterpret_cast<__half2*>(to + i * record_bytes + offset) = __floats2half2_rn(a, b);
  }
}

__device__ uint32_t read_sink;

__global__ void __launch_bounds__(512) Read(const uint4* from, size_t count) {
  uint32_t x = 0;
  const size_t step = size_t{gridDim.x} * blockDim.x;
  size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 0x12345678u) read_sink = x;  // so that the reads are needed
}

}  // namespace

int FillRandomBits(void* to, size_t bytes, uint64_t seed) {
  Bits<<<2048, 256>>>(static_cast<uint64_t*>(to), bytes / 8, seed);
  return cudaGetLastError();
}
int FillRandomElements(void* to, size_t count, uint64_t seed, float deviation, bool bfloat16) {
  if (bfloat16) {
    Elements<<<2048, 256>>>(static_cast<__nv_bfloat16*>(to), count, seed, deviation);
  } else {
    Elements<<<2048, 256>>>(static_cast<__half*>(to), count, seed, deviation);
  }
  return cudaGetLastError();
}
int FillPairs(void* to, size_t count, size_t record_bytes, size_t offset, float a, float b) {
  Pairs<<<1024, 256>>>(static_cast<uint8_t*>(to), count, record_bytes, offset, a, b);
  return cudaGetLastError();
}
int ReadAll(const void* from, size_t bytes, CUstream_st* stream) {
  Read<<<132 * 2, 512, 0, stream>>>(static_cast<const uint4*>(from), bytes / 16);
  return cudaGetLastError();
}

}  // namespace kvmanager
