// Memory of a device step: the device's, pinned for uploads, and pieces of the ring there.
//
// Each belongs to one step and its thread.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/memory/device.h"

namespace kvmanager {

inline constexpr size_t kUploadAlign = 16;

inline absl::Status HostTooFarAhead() {
  return absl::ResourceExhaustedError(
      "the host is so far ahead of the stream that there is no room to pass another step: try again later");
}

/// Device memory of one step. Allocated and freed in the order of its stream: cudaFree would wait for every stream of
/// the device, and hold up other threads' launches meanwhile.
class StreamMemory {
 public:
  explicit StreamMemory(CUstream_st* stream) : stream_(stream) {}
  ~StreamMemory() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_);
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  absl::Status Allocate(size_t bytes) { return CudaStatus(cudaMallocAsync(&data_, bytes, stream_), "cudaMallocAsync"); }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  CUstream_st* const stream_;
  void* data_ = nullptr;
};

/// Pinned memory of a step whose caller gave none.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  absl::Status Allocate(size_t bytes) {
    return CudaStatus(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
};

/// Cuts a piece of the ring.
class PieceWriter {
 public:
  explicit PieceWriter(uint8_t* at) : at_(at) {}
  template <typename T>
  T* Room(size_t count) {
    T* const room = reinterpret_cast<T*>(at_);
    at_ += Bytes<T>(count);
    return room;
  }
  template <typename T>
  const T* Copy(absl::Span<const T> from) {
    T* const to = Room<T>(from.size());
    std::copy(from.begin(), from.end(), to);
    return to;
  }
  template <typename T>
  static size_t Bytes(size_t count) {
    return (count * sizeof(T) + kUploadAlign - 1) / kUploadAlign * kUploadAlign;
  }

 private:
  uint8_t* at_;
};

}  // namespace kvmanager
