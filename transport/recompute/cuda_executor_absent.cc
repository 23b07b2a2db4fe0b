#include "transport/recompute/cuda_executor.h"

namespace kvmanager::recompute {

absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel&, const CudaExecutorOptions&,
                                                                 const Device*) {
  return absl::UnavailableError("built without CUDA: nvcc was not on PATH");
}

}  // namespace kvmanager::recompute
