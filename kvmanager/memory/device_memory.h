// Arrays in device memory and in pinned host memory: the one owner of both, beside DeviceRegion, whose memory other
// processes map, and PinnedRegion, whose memory is not CUDA's.
//
// Owned like a std::unique_ptr, by any one thread whose device is the memory's. Memory is uninitialised. For
// implementations alone: this includes CUDA's headers.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"

namespace kvmanager {

/// Gives device memory back in the order of a stream, which outlives it: cudaFree would wait for every stream of the
/// device, also for those that wait for clients. Without a stream it is cudaFree: for tests and benchmarks.
struct DeviceFree {
  std::optional<CUstream_st*> stream;
  void operator()(void* memory) const { stream.has_value() ? cudaFreeAsync(memory, *stream) : cudaFree(memory); }
};
template <typename T>
using DeviceArray = std::unique_ptr<T[], DeviceFree>;

/// Waits for every stream of the device.
struct PinnedFree {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <typename T>
using PinnedArray = std::unique_ptr<T[], PinnedFree>;

/// As CudaStatus, of a call whose error ends here: the next call that looks does not take it for its own.
inline absl::Status TakeCudaError(cudaError_t error, absl::string_view call) {
  if (error != cudaSuccess) cudaGetLastError();
  return CudaStatus(error, call);
}

/// For what comes later on `stream`; nullptr is the default stream. pool: nullptr is the device's own. Errors:
/// RESOURCE_EXHAUSTED, UNAVAILABLE.
template <typename T>
absl::StatusOr<DeviceArray<T>> AllocateOnDevice(size_t count, CUstream_st* stream, cudaMemPool_t pool = nullptr) {
  const size_t bytes = std::max<size_t>(count * sizeof(T), 1);
  void* memory = nullptr;
  KV_RETURN_IF_ERROR(TakeCudaError(
      pool == nullptr ? cudaMallocAsync(&memory, bytes, stream) : cudaMallocFromPoolAsync(&memory, bytes, pool, stream),
      "cudaMallocAsync"));
  return DeviceArray<T>(static_cast<T*>(memory), DeviceFree{stream});
}

/// `to` has from.size() elements; the copy is made when this returns. Errors: UNAVAILABLE.
template <typename T>
absl::Status CopyToDevice(const std::vector<T>& from, T* to) {
  return TakeCudaError(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
}

/// Portable and mapped: every device reads and writes it at its own addresses. Errors: RESOURCE_EXHAUSTED, UNAVAILABLE.
template <typename T>
absl::StatusOr<PinnedArray<T>> AllocatePinned(size_t count) {
  void* memory = nullptr;
  KV_RETURN_IF_ERROR(TakeCudaError(
      cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc"));
  return PinnedArray<T>(static_cast<T*>(memory));
}

}  // namespace kvmanager
