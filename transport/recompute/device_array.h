// Device memory that is taken and given back in the order of a stream: cudaFree would wait for every stream of the
// device, also for those that wait for clients. Owned like a std::unique_ptr; the stream outlives it. Any one thread
// whose device is the stream's.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"

namespace kvmanager::recompute {

struct DeviceFree {
  CUstream_st* stream = nullptr;
  void operator()(void* memory) const { cudaFreeAsync(memory, stream); }
};
template <typename T>
using DeviceArray = std::unique_ptr<T[], DeviceFree>;

/// For what comes later on `stream`. Errors: RESOURCE_EXHAUSTED, UNAVAILABLE.
template <typename T>
absl::StatusOr<DeviceArray<T>> Allocate(size_t count, CUstream_st* stream) {
  void* memory = nullptr;
  KV_RETURN_IF_ERROR(
      CudaStatus(cudaMallocAsync(&memory, std::max<size_t>(count * sizeof(T), 1), stream), "cudaMallocAsync"));
  return DeviceArray<T>(static_cast<T*>(memory), DeviceFree{stream});
}

}  // namespace kvmanager::recompute
