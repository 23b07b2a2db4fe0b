#include "codecs/calibrate/lapack.h"

#include <cblas.h>

#include "absl/strings/str_cat.h"

// Debian's libopenblas has LAPACK's symbols, but no header for them without another package.
extern "C" {
void dsyevd_(const char* jobz, const char* uplo, const int* n, double* a, const int* lda, double* w, double* work,
             const int* lwork, int* iwork, const int* liwork, int* info);
void dgesdd_(const char* jobz, const int* m, const int* n, double* a, const int* lda, double* s, double* u,
             const int* ldu, double* vt, const int* ldvt, double* work, const int* lwork, int* iwork, int* info);
}

namespace kvmanager::calibrate {
namespace {

Matrix Transposed(const Matrix& m, int d) {
  Matrix t(m.size());
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) t[size_t(j) * d + i] = m[size_t(i) * d + j];
  }
  return t;
}

absl::Status Check(int info, const char* what) {
  if (info == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, " did not converge (info ", info, ")"));
}

}  // namespace

void OneBlasThread() { openblas_set_num_threads(1); }

absl::StatusOr<Eigen> SymmetricEigen(Matrix symmetric, int d) {
  Eigen eigen;
  eigen.values.resize(d);
  const int work_size = 1 + 6 * d + 2 * d * d, integers_size = 3 + 5 * d;
  std::vector<double> work(work_size);
  std::vector<int> integers(integers_size);
  int info = 0;
  dsyevd_("V", "L", &d, symmetric.data(), &d, eigen.values.data(), work.data(), &work_size, integers.data(),
          &integers_size, &info);
  if (absl::Status status = Check(info, "eigenvalues"); !status.ok()) return status;
  eigen.vectors = Transposed(symmetric, d);  // LAPACK's are column-major
  return eigen;
}

absl::StatusOr<Svd> SingularValues(Matrix m, int d) {
  // Column-major, m is m^T = v diag u^T: LAPACK's left side is ours on the right.
  Svd svd;
  svd.values.resize(d);
  Matrix left(m.size()), right(m.size());
  std::vector<int> integers(8 * d);
  double wanted = 0;
  int query = -1, info = 0;
  dgesdd_("A", &d, &d, m.data(), &d, svd.values.data(), left.data(), &d, right.data(), &d, &wanted, &query,
          integers.data(), &info);
  std::vector<double> work(size_t(wanted) + 1);
  const int work_size = int(work.size());
  dgesdd_("A", &d, &d, m.data(), &d, svd.values.data(), left.data(), &d, right.data(), &d, work.data(), &work_size,
          integers.data(), &info);
  if (absl::Status status = Check(info, "singular values"); !status.ok()) return status;
  svd.v = Transposed(left, d);  // columns of LAPACK's u
  svd.u = std::move(right);     // LAPACK's v^T, column-major: row-major it is v
  return svd;
}

Matrix Multiply(const Matrix& a, const Matrix& b, int d) {
  Matrix product(a.size());
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, d, d, d, 1, a.data(), d, b.data(), d, 0, product.data(), d);
  return product;
}

void AddSecondMoment(absl::Span<const double> x, int d, Matrix* moment) {
  const int rows = int(x.size() / d);
  cblas_dsyrk(CblasRowMajor, CblasUpper, CblasTrans, d, rows, 1, x.data(), d, 1, moment->data(), d);
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < i; ++j) (*moment)[size_t(i) * d + j] = (*moment)[size_t(j) * d + i];
  }
}

}  // namespace kvmanager::calibrate
