// The one product that projections need of OpenBLAS, which is loaded when the first executor is made: programs start
// without it, and threads of those that never recompute have no room taken for its thread-local memory (60 KiB each,
// more than some threads' stacks can spare).
#pragma once

#include "absl/status/statusor.h"

namespace kvmanager::recompute {

struct Blas {
  /// out [rows][columns], rows out_stride apart = x [rows][depth] * weights^T, weights [columns][depth].
  void Multiply(int rows, int columns, int depth, const float* x, const float* weights, float* out,
                int out_stride) const;
  void (*sgemm)(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float* a, int lda,
                const float* b, int ldb, float beta, float* c, int ldc) = nullptr;
};

/// Once per process, in which it then uses one thread per call (work is split outside). Errors: UNAVAILABLE, saying
/// what to install. Any thread.
absl::StatusOr<const Blas*> LoadBlas();

}  // namespace kvmanager::recompute
