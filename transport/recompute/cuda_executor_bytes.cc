#include <algorithm>

#include "transport/recompute/cuda_executor.h"

namespace kvmanager::recompute {

uint64_t CudaExecutorBytes(const ProjectionModel& model, const CudaExecutorOptions& options) {
  const uint64_t rows = CudaExecutorOptions::WholeTiles(options.chunk_rows), pairs = model.rope.rotary_dims / 2;
  const uint64_t row_bytes = uint64_t(model.hidden) * DTypeBytes(model.layout.dtype);
  const uint64_t staging = options.buffers * rows * (row_bytes + 2 * pairs * sizeof(float));
  const uint64_t made =
      options.pages_in_host_memory
          ? options.buffers * uint64_t(options.chunk_rows / model.layout.page_tokens) * model.layout.raw_bytes()
          : 0;
  return staging + made + rows * 2 * model.width() * sizeof(float) + pairs * sizeof(double);
}

uint64_t CudaLayerBytes(const ProjectionModel& model) {
  const uint64_t width = model.width();
  return 2 * width * model.hidden * DTypeBytes(model.layout.dtype) + 2 * width * sizeof(float);
}

}  // namespace kvmanager::recompute
