// A ReloadExecutor on a GPU: one stream copies from pinned host memory, another computes with cuBLAS and one kernel.
//
// X and the weights are multiplied as they are, 16 bits of the layout's dtype, on tensor cores that accumulate in fp32;
// a kernel adds the bias, rotates K in fp32, rounds once and stores to the pages (cuda_projection.h). Weights stay on
// the device: 4 * hidden * kv_heads * head_dim bytes a layer. Beside them `buffers` staging buffers of chunk_rows *
// hidden elements and 8 * chunk_rows * kv_heads * head_dim bytes of products are taken once (CudaExecutorBytes), and 32
// MiB or so by cuBLAS. A K or V that is not finite fails its reload as CpuExecutor's does (DATA_LOSS).
//
// What is posted reads pinned memory that the device can address, and writes memory that it can: pages on the device,
// or in pinned memory. Wait() polls: while a reload runs, its thread is busy. What is in the streams when a reload is
// aborted runs out (kCopiesInFlight copies, a projection of each buffer); Wait() returns it as it does.
//
// Beside streams that wait for other processes: an executor takes and gives back device memory in the order of its own
// stream, so it waits for nobody else's work; what CUDA frees or unpins only when every stream has ended is the lanes'.
// But an executor of a shape that its lanes have not met (HasMet) has cuBLAS load kernels when it is made, and that
// waits until no stream of the device has work, while nobody in this process can start any (measured).
//
// Owned by whoever wires a reload; the thread that calls keeps the device current from RegisterWeights or Begin on. It
// may be destroyed on another thread while nothing is posted.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/base/needs_cuda.h"
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
  /// Pages lie in pinned memory: K and V are made on the device and copied there by a copy engine, since kernels write
  /// to the host at a fifth of its rate. Pages of a chunk that holds many short ones are written by the kernel.
  bool pages_in_host_memory = false;

  /// Products are of whole tiles of rows: cuBLAS has its fastest kernels for them.
  static constexpr size_t kTileRows = 64;
  static constexpr size_t WholeTiles(size_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }
};

/// What executors of one GPU share, if one thread runs all of their reloads, one at a time: streams, cuBLAS and a few
/// pinned words. Executors may be made and destroyed on another meanwhile. Destroying it waits for every stream of the
/// device.
class CudaLanes;

/// device: outlives the lanes. Loads cuBLAS. Errors: UNAVAILABLE: no CUDA in this build, or no cuBLAS on this machine,
/// naming what to install; RESOURCE_EXHAUSTED.
KV_NEEDS_CUDA(absl::StatusOr<std::shared_ptr<CudaLanes>> MakeCudaLanes(const Device* device));

/// Whether an executor for these hidden, K and V sizes and dtype was made with these lanes before. Any thread.
KV_NEEDS_CUDA(bool HasMet(const CudaLanes& lanes, const ProjectionModel& model));

/// lanes: shared, as above. Errors: INVALID_ARGUMENT naming the field; RESOURCE_EXHAUSTED; UNAVAILABLE.
KV_NEEDS_CUDA(absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel& model,
                                                                               const CudaExecutorOptions& options,
                                                                               std::shared_ptr<CudaLanes> lanes));
/// With lanes of its own. Errors: also those of MakeCudaLanes.
KV_NEEDS_CUDA(absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeCudaExecutor(const ProjectionModel& model,
                                                                               const CudaExecutorOptions& options,
                                                                               const Device* device));

/// Device memory that an executor of a checked model takes when it is made, and for each layer that is registered (with
/// biases), without CUDA's rounding.
uint64_t CudaExecutorBytes(const ProjectionModel& model, const CudaExecutorOptions& options);
uint64_t CudaLayerBytes(const ProjectionModel& model);

}  // namespace kvmanager::recompute
