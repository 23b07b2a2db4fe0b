#include "codecs/calibrate/kmeans.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "codecs/calibrate/random.h"
#include "gtest/gtest.h"

namespace kvmanager::calibrate {
namespace {

std::vector<float> RandomColumns(int dims, int rows, uint64_t seed) {
  Random random(seed);
  std::vector<float> columns(size_t(dims) * rows);
  for (float& x : columns) x = 3 + random.Normal();
  return columns;
}

/// Mean squared distance of rows to their nearest centroid.
double ErrorOf(const std::vector<float>& columns, int dims, int rows, const std::vector<float>& centroids) {
  double error = 0;
  for (int r = 0; r < rows; ++r) {
    double best = INFINITY;
    for (size_t c = 0; c < centroids.size() / dims; ++c) {
      double distance = 0;
      for (int d = 0; d < dims; ++d) {
        const double difference = double(columns[size_t(d) * rows + r]) - centroids[c * dims + d];
        distance += difference * difference;
      }
      best = std::min(best, distance);
    }
    error += best;
  }
  return error / rows;
}

TEST(KmeansTest, FindsPlantedClusters) {
  for (int dims : {1, 2, 3, 4, 8, 16}) {
    Random random(dims);
    constexpr int kClusters = 12, kEach = 40;
    std::vector<float> centers(kClusters * dims);
    for (int c = 0; c < kClusters; ++c) {
      for (int d = 0; d < dims; ++d) centers[c * dims + d] = float(d == 0 ? 100 * c : 10 * random.Normal());
    }
    constexpr int rows = kClusters * kEach;
    std::vector<float> columns(size_t(dims) * rows);
    for (int r = 0; r < rows; ++r) {
      for (int d = 0; d < dims; ++d) {
        columns[size_t(d) * rows + r] = centers[r % kClusters * dims + d] + 0.1f * random.Normal();
      }
    }
    KmeansOptions options;
    options.centroids = kClusters;
    const KmeansResult result = Kmeans(columns, dims, rows, options);
    std::set<int> found;
    for (int c = 0; c < kClusters; ++c) found.insert(int(std::lround(result.centroids[c * dims] / 100)));
    EXPECT_EQ(found.size(), size_t(kClusters)) << dims;
    EXPECT_LT(result.mean_squared_error, 0.02 * dims) << dims;
    EXPECT_LT(result.iterations, 25) << dims;  // nothing changes any more
  }
}

TEST(KmeansTest, EveryInstructionSetGivesTheSameBits) {
  for (int dims : {1, 2, 4, 5, 8}) {
    const std::vector<float> columns = RandomColumns(dims, 777, dims);
    KmeansOptions options;
    options.centroids = 31;
    options.isa = Isa::kPortable;
    const KmeansResult reference = Kmeans(columns, dims, 777, options);
    for (Isa isa : SupportedIsas()) {
      options.isa = isa;
      EXPECT_EQ(Kmeans(columns, dims, 777, options).centroids, reference.centroids) << dims << IsaName(isa);
    }
  }
}

TEST(KmeansTest, SaysItsErrorAndImproves) {
  const std::vector<float> columns = RandomColumns(4, 1500, 8);
  KmeansOptions options;
  options.centroids = 64;
  double before = INFINITY;
  for (int iterations : {1, 3, 10, 25}) {
    options.iterations = iterations;
    const KmeansResult result = Kmeans(columns, 4, 1500, options);
    const double error = ErrorOf(columns, 4, 1500, result.centroids);
    EXPECT_LE(error, result.mean_squared_error * (1 + 1e-5));  // which is from before the last update
    EXPECT_LE(error, before * (1 + 1e-5));
    before = error;
  }
  options.seed = 1;
  EXPECT_NE(Kmeans(columns, 4, 1500, options).centroids, Kmeans(columns, 4, 1500, {64}).centroids);
}

TEST(KmeansTest, IsALocalMinimumOfLloyd) {
  const std::vector<float> columns = RandomColumns(2, 600, 3);
  KmeansOptions options;
  options.centroids = 16;
  options.iterations = 500;
  const KmeansResult result = Kmeans(columns, 2, 600, options);
  ASSERT_LT(result.iterations, 500);
  // Each centroid is the mean of the rows nearest to it.
  std::vector<double> sums(32), counts(16);
  for (int r = 0; r < 600; ++r) {
    int nearest = 0;
    double best = INFINITY;
    for (int c = 0; c < 16; ++c) {
      const double distance = std::pow(double(columns[r]) - result.centroids[2 * c], 2) +
                              std::pow(double(columns[600 + r]) - result.centroids[2 * c + 1], 2);
      if (distance < best) {
        best = distance;
        nearest = c;
      }
    }
    ++counts[nearest];
    sums[2 * nearest] += columns[r];
    sums[2 * nearest + 1] += columns[600 + r];
  }
  for (int i = 0; i < 32; ++i) EXPECT_NEAR(result.centroids[i], sums[i] / counts[i / 2], 1e-3);
}

TEST(KmeansTest, FewerRowsThanCentroids) {
  const std::vector<float> columns = {1, 5, 9, -1, -5, -9};  // three rows of two
  KmeansOptions options;
  options.centroids = 16;
  const KmeansResult result = Kmeans(columns, 2, 3, options);
  EXPECT_EQ(result.centroids.size(), 32u);
  EXPECT_NEAR(result.mean_squared_error, 0, 1e-10);
  EXPECT_NEAR(ErrorOf(columns, 2, 3, result.centroids), 0, 1e-10);
  EXPECT_GT(result.restarts, 0);
}

TEST(KmeansTest, EqualRowsAndOneCentroid) {
  const std::vector<float> equal(200, 7.25f);
  KmeansOptions options;
  options.centroids = 8;
  const KmeansResult result = Kmeans(equal, 2, 100, options);
  for (float x : result.centroids) EXPECT_EQ(x, 7.25f);
  EXPECT_EQ(result.mean_squared_error, 0);
  const std::vector<float> columns = {0, 1, 2, 3, 4, 5};
  options.centroids = 1;
  EXPECT_NEAR(Kmeans(columns, 1, 6, options).centroids[0], 2.5f, 1e-6);
}

TEST(KmeansTest, AFarOutlierGetsItsCentroid) {
  std::vector<float> columns = RandomColumns(1, 1000, 4);
  columns[700] = 5000;
  KmeansOptions options;
  options.centroids = 8;
  const KmeansResult result = Kmeans(columns, 1, 1000, options);
  EXPECT_NEAR(*std::max_element(result.centroids.begin(), result.centroids.end()), 5000, 1);
}

TEST(KmeansTest, TiesGoToTheFirst) {
  // A row in the middle of two centroids belongs to one of them, on every run.
  const std::vector<float> columns = {-1, 1, 0};
  KmeansOptions options;
  options.centroids = 2;
  options.iterations = 1;
  EXPECT_EQ(Kmeans(columns, 1, 3, options).centroids, Kmeans(columns, 1, 3, options).centroids);
}

}  // namespace
}  // namespace kvmanager::calibrate
