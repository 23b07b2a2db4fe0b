// A ReloadExecutor on the CPU: one thread copies over a CopyLink, another computes with OpenBLAS, helped by a pool.
//
// X and the weights are widened to fp32, products accumulate in fp32, K is rotated in fp32, and both are rounded once
// to the layout's dtype. Weights are kept in fp32: 8 * hidden * kv_heads * head_dim bytes a layer. A K or V that is not
// finite fails its reload (DATA_LOSS, naming layer, side, head and position): nothing else would notice before
// attention.
//
// OpenBLAS is loaded with the first executor (blas.h) and set to one thread, process-wide: work is split outside of it.
// Whether it uses this processor's vectors is the program's business (kvmanager/base/blas_core.h).
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/worker_pool.h"
#include "transport/recompute/executor.h"
#include "transport/recompute/link.h"

namespace kvmanager::recompute {

struct CpuExecutorOptions {
  static constexpr int kChunkRowsMax = 1 << 16;
  static constexpr int64_t kStagingBytesMax = int64_t{1} << 33;  // fp32 and 16-bit rows of all buffers

  /// Rows of X that are projected at once: products of few rows waste the packing of weights.
  int chunk_rows = 256;  // page_tokens..kChunkRowsMax
  int buffers = 2;       // 2..ReloadExecutor::kBuffersMax
};

/// link, pool (nullptr: the compute thread alone), clock: outlive the executor. Errors: INVALID_ARGUMENT naming the
/// field; UNAVAILABLE without OpenBLAS.
absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCpuExecutor(const ProjectionModel& model,
                                                                const CpuExecutorOptions& options, CopyLink* link,
                                                                WorkerPool* pool, const Clock* clock);

}  // namespace kvmanager::recompute
