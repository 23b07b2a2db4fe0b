#include "transport/recompute/cuda_lanes.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_memory.h"
#include "transport/recompute/cuda_projection.h"

namespace kvmanager::recompute {

absl::Status CudaLanes::Prepare() {
  KV_RETURN_IF_ERROR(device->Use());
  KV_ASSIGN_OR_RETURN(copy, device->NewStream());
  KV_ASSIGN_OR_RETURN(compute, device->NewStream(StreamPriority::kLowest));
  KV_ASSIGN_OR_RETURN(angles, device->NewStream());
  KV_ASSIGN_OR_RETURN(back, device->NewStream());
  KV_ASSIGN_OR_RETURN(cublas, Cublas::Make(compute));
  KV_ASSIGN_OR_RETURN(not_finite, AllocatePinned<int64_t>(ReloadExecutor::kBuffersMax));
  KV_RETURN_IF_ERROR(LoadStoreKernels());
  // cuBLAS loads what it begins with.
  constexpr size_t kSmall = 64;
  KV_ASSIGN_OR_RETURN(const auto x, AllocateOnDevice<uint16_t>(2 * kSmall * kSmall, compute));
  KV_ASSIGN_OR_RETURN(const auto out, AllocateOnDevice<float>(kSmall * kSmall, compute));
  KV_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(x.get(), 0, 2 * kSmall * kSmall * sizeof(uint16_t), compute), "cudaMemsetAsync"));
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    KV_RETURN_IF_ERROR(cublas->Multiply(dtype, kSmall, kSmall, kSmall, x.get(), x.get() + kSmall * kSmall, out.get()));
  }
  return CudaStatus(cudaStreamSynchronize(compute), "cudaStreamSynchronize");
}

CudaLanes::~CudaLanes() {
  (void)device->Use();
  for (CUstream_st* const stream : {copy, compute, angles, back}) {
    if (stream != nullptr) cudaStreamSynchronize(stream);
  }
  cublas = nullptr;
  for (CUstream_st* const stream : {copy, compute, angles, back}) {
    if (stream != nullptr) device->DestroyStream(stream);
  }
}

bool CudaLanes::Met(const ProjectionModel& model, int rows) const {
  MutexLock lock(mutex_);
  return std::any_of(met_.begin(), met_.end(), [&](const Shape& shape) {
    return shape.dtype == model.layout.dtype && shape.hidden == model.hidden && shape.width == model.width() &&
           shape.rows >= rows;
  });
}

void CudaLanes::Meet(const ProjectionModel& model, int rows) {
  MutexLock lock(mutex_);
  met_.push_back({model.layout.dtype, model.hidden, model.width(), rows});
}

bool HasMet(const CudaLanes& lanes, const ProjectionModel& model) { return lanes.Met(model, 1); }

absl::StatusOr<std::shared_ptr<CudaLanes>> MakeCudaLanes(const Device* device) {
  KV_CHECK(device != nullptr);
  auto lanes = std::make_shared<CudaLanes>(device);
  KV_RETURN_IF_ERROR(lanes->Prepare());
  return lanes;
}

}  // namespace kvmanager::recompute
