// One GPU, as the daemon or a client's process uses it: what it is, its streams, its driver's entry points.
//
// Owned by whoever submits work to it; outlives everything made from it. Streams may be used by any thread that called
// Use(). This header and those of the other device types are free of CUDA's, and serve builds without the CUDA Toolkit
// too: there Open() says so (needs_cuda.h).
//
// Refused, each with a reason: anything but a Hopper GPU (the kernels use its own instructions); a process that is a
// client of CUDA's Multi-Process Service, because its kernels run in a server that outlives it, so that its death would
// not say that its kernels are gone; a process forked from one that had used CUDA, which the driver does not support.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/needs_cuda.h"

struct CUstream_st;  // CUDA's stream: cudaStream_t is CUstream_st*

namespace kvmanager {

struct DeviceDriver;  // device_driver.h

/// A GPU's name in every process, whatever CUDA_VISIBLE_DEVICES says there.
using DeviceUuid = std::array<uint8_t, 16>;

struct DeviceInfo {
  int ordinal = 0;
  std::string name;
  int multiprocessors = 0;
  uint64_t memory_bytes = 0;
  uint64_t l2_bytes = 0;
  int compute_major = 0;
  int compute_minor = 0;
  DeviceUuid uuid = {};
};

enum class StreamPriority : uint8_t { kHighest = 0, kLowest = 1 };

class Device {
 public:
  static constexpr int kComputeMajor = 9;
  static constexpr int kComputeMinor = 0;

  /// Errors: UNAVAILABLE where there is no such GPU, driver or CUDA Toolkit, or it is of another kind;
  /// FAILED_PRECONDITION for a process that is refused.
  KV_NEEDS_CUDA(static absl::StatusOr<std::unique_ptr<Device>> Open(int ordinal));
  /// The GPU of this name. Errors: as Open's; UNAVAILABLE where this process sees no such GPU.
  KV_NEEDS_CUDA(static absl::StatusOr<std::unique_ptr<Device>> OpenByUuid(const DeviceUuid& uuid));
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const = 0;
  /// Of the highest priority; and of the lowest, so that encoding and moving pages yields to attention.
  virtual CUstream_st* attention_stream() const = 0;
  virtual CUstream_st* encode_stream() const = 0;
  /// For what a host thread waits for, such as zeroing slabs: apart from encode work that is queued.
  virtual CUstream_st* service_stream() const = 0;

  /// Makes it the calling thread's device. Errors: FAILED_PRECONDITION in a forked child.
  virtual absl::Status Use() const = 0;
  virtual absl::StatusOr<uint64_t> FreeBytes() const = 0;

  /// Pins host memory (whole pages of it) so that kernels can use its own addresses, and undoes that.
  virtual absl::Status PinHost(uint8_t* data, size_t bytes) const = 0;
  /// The same for memory that this process has mapped for reading: copies read it, kernels may not.
  virtual absl::Status PinHostForReading(const uint8_t* data, size_t bytes) const = 0;
  virtual void UnpinHost(const uint8_t* data) const = 0;

  /// More streams. How many streams can wait at once without holding up others:
  /// kConnectionsMax, if it was allowed (AllowManyStreams).
  virtual absl::StatusOr<CUstream_st*> NewStream(StreamPriority priority = StreamPriority::kHighest) const = 0;
  virtual void DestroyStream(CUstream_st* stream) const = 0;
  /// Nothing is queued or runs on it. Errors: UNAVAILABLE when the GPU has failed.
  virtual absl::StatusOr<bool> IsIdle(CUstream_st* stream) const = 0;
  /// What is enqueued on `stream` now would be captured in a CUDA graph, or it cannot be said. The capture goes on.
  virtual bool IsCapturing(CUstream_st* stream) const = 0;

  /// What comes later on `stream` waits until the 8-byte word in pinned host memory is at least `value`, compared
  /// cyclically: int64(word - value) >= 0 (SharedSemaphores). Errors: INVALID_ARGUMENT for a value above INT64_MAX - 1.
  virtual absl::Status EnqueueWait(CUstream_st* stream, const void* word, uint64_t value) const = 0;
  /// After all work on `stream` so far, stores `value` to a word in pinned host memory.
  virtual absl::Status EnqueueWrite(CUstream_st* stream, const void* word, uint64_t value) const = 0;
  /// What comes later on `stream` waits for all work on `leader` so far.
  virtual absl::Status Follow(CUstream_st* stream, CUstream_st* leader) const = 0;
  /// To a place of this device's memory from another of it, which do not overlap, or from host memory: where that is
  /// not pinned, it may have been read by the time that this returns.
  virtual absl::Status EnqueueCopy(CUstream_st* stream, void* to, const void* from, size_t bytes) const = 0;
  /// After all work on `stream` so far, stores `epoch` to a ReleaseCounter's word in pinned host memory.
  virtual absl::Status EnqueueRelease(CUstream_st* stream, const void* counter, uint64_t epoch) const = 0;

  virtual const DeviceDriver& driver() const = 0;
};

/// Streams share the ways into a GPU, and one that waits holds up all that share its way: eight by default, and this
/// many when AllowManyStreams() was called before this process first used CUDA, with one thread. It also has all
/// kernels loaded at once: loading one later would wait for streams that wait.
constexpr int kConnectionsMax = 32;
inline void AllowManyStreams() {
  if (!kCudaBuilt) return;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kConnectionsMax).c_str(), /*overwrite=*/1);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/1);
}

/// For the daemon's first line: "1 GPU: NVIDIA H200, 132 SMs, 139 GiB, compute 9.0", or why there is none: "built
/// without CUDA: nvcc was not on PATH", "no GPU driver", ...
KV_NEEDS_CUDA(std::string DeviceSummary());

/// OK for cudaSuccess; else the error that `call` gave, by name: RESOURCE_EXHAUSTED for memory, FAILED_PRECONDITION for
/// a device that a forked process cannot use, UNAVAILABLE for the rest. `cuda_error` is a cudaError_t.
KV_NEEDS_CUDA(absl::Status CudaStatus(int cuda_error, absl::string_view call));

}  // namespace kvmanager
