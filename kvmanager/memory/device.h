// One GPU, as the daemon or a client's process uses it: what it is, its streams, its driver's entry points.
//
// Owned by whoever submits work to it; outlives everything made from it. Streams may be used by any thread that called
// Use(). This header and those of the other device types are free of CUDA's, and what they declare exists in builds
// without the CUDA Toolkit too: there Open() says so.
//
// Refused, each with a reason: anything but a Hopper GPU (the kernels use its own instructions); a process that is a
// client of CUDA's Multi-Process Service, because its kernels run in a server that outlives it, so that its death would
// not say that its kernels are gone; a process forked from one that had used CUDA, which the driver does not support.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

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
  static absl::StatusOr<std::unique_ptr<Device>> Open(int ordinal);
  /// The GPU of this name. Errors: as Open's; UNAVAILABLE where this process sees no such GPU.
  static absl::StatusOr<std::unique_ptr<Device>> OpenByUuid(const DeviceUuid& uuid);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const DeviceInfo& info() const { return info_; }
  /// Of the highest priority; and of the lowest, so that encoding and moving pages yields to attention.
  CUstream_st* attention_stream() const { return attention_stream_; }
  CUstream_st* encode_stream() const { return encode_stream_; }
  /// For what a host thread waits for, such as zeroing slabs: apart from encode work that is queued.
  CUstream_st* service_stream() const { return service_stream_; }

  /// Makes it the calling thread's device. Errors: FAILED_PRECONDITION in a forked child.
  absl::Status Use() const;
  absl::StatusOr<uint64_t> FreeBytes() const;

  /// Pins host memory (whole pages of it) so that kernels can use its own addresses, and undoes that.
  absl::Status PinHost(uint8_t* data, size_t bytes) const;
  void UnpinHost(uint8_t* data) const;

  /// More streams. How many streams can wait at once without holding up others:
  /// kConnectionsMax, if it was allowed (AllowManyStreams).
  absl::StatusOr<CUstream_st*> NewStream(StreamPriority priority = StreamPriority::kHighest) const;
  void DestroyStream(CUstream_st* stream) const;
  /// Nothing is queued or runs on it. Errors: UNAVAILABLE when the GPU has failed.
  absl::StatusOr<bool> IsIdle(CUstream_st* stream) const;

  /// What comes later on `stream` waits until the 8-byte word in pinned host memory is at least `value`, compared
  /// cyclically: int64(word - value) >= 0 (StreamWords). Errors: INVALID_ARGUMENT for a value above INT64_MAX - 1.
  absl::Status EnqueueWait(CUstream_st* stream, const void* word, uint64_t value) const;
  /// After all work on `stream` so far, stores `value` to a word in pinned host memory.
  absl::Status EnqueueWrite(CUstream_st* stream, const void* word, uint64_t value) const;
  /// What comes later on `stream` waits for all work on `leader` so far.
  absl::Status Follow(CUstream_st* stream, CUstream_st* leader) const;
  /// Between two places of this device's memory that do not overlap.
  absl::Status EnqueueCopy(CUstream_st* stream, void* to, const void* from, size_t bytes) const;
  /// After all work on `stream` so far, stores `epoch` to a ReleaseCounter's word in pinned host memory.
  absl::Status EnqueueRelease(CUstream_st* stream, const void* counter, uint64_t epoch) const;

  const DeviceDriver& driver() const { return *driver_; }

 private:
  Device();

  DeviceInfo info_;
  std::unique_ptr<DeviceDriver> driver_;
  CUstream_st* attention_stream_ = nullptr;
  CUstream_st* encode_stream_ = nullptr;
  CUstream_st* service_stream_ = nullptr;
};

/// Streams share the ways into a GPU, and one that waits holds up all that share its way: eight by default, and this
/// many when AllowManyStreams() was called before this process first used CUDA, with one thread. It also has all
/// kernels loaded at once: loading one later would wait for streams that wait.
constexpr int kConnectionsMax = 32;
void AllowManyStreams();

/// For the daemon's first line: "1 GPU: NVIDIA H200, 132 SMs, 139 GiB, compute 9.0", or why there is none: "built
/// without CUDA: nvcc was not on PATH", "no GPU driver", ...
std::string DeviceSummary();

/// OK for cudaSuccess; else the error that `call` gave, by name: RESOURCE_EXHAUSTED for memory, FAILED_PRECONDITION for
/// a device that a forked process cannot use, UNAVAILABLE for the rest. `cuda_error` is a cudaError_t.
absl::Status CudaStatus(int cuda_error, absl::string_view call);

/// The error of this process having been forked from one that used CUDA through this library; OK otherwise.
absl::Status CheckNotForked();

}  // namespace kvmanager
