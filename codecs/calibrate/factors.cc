#include "codecs/calibrate/factors.h"

#include <algorithm>
#include <cmath>

#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

// Directions that hold less of a side than this share of its greatest are as good as empty.
constexpr double kEigenShareMin = 1e-9;
// So that a side that is zero has roots.
constexpr double kEigenMin = 1e-30;

struct Roots {
  Matrix root, inverse;  // C^(1/2), C^(-1/2)
};

absl::StatusOr<Roots> SquareRoots(const Moment& moment, int d) {
  Matrix mean = moment.sum;
  for (double& x : mean) x /= std::max(moment.count, 1.0);
  KV_ASSIGN_OR_RETURN(const Eigen eigen, SymmetricEigen(std::move(mean), d));
  const double least = std::max(eigen.values.back() * kEigenShareMin, kEigenMin);
  Roots roots;
  Matrix scaled = eigen.vectors, inverse = eigen.vectors, transposed(eigen.vectors.size());
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) {
      const double root = std::sqrt(std::max(eigen.values[j], least));
      scaled[size_t(i) * d + j] *= root;
      inverse[size_t(i) * d + j] /= root;
      transposed[size_t(j) * d + i] = eigen.vectors[size_t(i) * d + j];
    }
  }
  roots.root = Multiply(scaled, transposed, d);
  roots.inverse = Multiply(inverse, transposed, d);
  return roots;
}

void FixSigns(int d, Factors* factors) {
  for (int j = 0; j < d; ++j) {
    double largest = 0;
    for (int i = 0; i < d; ++i) {
      const double x = factors->left[size_t(i) * d + j];
      if (std::fabs(x) > std::fabs(largest) * (1 + 1e-9)) largest = x;  // nearly equal ones: the first
    }
    if (largest >= 0) continue;
    for (int i = 0; i < d; ++i) {
      factors->left[size_t(i) * d + j] *= -1;
      factors->right[size_t(i) * d + j] *= -1;
    }
  }
}

absl::StatusOr<Factors> Joint(const Moment& left, const Moment& right, int d) {
  Matrix sum = left.sum;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += right.sum[i];
  KV_ASSIGN_OR_RETURN(const Eigen eigen, SymmetricEigen(std::move(sum), d));
  Factors factors;
  factors.left.resize(size_t(d) * d);
  for (int j = 0; j < d; ++j) {
    factors.weights.push_back(std::sqrt(std::max(eigen.values[d - 1 - j], 0.0)));
    for (int i = 0; i < d; ++i) factors.left[size_t(i) * d + j] = eigen.vectors[size_t(i) * d + d - 1 - j];
  }
  factors.right = factors.left;
  return factors;
}

absl::StatusOr<Factors> Balanced(const Moment& left, const Moment& right, int d) {
  KV_ASSIGN_OR_RETURN(const Roots a, SquareRoots(left, d));
  KV_ASSIGN_OR_RETURN(const Roots b, SquareRoots(right, d));
  KV_ASSIGN_OR_RETURN(const Svd svd, SingularValues(Multiply(a.root, b.root, d), d));
  Factors factors;
  factors.left = Multiply(a.inverse, svd.u, d);
  factors.right = Multiply(b.inverse, svd.v, d);
  factors.weights = svd.values;
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) {
      const double root = std::sqrt(svd.values[j]);
      factors.left[size_t(i) * d + j] *= root;
      factors.right[size_t(i) * d + j] *= root;
    }
  }
  return factors;
}

}  // namespace

absl::StatusOr<Factors> MakeFactors(ZackMode mode, const Moment& left, const Moment& right, int d) {
  KV_CHECK(left.sum.size() == size_t(d) * d && right.sum.size() == size_t(d) * d);
  KV_ASSIGN_OR_RETURN(Factors factors, mode == ZackMode::kJoint ? Joint(left, right, d) : Balanced(left, right, d));
  FixSigns(d, &factors);
  return factors;
}

Matrix HadamardMatrix(int d) {
  KV_CHECK(IsPowerOfTwo(d));
  Matrix matrix(size_t(d) * d);
  const double one = 1 / std::sqrt(double(d));
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) matrix[size_t(i) * d + j] = __builtin_parity(unsigned(i & j)) ? -one : one;
  }
  return matrix;
}

std::vector<double> ColumnEnergy(const Moment& moment, const Matrix& basis, int d) {
  const Matrix product = Multiply(moment.sum, basis, d);
  std::vector<double> energy(d);
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) energy[j] += basis[size_t(i) * d + j] * product[size_t(i) * d + j];
  }
  for (double& e : energy) e = std::max(e, 0.0) / std::max(moment.count, 1.0);
  return energy;
}

}  // namespace kvmanager::calibrate
