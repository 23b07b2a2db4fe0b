// Device memory for attention_gpu_bench. An error of CUDA ends the program.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace kvmanager {

#define CHECK_CUDA(call)                                                                        \
  do {                                                                                          \
    const cudaError_t error_ = cudaError_t(call);                                               \
    if (error_ != cudaSuccess) {                                                                \
      std::fprintf(stderr, "attention_gpu_bench: %s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                             \
    }                                                                                           \
  } while (0)

struct DeviceFree {
  void operator()(void* p) const { cudaFree(p); }
};
template <typename T>
using DeviceArray = std::unique_ptr<T[], DeviceFree>;

template <typename T>
DeviceArray<T> Allocate(size_t count) {
  void* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<size_t>(count * sizeof(T), 256)));
  return DeviceArray<T>(static_cast<T*>(p));
}
template <typename T>
DeviceArray<T> Upload(const std::vector<T>& from) {
  DeviceArray<T> to = Allocate<T>(from.size());
  CHECK_CUDA(cudaMemcpy(to.get(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  return to;
}
template <typename T>
std::vector<T> Download(const T* from, size_t count) {
  std::vector<T> to(count);
  CHECK_CUDA(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}

}  // namespace kvmanager
