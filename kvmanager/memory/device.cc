#include "kvmanager/memory/device.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_driver.h"

namespace kvmanager {
namespace {

/// The process that first used CUDA through this library; 0: none yet. A forked child inherits it, which is how it is
/// recognised, so this is one word of the whole process.
std::atomic<pid_t> cuda_process{0};

/// The error of this process having been forked from one that used CUDA through this library; OK otherwise.
absl::Status CheckNotForked() {
  const pid_t user = cuda_process.load(std::memory_order_relaxed);
  if (user == 0 || user == getpid()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("this process was forked from process ", user,
                                                    " after that had used CUDA, which CUDA does not support: start it "
                                                    "by exec, or fork before the first use"));
}

absl::Status UseCudaInThisProcess() {
  pid_t expected = 0;
  cuda_process.compare_exchange_strong(expected, getpid());
  return CheckNotForked();
}

std::string Compute(int major, int minor) { return absl::StrCat(major, ".", minor); }

absl::StatusOr<DeviceInfo> Describe(int ordinal) {
  DeviceInfo info;
  cudaDeviceProp properties;
  KV_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties"));
  info.ordinal = ordinal;
  info.name = properties.name;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory_bytes = properties.totalGlobalMem;
  info.l2_bytes = properties.l2CacheSize;
  info.compute_major = properties.major;
  info.compute_minor = properties.minor;
  static_assert(sizeof(properties.uuid.bytes) == sizeof(DeviceUuid));
  std::memcpy(info.uuid.data(), properties.uuid.bytes, info.uuid.size());
  return info;
}

absl::Status CheckAttribute(int ordinal, cudaDeviceAttr attribute, absl::string_view what) {
  int value = 0;
  KV_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetAttribute(&value, attribute, ordinal), "cudaDeviceGetAttribute"));
  if (value != 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("GPU ", ordinal, " ", what));
}

template <typename F>
absl::Status Find(const char* symbol, unsigned version, F* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(symbol, &found, version, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr) {
    cudaGetLastError();
    return absl::UnavailableError(absl::StrCat("the GPU driver has no ", symbol, " of CUDA ", version / 1000, ".",
                                               version % 1000 / 10, ": it is too old"));
  }
  *function = reinterpret_cast<F>(found);
  return absl::OkStatus();
}

}  // namespace

absl::Status CudaStatus(int cuda_error, absl::string_view call) {
  if (cuda_error == cudaSuccess) return absl::OkStatus();
  const cudaError_t error = static_cast<cudaError_t>(cuda_error);
  const std::string message = absl::StrCat(call, " gave ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorInitializationError:
      return absl::FailedPreconditionError(
          absl::StrCat(message, " (a process forked from one that had used CUDA gets this: start it by exec)"));
    default:
      return absl::UnavailableError(message);
  }
}

absl::Status DeviceDriver::Load() {
  KV_RETURN_IF_ERROR(Find("cuGetErrorName", 6000, &error_name));
  KV_RETURN_IF_ERROR(Find("cuGetErrorString", 6000, &error_string));
  KV_RETURN_IF_ERROR(Find("cuMemGetAllocationGranularity", 10020, &allocation_granularity));
  KV_RETURN_IF_ERROR(Find("cuMemAddressReserve", 10020, &address_reserve));
  KV_RETURN_IF_ERROR(Find("cuMemAddressFree", 10020, &address_free));
  KV_RETURN_IF_ERROR(Find("cuMemCreate", 10020, &create));
  KV_RETURN_IF_ERROR(Find("cuMemRelease", 10020, &release));
  KV_RETURN_IF_ERROR(Find("cuMemMap", 10020, &map));
  KV_RETURN_IF_ERROR(Find("cuMemUnmap", 10020, &unmap));
  KV_RETURN_IF_ERROR(Find("cuMemSetAccess", 10020, &set_access));
  KV_RETURN_IF_ERROR(Find("cuMemExportToShareableHandle", 10020, &export_handle));
  KV_RETURN_IF_ERROR(Find("cuMemImportFromShareableHandle", 10020, &import_handle));
  KV_RETURN_IF_ERROR(Find("cuStreamWaitValue64", 11070, &stream_wait));
  return Find("cuStreamWriteValue64", 11070, &stream_write);
}

absl::Status DeviceDriver::ToStatus(CUresult result, absl::string_view call) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char *name = nullptr, *text = nullptr;
  error_name(result, &name);
  error_string(result, &text);
  const std::string message = absl::StrCat(call, " gave ", name == nullptr ? absl::StrCat("error ", result) : name,
                                           text == nullptr ? "" : ": ", text == nullptr ? "" : text);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return absl::ResourceExhaustedError(message);
  return absl::UnavailableError(message);
}

namespace {

class CudaDevice final : public Device {
 public:
  ~CudaDevice() override {
    if (attention_stream_ == nullptr || !CheckNotForked().ok()) return;
    cudaSetDevice(info_.ordinal);
    cudaStreamDestroy(attention_stream_);
    if (encode_stream_ != nullptr) cudaStreamDestroy(encode_stream_);
    if (service_stream_ != nullptr) cudaStreamDestroy(service_stream_);
  }

  /// Once, before all else. Errors: Open's.
  absl::Status Init(int ordinal) {
    KV_ASSIGN_OR_RETURN(info_, Describe(ordinal));
    if (info_.compute_major != kComputeMajor || info_.compute_minor != kComputeMinor) {
      return absl::UnavailableError(absl::StrCat(
          "GPU ", ordinal, " is ", info_.name, ", compute ", Compute(info_.compute_major, info_.compute_minor),
          ": the kernels need compute ", Compute(kComputeMajor, kComputeMinor), " (Hopper)"));
    }
    int shared = 0;
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaDeviceGetAttribute(&shared, cudaDevAttrMpsEnabled, ordinal), "cudaDeviceGetAttribute"));
    if (shared != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("this process would use GPU ", ordinal,
                       " through CUDA's Multi-Process Service: kernels then outlive the process that launched them, "
                       "and memory could not be taken back safely; unset CUDA_MPS_PIPE_DIRECTORY, or stop the "
                       "service"));
    }
    KV_RETURN_IF_ERROR(CheckAttribute(ordinal, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                      "cannot use pinned host memory by its own addresses"));
    KV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(ordinal), "cudaSetDevice"));
    KV_RETURN_IF_ERROR(driver_.Load());
    KV_ASSIGN_OR_RETURN(attention_stream_, NewStream(StreamPriority::kHighest));
    KV_ASSIGN_OR_RETURN(encode_stream_, NewStream(StreamPriority::kLowest));
    KV_ASSIGN_OR_RETURN(service_stream_, NewStream(StreamPriority::kHighest));
    return absl::OkStatus();
  }

  const DeviceInfo& info() const override { return info_; }
  CUstream_st* attention_stream() const override { return attention_stream_; }
  CUstream_st* encode_stream() const override { return encode_stream_; }
  CUstream_st* service_stream() const override { return service_stream_; }
  const DeviceDriver& driver() const override { return driver_; }

  absl::Status Use() const override {
    KV_RETURN_IF_ERROR(CheckNotForked());
    return CudaStatus(cudaSetDevice(info_.ordinal), "cudaSetDevice");
  }
  absl::StatusOr<uint64_t> FreeBytes() const override {
    KV_RETURN_IF_ERROR(Use());
    size_t free = 0, total = 0;
    KV_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
    return free;
  }

  absl::Status PinHost(uint8_t* data, size_t bytes) const override {
    KV_RETURN_IF_ERROR(Use());
    return CudaStatus(cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
                      "cudaHostRegister");
  }
  absl::Status PinHostForReading(const uint8_t* data, size_t bytes) const override {
    KV_RETURN_IF_ERROR(Use());
    const cudaError_t error =
        cudaHostRegister(const_cast<uint8_t*>(data), bytes, cudaHostRegisterPortable | cudaHostRegisterReadOnly);
    if (error != cudaSuccess) cudaGetLastError();  // who pins goes on without
    return CudaStatus(error, "cudaHostRegister");
  }
  void UnpinHost(const uint8_t* data) const override {
    // On an error the context is gone, and the pinning with it.
    if (Use().ok() && cudaHostUnregister(const_cast<uint8_t*>(data)) != cudaSuccess) cudaGetLastError();
  }

  absl::StatusOr<CUstream_st*> NewStream(StreamPriority priority) const override {
    KV_RETURN_IF_ERROR(Use());
    int lowest = 0, highest = 0;
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange"));
    CUstream_st* stream = nullptr;
    KV_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                               priority == StreamPriority::kHighest ? highest : lowest),
                                  "cudaStreamCreateWithPriority"));
    return stream;
  }
  void DestroyStream(CUstream_st* stream) const override {
    if (Use().ok()) cudaStreamDestroy(stream);
  }
  absl::StatusOr<bool> IsIdle(CUstream_st* stream) const override {
    KV_RETURN_IF_ERROR(Use());
    const cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaErrorNotReady) return false;
    KV_RETURN_IF_ERROR(CudaStatus(error, "cudaStreamQuery"));
    return true;
  }
  bool IsCapturing(CUstream_st* stream) const override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
  }

  absl::Status EnqueueWait(CUstream_st* stream, const void* word, uint64_t value) const override {
    constexpr uint64_t kMax = INT64_MAX - 1;
    if (value > kMax) return InvalidField("value to wait for", value, absl::StrCat("at most ", kMax));
    return driver_.ToStatus(
        driver_.stream_wait(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue64");
  }
  absl::Status EnqueueWrite(CUstream_st* stream, const void* word, uint64_t value) const override {
    return driver_.ToStatus(
        driver_.stream_write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue64");
  }
  absl::Status Follow(CUstream_st* stream, CUstream_st* leader) const override {
    cudaEvent_t mark = nullptr;
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming), "cudaEventCreate"));
    absl::Status status = CudaStatus(cudaEventRecord(mark, leader), "cudaEventRecord");
    if (status.ok()) status = CudaStatus(cudaStreamWaitEvent(stream, mark, 0), "cudaStreamWaitEvent");
    cudaEventDestroy(mark);  // goes once it has happened
    return status;
  }
  absl::Status EnqueueCopy(CUstream_st* stream, void* to, const void* from, size_t bytes) const override {
    KV_RETURN_IF_ERROR(Use());
    return CudaStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  }
  absl::Status EnqueueRelease(CUstream_st* stream, const void* counter, uint64_t epoch) const override {
    return EnqueueWrite(stream, counter, epoch);
  }

 private:
  DeviceInfo info_;
  DeviceDriver driver_;
  CUstream_st* attention_stream_ = nullptr;
  CUstream_st* encode_stream_ = nullptr;
  CUstream_st* service_stream_ = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> Device::Open(int ordinal) {
  KV_RETURN_IF_ERROR(UseCudaInThisProcess());
  int count = 0;
  KV_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
  if (ordinal < 0 || ordinal >= count) {
    return FieldError(absl::StatusCode::kUnavailable, "GPU", absl::StrCat(ordinal),
                      count == 0 ? "a GPU of this machine, which has none" : absl::StrCat("0..", count - 1));
  }
  auto device = std::make_unique<CudaDevice>();
  KV_RETURN_IF_ERROR(device->Init(ordinal));
  return device;
}

absl::StatusOr<std::unique_ptr<Device>> Device::OpenByUuid(const DeviceUuid& uuid) {
  KV_RETURN_IF_ERROR(UseCudaInThisProcess());
  int count = 0;
  KV_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    KV_ASSIGN_OR_RETURN(const DeviceInfo info, Describe(ordinal));
    if (info.uuid == uuid) return Open(ordinal);
  }
  return absl::UnavailableError(absl::StrCat("this process sees ", count,
                                             count == 1 ? " GPU, which is another" : " GPUs, all of them others",
                                             " than the one asked for: look at its CUDA_VISIBLE_DEVICES"));
}

std::string DeviceSummary() {
  if (const absl::Status status = UseCudaInThisProcess(); !status.ok()) return std::string(status.message());
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return "no GPU driver";
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) return "no GPU";
  if (error == cudaErrorInsufficientDriver) {
    return absl::StrCat("the GPU driver is for CUDA ", version / 1000, ".", version % 1000 / 10,
                        ", older than this build's ", CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
  }
  if (error != cudaSuccess) return std::string(CudaStatus(error, "cudaGetDeviceCount").message());
  std::string summary = absl::StrCat(count, count == 1 ? " GPU" : " GPUs");
  for (int i = 0; i < count; ++i) {
    absl::StrAppend(&summary, i == 0 ? ": " : "; ");
    const auto info = Describe(i);
    if (!info.ok()) {
      absl::StrAppend(&summary, info.status().message());
      continue;
    }
    absl::StrAppend(&summary, info->name, ", ", info->multiprocessors, " SMs, ", info->memory_bytes >> 30,
                    " GiB, compute ", Compute(info->compute_major, info->compute_minor));
  }
  return summary;
}

}  // namespace kvmanager
