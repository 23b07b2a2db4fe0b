// The one product that recomputation on a GPU needs, by cuBLAS, which is looked for when it is first needed: programs
// start and run without it.
//
// Owned by CudaExecutor, one handle each; one thread at a time, the device current. The library stays loaded.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/base/page_layout.h"

struct CUstream_st;    // CUDA's stream
struct cublasContext;  // cuBLAS's handle

namespace kvmanager::recompute {

struct CublasCalls;

class Cublas {
 public:
  /// Work goes to `stream`, which outlives this. Errors: UNAVAILABLE, naming what to install; RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<Cublas>> Make(CUstream_st* stream);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// Enqueues out[rows][columns] = x[rows][depth] * weights[columns][depth]^T, all dense in device memory; x and
  /// weights of `dtype` (16 bits), sums and `out` in fp32. Errors: UNAVAILABLE.
  absl::Status Multiply(DType dtype, int rows, int columns, int depth, const void* x, const void* weights, float* out);

 private:
  Cublas(const CublasCalls* calls, cublasContext* handle) : calls_(calls), handle_(handle) {}

  const CublasCalls* const calls_;
  cublasContext* const handle_;
};

}  // namespace kvmanager::recompute
