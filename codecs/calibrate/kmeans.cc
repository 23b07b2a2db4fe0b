#include "codecs/calibrate/kmeans.h"

#include <algorithm>
#include <cfloat>
#include <numeric>

#include "codecs/calibrate/kmeans_kernels.h"
#include "codecs/calibrate/random.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

class Lloyd {
 public:
  Lloyd(absl::Span<const float> columns, int dims, int rows, const KmeansOptions& options)
      : dims_(dims),
        rows_(rows),
        padded_(size_t(rows + kRowsBlock - 1) / kRowsBlock * kRowsBlock),
        count_(options.centroids),
        kernels_(KernelsOf(options.isa)),
        random_(options.seed),
        x_(dims * padded_),
        mean_(dims),
        nearest_(padded_),
        before_(padded_, -1),
        score_(padded_),
        half_norms_(count_) {
    // About the mean, scores are differences of small numbers.
    for (int d = 0; d < dims; ++d) {
      const float* from = &columns[size_t(d) * rows];
      mean_[d] = float(std::accumulate(from, from + rows, 0.0) / rows);
      for (int r = 0; r < rows; ++r) x_[d * padded_ + r] = from[r] - mean_[d];
    }
    for (float x : x_) squares_ += double(x) * x;
    result_.centroids.resize(size_t(count_) * dims);
  }

  KmeansResult Run(int iterations) {
    Start();
    while (result_.iterations < iterations) {
      ++result_.iterations;
      Assign();
      if (!Update()) break;
    }
    for (size_t i = 0; i < result_.centroids.size(); ++i) result_.centroids[i] += mean_[i % dims_];
    return std::move(result_);
  }

 private:
  void SetRow(int centroid, size_t row) {
    for (int d = 0; d < dims_; ++d) result_.centroids[size_t(centroid) * dims_ + d] = x_[d * padded_ + row];
  }

  /// k-means++.
  void Start() {
    std::vector<float> distance(padded_, 0.0f), sums(padded_ / kRowsBlock);
    std::fill_n(distance.begin(), rows_, FLT_MAX);
    for (int c = 0; c < count_; ++c) {
      SetRow(c, c == 0 ? random_.Below(rows_) : PickFar(distance, sums));
      kernels_.approach(x_.data(), padded_, dims_, &result_.centroids[size_t(c) * dims_], distance.data(), sums.data());
    }
  }

  size_t PickFar(const std::vector<float>& distance, const std::vector<float>& sums) {
    const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
    if (!(total > 0)) return random_.Below(rows_);
    double left = random_.Uniform() * total;
    size_t block = 0;
    while (block + 1 < sums.size() && left >= sums[block]) left -= sums[block++];
    const size_t end = std::min<size_t>((block + 1) * kRowsBlock, rows_);
    size_t row = block * kRowsBlock;
    while (row + 1 < end && left >= distance[row]) left -= distance[row++];
    return row;
  }

  void Assign() {
    for (int c = 0; c < count_; ++c) {
      const float* centroid = &result_.centroids[size_t(c) * dims_];
      half_norms_[c] = float(std::inner_product(centroid, centroid + dims_, centroid, 0.0) / 2);
    }
    kernels_.assign(x_.data(), padded_, dims_, result_.centroids.data(), half_norms_.data(), count_, nearest_.data(),
                    score_.data());
    double error = squares_;
    for (int r = 0; r < rows_; ++r) error -= 2.0 * score_[r];
    result_.mean_squared_error = std::max(error, 0.0) / rows_;
  }

  /// false: nothing changes any more.
  bool Update() {
    if (std::equal(nearest_.begin(), nearest_.begin() + rows_, before_.begin())) return false;
    before_ = nearest_;
    std::vector<double> sums(size_t(count_) * dims_);
    std::vector<int32_t> counts(count_);
    for (int r = 0; r < rows_; ++r) {
      ++counts[nearest_[r]];
      double* const sum = &sums[size_t(nearest_[r]) * dims_];
      for (int d = 0; d < dims_; ++d) sum[d] += x_[d * padded_ + r];
    }
    for (int c = 0; c < count_; ++c) {
      if (counts[c] == 0) {
        ++result_.restarts;
        SetRow(c, random_.Below(rows_));
        continue;
      }
      for (int d = 0; d < dims_; ++d) {
        result_.centroids[size_t(c) * dims_ + d] = float(sums[size_t(c) * dims_ + d] / counts[c]);
      }
    }
    return true;
  }

  const int dims_, rows_;
  const size_t padded_;
  const int count_;
  const KmeansKernels& kernels_;
  Random random_;
  std::vector<float> x_, mean_;  // [dims][padded], zeros behind the rows
  std::vector<int32_t> nearest_, before_;
  std::vector<float> score_, half_norms_;
  double squares_ = 0;
  KmeansResult result_;
};

}  // namespace

KmeansResult Kmeans(absl::Span<const float> columns, int dims, int rows, const KmeansOptions& options) {
  KV_CHECK(dims >= 1 && rows >= 1 && columns.size() == size_t(dims) * rows);
  KV_CHECK(options.centroids >= 1 && options.centroids <= KmeansOptions::kCentroidsMax && options.iterations >= 1);
  return Lloyd(columns, dims, rows, options).Run(options.iterations);
}

}  // namespace kvmanager::calibrate
