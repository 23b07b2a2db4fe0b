// Tests of the GPU skip, with a line that says why, where there is none that this build has code for.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "gtest/gtest.h"
#include "kvmanager/memory/test_array.h"

namespace kvmanager {

/// Empty: there is one; else why not.
inline std::string WhyNoGpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) return std::string("no GPU here: ") + cudaGetErrorString(error);
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return "the GPU does not answer";
  if (properties.major != 9) return std::string(properties.name) + " is no Hopper GPU";
  return "";
}

/// A test suite's fixture.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoGpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

#define ASSERT_CUDA(call)                                                          \
  do {                                                                             \
    const cudaError_t error_ = (call);                                             \
    ASSERT_EQ(error_, cudaSuccess) << #call << ": " << cudaGetErrorString(error_); \
  } while (0)

/// Device memory of a test for values of several types.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(std::max<size_t>(bytes, 256)), data_(Allocate<uint8_t>(bytes_)) {}
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }
  void Fill(const void* from, size_t bytes) {
    ASSERT_LE(bytes, bytes_);
    ASSERT_CUDA(cudaMemcpy(data_.get(), from, bytes, cudaMemcpyHostToDevice));
  }
  void Set(int value) { ASSERT_CUDA(cudaMemset(data_.get(), value, bytes_)); }

 private:
  const size_t bytes_;
  const DeviceArray<uint8_t> data_;
};

}  // namespace kvmanager
