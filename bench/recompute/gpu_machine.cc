#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_format.h"
#include "bench/recompute/machine.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/gpu_benchmark.h"
#include "transport/recompute/cuda_executor.h"

namespace kvmanager::recompute {
namespace {

constexpr size_t kLargeCopyBytes = 512 << 20;
constexpr int kLargeCopies = 5;

class GpuMachine final : public Machine {
 public:
  GpuMachine(const GpuMachineOptions& options, std::unique_ptr<Device> device)
      : options_(options), device_(std::move(device)) {}

  std::string description() const override {
    return absl::StrFormat("%s; one large copy from pinned memory: %.1f GB/s", device_->info().name, large_copy_gb_);
  }
  absl::StatusOr<Arena> MakeArena(size_t activation_bytes, size_t stored_bytes, size_t page_bytes) override {
    KV_RETURN_IF_ERROR(Grow(activation_bytes, &activations_, &activation_bytes_));
    KV_RETURN_IF_ERROR(Grow(stored_bytes, &stored_, &stored_bytes_));
    if (page_bytes > page_bytes_) {
      pages_ = nullptr;
      pages_ = Allocate<uint8_t>(page_bytes);
      page_bytes_ = page_bytes;
    }
    if (large_copy_gb_ == 0) MeasureLargeCopy();
    return Arena{activations_.get(), stored_.get(), pages_.get()};
  }
  absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeExecutor(const ProjectionModel& model, double) override {
    CudaExecutorOptions options;
    if (options_.chunk_rows > 0) options.chunk_rows = options_.chunk_rows;
    if (options_.buffers > 0) options.buffers = options_.buffers;
    return MakeCudaExecutor(model, options, device_.get());
  }
  bool sustained() const override { return true; }

 private:
  static absl::Status Grow(size_t bytes, PinnedArray<uint8_t>* memory, size_t* has) {
    if (bytes <= *has) return absl::OkStatus();
    *memory = nullptr;
    *has = 0;
    KV_ASSIGN_OR_RETURN(*memory, AllocatePinned<uint8_t>(bytes));
    *has = bytes;
    FillWithHalves(memory->get(), bytes, 1);
    return absl::OkStatus();
  }

  void MeasureLargeCopy() {
    const size_t bytes = std::min({kLargeCopyBytes, stored_bytes_, page_bytes_});
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    std::vector<double> gb;
    for (int i = 0; i < kLargeCopies; ++i) {
      CHECK_CUDA(cudaEventRecord(begin, device_->service_stream()));
      CHECK_CUDA(cudaMemcpyAsync(pages_.get(), stored_.get(), bytes, cudaMemcpyDefault, device_->service_stream()));
      CHECK_CUDA(cudaEventRecord(end, device_->service_stream()));
      CHECK_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
      gb.push_back(double(bytes) / 1e6 / ms);
    }
    large_copy_gb_ = Median(std::move(gb));
    CHECK_CUDA(cudaEventDestroy(begin));
    CHECK_CUDA(cudaEventDestroy(end));
  }

  const GpuMachineOptions options_;
  const std::unique_ptr<Device> device_;
  PinnedArray<uint8_t> activations_, stored_;
  DeviceArray<uint8_t> pages_;
  size_t activation_bytes_ = 0, stored_bytes_ = 0, page_bytes_ = 0;
  double large_copy_gb_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Machine>> MakeGpuMachine(const GpuMachineOptions& options) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, Device::Open(options.ordinal));
  KV_RETURN_IF_ERROR(device->Use());
  return std::unique_ptr<Machine>(std::make_unique<GpuMachine>(options, std::move(device)));
}

}  // namespace kvmanager::recompute
