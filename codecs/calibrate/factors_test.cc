#include "codecs/calibrate/factors.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "codecs/calibrate/random.h"
#include "gtest/gtest.h"

namespace kvmanager::calibrate {
namespace {

Matrix RandomRows(int rows, int d, uint64_t seed, int rank = 1 << 20) {
  Random random(seed);
  Matrix x(size_t(rows) * d);
  if (rank >= d) {
    for (int i = 0; i < rows * d; ++i) x[i] = random.Normal() * std::exp(-0.2 * (i % d));
    return x;
  }
  Matrix basis(size_t(rank) * d);
  for (double& b : basis) b = random.Normal();
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < rank; ++k) {
      const double c = random.Normal();
      for (int i = 0; i < d; ++i) x[size_t(r) * d + i] += c * basis[size_t(k) * d + i];
    }
  }
  return x;
}

// As training has it: parallel outside, not inside.
const bool one_blas_thread = (OneBlasThread(), true);

Moment MomentOf(const Matrix& rows, int d) {
  Moment moment;
  moment.sum.resize(size_t(d) * d);
  AddSecondMoment(rows, d, &moment.sum);
  moment.count = double(rows.size() / d);
  return moment;
}

/// Eigenvalues, descending, and vectors as columns, by Jacobi rotations.
Eigen SlowEigen(Matrix m, int d) {
  Eigen eigen;
  eigen.vectors.assign(size_t(d) * d, 0.0);
  for (int i = 0; i < d; ++i) eigen.vectors[size_t(i) * d + i] = 1;
  for (int sweep = 0; sweep < 60; ++sweep) {
    for (int p = 0; p < d; ++p) {
      for (int q = p + 1; q < d; ++q) {
        const double apq = m[size_t(p) * d + q];
        if (apq == 0) continue;
        const double theta = (m[size_t(q) * d + q] - m[size_t(p) * d + p]) / (2 * apq);
        const double t = (theta >= 0 ? 1 : -1) / (std::fabs(theta) + std::sqrt(theta * theta + 1));
        const double c = 1 / std::sqrt(t * t + 1), s = t * c;
        for (int k = 0; k < d; ++k) {
          const double a = m[size_t(k) * d + p], b = m[size_t(k) * d + q];
          m[size_t(k) * d + p] = c * a - s * b;
          m[size_t(k) * d + q] = s * a + c * b;
        }
        for (int k = 0; k < d; ++k) {
          const double a = m[size_t(p) * d + k], b = m[size_t(q) * d + k];
          m[size_t(p) * d + k] = c * a - s * b;
          m[size_t(q) * d + k] = s * a + c * b;
          const double u = eigen.vectors[size_t(k) * d + p], v = eigen.vectors[size_t(k) * d + q];
          eigen.vectors[size_t(k) * d + p] = c * u - s * v;
          eigen.vectors[size_t(k) * d + q] = s * u + c * v;
        }
      }
    }
  }
  for (int i = 0; i < d; ++i) eigen.values.push_back(m[size_t(i) * d + i]);
  return eigen;
}

double LargestOff(const Matrix& a, const Matrix& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::fabs(a[i] - b[i]));
  return worst;
}

TEST(LapackTest, AgreesWithSlowEigenvalues) {
  for (int d : {1, 2, 16, 48}) {
    const Moment moment = MomentOf(RandomRows(3 * d, d, d), d);
    const auto eigen = SymmetricEigen(moment.sum, d);
    ASSERT_TRUE(eigen.ok());
    std::vector<double> slow = SlowEigen(moment.sum, d).values;
    std::sort(slow.begin(), slow.end());
    for (int i = 0; i < d; ++i) EXPECT_NEAR(eigen->values[i], slow[i], 1e-9 * slow.back());
    // m v = lambda v
    for (int j = 0; j < d; ++j) {
      for (int i = 0; i < d; ++i) {
        double sum = 0;
        for (int k = 0; k < d; ++k) sum += moment.sum[size_t(i) * d + k] * eigen->vectors[size_t(k) * d + j];
        EXPECT_NEAR(sum, eigen->values[j] * eigen->vectors[size_t(i) * d + j], 1e-9 * slow.back());
      }
    }
  }
}

TEST(LapackTest, SingularValuesGiveTheMatrixBack) {
  for (int d : {1, 3, 16, 64}) {
    const Matrix m = RandomRows(d, d, 100 + d);
    const auto svd = SingularValues(m, d);
    ASSERT_TRUE(svd.ok());
    EXPECT_TRUE(std::is_sorted(svd->values.rbegin(), svd->values.rend()));
    Matrix back(m.size());
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) {
        for (int k = 0; k < d; ++k) {
          back[size_t(i) * d + j] += svd->u[size_t(i) * d + k] * svd->values[k] * svd->v[size_t(j) * d + k];
        }
      }
    }
    EXPECT_LT(LargestOff(back, m), 1e-10);
  }
}

TEST(FactorsTest, AllColumnsLoseNothing) {
  for (int d : {16, 64, 128}) {
    const Moment left = MomentOf(RandomRows(400, d, 1), d), right = MomentOf(RandomRows(300, d, 2), d);
    for (ZackMode mode : kZackModes) {
      const auto factors = MakeFactors(mode, left, right, d);
      ASSERT_TRUE(factors.ok()) << factors.status();
      EXPECT_TRUE(std::is_sorted(factors->weights.rbegin(), factors->weights.rend()));
      for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d; ++j) {
          double sum = 0;
          for (int c = 0; c < d; ++c) {
            sum += factors->left[size_t(i) * d + c] * factors->right[size_t(j) * d + c];
          }
          EXPECT_NEAR(sum, i == j, 1e-6) << Name(mode);
        }
      }
      for (int c = 0; c < d; ++c) {  // signs
        double largest = 0;
        for (int i = 0; i < d; ++i) {
          if (std::fabs(factors->left[size_t(i) * d + c]) > std::fabs(largest))
            largest = factors->left[size_t(i) * d + c];
        }
        EXPECT_GT(largest, 0);
      }
    }
  }
}

TEST(FactorsTest, JointIsTheSvdOfBothSidesStacked) {
  constexpr int d = 24;
  const Matrix left = RandomRows(60, d, 5), right = RandomRows(50, d, 6);
  Matrix both = left;
  both.insert(both.end(), right.begin(), right.end());
  const auto factors = MakeFactors(ZackMode::kJoint, MomentOf(left, d), MomentOf(right, d), d);
  ASSERT_TRUE(factors.ok());
  const Eigen slow = SlowEigen(MomentOf(both, d).sum, d);
  std::vector<int> order(d);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return slow.values[a] > slow.values[b]; });
  for (int j = 0; j < d; ++j) {
    EXPECT_NEAR(factors->weights[j], std::sqrt(std::max(slow.values[order[j]], 0.0)), 1e-6);
    double dot = 0;
    for (int i = 0; i < d; ++i) dot += factors->left[size_t(i) * d + j] * slow.vectors[size_t(i) * d + order[j]];
    EXPECT_NEAR(std::fabs(dot), 1, 1e-6) << j;
  }
  EXPECT_EQ(factors->left, factors->right);
}

/// Squared error of the whole product left right^T when n columns are kept, over its squared norm.
double ProductError(const Matrix& left, const Matrix& right, const Factors& factors, int d, int n) {
  double error = 0, all = 0;
  const size_t rows = left.size() / d, columns = right.size() / d;
  Matrix a(rows * n), b(columns * n);
  const auto rotate = [&](const Matrix& x, const Matrix& basis, Matrix* out) {
    for (size_t r = 0; r < x.size() / d; ++r) {
      for (int c = 0; c < n; ++c) {
        for (int i = 0; i < d; ++i) (*out)[r * n + c] += x[r * d + i] * basis[size_t(i) * d + c];
      }
    }
  };
  rotate(left, factors.left, &a);
  rotate(right, factors.right, &b);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t s = 0; s < columns; ++s) {
      double exact = 0, kept = 0;
      for (int i = 0; i < d; ++i) exact += left[r * d + i] * right[s * d + i];
      for (int c = 0; c < n; ++c) kept += a[r * n + c] * b[s * n + c];
      all += exact * exact;
      error += (exact - kept) * (exact - kept);
    }
  }
  return error / all;
}

TEST(FactorsTest, BalancedMakesTheLeastErrorOfTheProduct) {
  constexpr int d = 32;
  const Matrix left = RandomRows(120, d, 7), right = RandomRows(90, d, 8);
  const Moment l = MomentOf(left, d), r = MomentOf(right, d);
  const auto balanced = MakeFactors(ZackMode::kBalanced, l, r, d), joint = MakeFactors(ZackMode::kJoint, l, r, d);
  ASSERT_TRUE(balanced.ok() && joint.ok());
  double total = 0;
  for (double w : balanced->weights) total += w * w;
  for (int n : {1, 4, 8, 16}) {
    // Eckart-Young: what is lost is the energy of the weights that are dropped.
    double dropped = 0;
    for (int i = n; i < d; ++i) dropped += balanced->weights[i] * balanced->weights[i];
    const double error = ProductError(left, right, *balanced, d, n);
    EXPECT_NEAR(error, dropped / total, 1e-6) << n;
    EXPECT_LE(error, ProductError(left, right, *joint, d, n) * (1 + 1e-9)) << n;
  }
}

TEST(FactorsTest, PlantedLowRankNeedsThatManyColumns) {
  constexpr int d = 64, kRank = 9;
  const Matrix left = RandomRows(200, d, 9, kRank), right = RandomRows(200, d, 10);
  const auto factors = MakeFactors(ZackMode::kBalanced, MomentOf(left, d), MomentOf(right, d), d);
  ASSERT_TRUE(factors.ok());
  EXPECT_GT(factors->weights[kRank - 1], 1e-3 * factors->weights[0]);
  // The clamp of empty directions leaves a trace.
  EXPECT_LT(factors->weights[kRank], 1e-3 * factors->weights[0]);
  EXPECT_LT(ProductError(left, right, *factors, d, kRank), 1e-12);
}

TEST(FactorsTest, EmptySidesGiveFiniteFactors) {
  constexpr int d = 16;
  Moment zero;
  zero.sum.resize(d * d);
  zero.count = 10;
  const Moment right = MomentOf(RandomRows(50, d, 11), d);
  for (ZackMode mode : kZackModes) {
    using Sides = std::pair<const Moment*, const Moment*>;
    for (const auto& [a, b] : {Sides(&zero, &right), Sides(&right, &zero), Sides(&zero, &zero)}) {
      const auto factors = MakeFactors(mode, *a, *b, d);
      ASSERT_TRUE(factors.ok());
      for (double x : factors->left) EXPECT_TRUE(std::isfinite(float(x)));
      for (double x : factors->right) EXPECT_TRUE(std::isfinite(float(x)));
    }
  }
}

TEST(FactorsTest, ColumnEnergyIsTheMeanSquareOfTheRotatedRows) {
  constexpr int d = 16;
  const Matrix rows = RandomRows(40, d, 12), basis = RandomRows(d, d, 13);
  const std::vector<double> energy = ColumnEnergy(MomentOf(rows, d), basis, d);
  for (int c = 0; c < d; ++c) {
    double sum = 0;
    for (int r = 0; r < 40; ++r) {
      double x = 0;
      for (int i = 0; i < d; ++i) x += rows[r * d + i] * basis[i * d + c];
      sum += x * x;
    }
    EXPECT_NEAR(energy[c], sum / 40, 1e-9 * (1 + sum));
  }
}

}  // namespace
}  // namespace kvmanager::calibrate
