// The dense linear algebra of training, in double precision: OpenBLAS' LAPACK behind three functions. Matrices are
// row-major [d][d]. Any thread; OpenBLAS must be set to one thread (OneBlasThread), since callers split work
// themselves.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager::calibrate {

using Matrix = std::vector<double>;

void OneBlasThread();

struct Eigen {
  std::vector<double> values;  // [d] ascending
  Matrix vectors;              // columns
};
/// Of a symmetric matrix. Errors: INTERNAL if LAPACK does not converge.
absl::StatusOr<Eigen> SymmetricEigen(Matrix symmetric, int d);

struct Svd {
  Matrix u;                    // columns
  std::vector<double> values;  // [d] descending
  Matrix v;                    // columns: m = u diag(values) v^T
};
absl::StatusOr<Svd> SingularValues(Matrix m, int d);

/// a b.
Matrix Multiply(const Matrix& a, const Matrix& b, int d);

/// moment [d][d] += x^T x, both triangles. x [rows][d].
void AddSecondMoment(absl::Span<const double> x, int d, Matrix* moment);

}  // namespace kvmanager::calibrate
