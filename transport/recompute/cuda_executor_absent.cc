#include "transport/recompute/cuda_executor.h"

namespace kvmanager::recompute {
namespace {

absl::Status Absent() { return absl::UnavailableError("built without CUDA: nvcc was not on PATH"); }

}  // namespace

class CudaLanes {};

absl::StatusOr<std::shared_ptr<CudaLanes>> MakeCudaLanes(const Device*) { return Absent(); }

bool HasMet(const CudaLanes&, const ProjectionModel&) { return false; }

absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel&, const CudaExecutorOptions&,
                                                                 std::shared_ptr<CudaLanes>) {
  return Absent();
}

absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel&, const CudaExecutorOptions&,
                                                                 const Device*) {
  return Absent();
}

}  // namespace kvmanager::recompute
