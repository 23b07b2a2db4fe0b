// What executors of one GPU share (cuda_executor.h, MakeCudaLanes): it outlives them, since CUDA frees it only when
// every stream of the device has ended. One thread runs reloads on it; Met and Meet are for any.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/memory/device_memory.h"
#include "transport/recompute/cublas.h"
#include "transport/recompute/cuda_executor.h"

namespace kvmanager::recompute {

class CudaLanes {
 public:
  explicit CudaLanes(const Device* device) : device(device) {}
  /// Waits for every stream of the device.
  ~CudaLanes();
  CudaLanes(const CudaLanes&) = delete;
  CudaLanes& operator=(const CudaLanes&) = delete;

  /// Once, before all else; also has cuBLAS load what it begins with. Errors: MakeCudaLanes'.
  absl::Status Prepare();

  const Device* const device;
  CUstream_st *copy = nullptr, *compute = nullptr, *angles = nullptr, *back = nullptr;
  std::unique_ptr<Cublas> cublas;
  PinnedArray<int64_t> not_finite;  // [kBuffersMax]: NotFiniteCode, or what says that all is finite

  /// Products of this model, of up to `rows` rows, were made before.
  bool Met(const ProjectionModel& model, int rows) const;
  void Meet(const ProjectionModel& model, int rows);

 private:
  struct Shape {
    DType dtype;
    int hidden, width, rows;
  };
  mutable Mutex mutex_;
  std::vector<Shape> met_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvmanager::recompute
