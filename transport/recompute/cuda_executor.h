// A ReloadExecutor on a GPU: one stream copies from pinned host memory, another computes with cuBLAS and one kernel.
//
// X and the weights are multiplied as they are, 16 bits of the layout's dtype, on tensor cores that accumulate in fp32;
// a kernel adds the bias, rotates K in fp32, rounds once and stores to the pages (cuda_projection.h). Weights stay on
// the device: 4 * hidden * kv_heads * head_dim bytes a layer. Beside them `buffers` staging buffers of chunk_rows *
// hidden elements and 8 * chunk_rows * kv_heads * head_dim bytes of products are taken once, and 32 MiB or so by
// cuBLAS. A K or V that is not finite fails its reload as CpuExecutor's does (DATA_LOSS).
//
// What is posted reads pinned memory that the device can address, and writes memory that it can. Wait() polls: while a
// reload runs, its thread is busy. What is in the streams when a reload is aborted runs out (kCopiesInFlight copies, a
// projection of each buffer); Wait() returns it as it does.
//
// Owned by whoever wires a reload; the thread that calls keeps the device current from RegisterWeights or Begin on.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/memory/device.h"
#include "transport/recompute/executor.h"

namespace kvmanager::recompute {

struct CudaExecutorOptions {
  static constexpr int kChunkRowsMax = 1 << 16;
  static constexpr int64_t kStagingBytesMax = int64_t{1} << 34;  // of all buffers, products and angles

  /// Rows of X that are projected at once.
  int chunk_rows = 1024;  // page_tokens..kChunkRowsMax
  /// With two, an arriving chunk often finds both taken, and then waits behind a piece of K and V that was posted
  /// meanwhile; chunks at the start are small and follow each other quickly.
  int buffers = 4;  // 2..ReloadExecutor::kBuffersMax
};

/// device: outlives the executor. Errors: INVALID_ARGUMENT naming the field; UNAVAILABLE: no CUDA in this build, or no
/// cuBLAS on this machine, naming what to install; RESOURCE_EXHAUSTED.
absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel& model,
                                                                 const CudaExecutorOptions& options,
                                                                 const Device* device);

}  // namespace kvmanager::recompute
