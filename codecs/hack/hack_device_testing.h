// What the test and the benchmark of the GPU's encoder share: arrays in device memory. Errors end the program.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace kvmanager::hack {

inline void CheckCuda(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(cudaError_t(error)));
  std::abort();
}

/// Owns `size` elements of device memory. Copies are synchronous.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    CheckCuda(cudaMalloc(reinterpret_cast<void**>(&data_), size * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) { Write(from); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  size_t size() const { return size_; }
  void Write(const std::vector<T>& from) {
    CheckCuda(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "copy to the device");
  }
  std::vector<T> Read() const {
    std::vector<T> to(size_);
    CheckCuda(cudaMemcpy(to.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "copy from the device");
    return to;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

}  // namespace kvmanager::hack
