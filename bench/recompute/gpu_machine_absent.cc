#include "bench/recompute/machine.h"

namespace kvmanager::recompute {

absl::StatusOr<std::unique_ptr<Machine>> MakeGpuMachine(const GpuMachineOptions&) {
  return absl::UnavailableError("built without CUDA: nvcc was not on PATH");
}

}  // namespace kvmanager::recompute
