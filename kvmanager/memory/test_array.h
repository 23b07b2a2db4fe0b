// What tests and benchmarks of the GPU share: arrays in device memory that wait. An error of CUDA ends the program.
#pragma once

#include <cuda_runtime_api.h>
#include <errno.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kvmanager/memory/device_memory.h"

namespace kvmanager {

#define CHECK_CUDA(call)                                                                                      \
  do {                                                                                                        \
    const cudaError_t error_ = cudaError_t(call);                                                             \
    if (error_ != cudaSuccess) {                                                                              \
      std::fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                                           \
    }                                                                                                         \
  } while (0)

/// By cudaMalloc: 256 bytes at least.
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

/// Pinned memory, which the device reads and writes too.
template <typename T>
PinnedArray<T> Pinned(size_t count) {
  void* p = nullptr;
  CHECK_CUDA(cudaHostAlloc(&p, count * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped));
  return PinnedArray<T>(static_cast<T*>(p));
}

/// A DeviceArray that knows its size. Bytes are 0xff until something is written, so that what nobody wrote shows.
template <typename T>
class TestArray {
 public:
  explicit TestArray(size_t size) : data_(Allocate<T>(size)), size_(size) {
    CHECK_CUDA(cudaMemset(data_.get(), 0xff, size * sizeof(T)));
  }
  explicit TestArray(const std::vector<T>& from) : data_(Upload(from)), size_(from.size()) {}

  T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  void Write(const std::vector<T>& from) {
    CHECK_CUDA(cudaMemcpy(data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> Read() const { return Download(data(), size_); }

 private:
  const DeviceArray<T> data_;
  const size_t size_;
};

}  // namespace kvmanager
