#include "codecs/pq/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "codecs/pq/pq_parameters.h"

namespace kvmanager::pq {
namespace {

using Polynomial = std::array<double, 3>;  // coefficients of 1, x, x^2

/// Least squares over the powers of x from `low` to `high`; false if they are not determined.
template <typename Samples>
bool Fit(const Samples& samples, double unit, int low, int high, Polynomial* out) {
  const int n = high - low + 1;
  double a[3][4] = {};
  for (const auto& s : samples) {
    const double x = s.x / unit;
    double powers[3];
    for (int i = 0; i < n; ++i) powers[i] = std::pow(x, low + i);
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) a[i][j] += powers[i] * powers[j];
      a[i][3] += powers[i] * s.seconds;
    }
  }
  for (int i = 0; i < n; ++i) {
    int pivot = i;
    for (int r = i + 1; r < n; ++r) {
      if (std::fabs(a[r][i]) > std::fabs(a[pivot][i])) pivot = r;
    }
    if (std::fabs(a[pivot][i]) < 1e-12) return false;
    std::swap(a[i], a[pivot]);
    for (int r = 0; r < n; ++r) {
      if (r == i) continue;
      const double factor = a[r][i] / a[i][i];
      for (int c = i; c < 4; ++c) a[r][c] -= factor * a[i][c];
    }
  }
  *out = {};
  for (int i = 0; i < n; ++i) (*out)[low + i] = a[i][3] / a[i][i] / std::pow(unit, low + i);
  return true;
}

/// The richest polynomial of degree `degree` or less, with a constant or not, that has no negative coefficient and as
/// many distinct x as coefficients: times do not fall with size.
template <typename Samples>
Polynomial FitTimes(const Samples& samples, int degree) {
  std::set<double> distinct;
  double unit = 1;
  for (const auto& s : samples) {
    distinct.insert(s.x);
    unit = std::max(unit, s.x);
  }
  for (int high = degree; high >= 1; --high) {
    for (int low : {0, 1}) {
      Polynomial p;
      if (distinct.size() < size_t(high - low + 1) || !Fit(samples, unit, low, high, &p)) continue;
      if (std::all_of(p.begin(), p.end(), [](double c) { return c >= 0 && std::isfinite(c); })) return p;
    }
  }
  return {};
}

template <typename Sample>
void Add(std::vector<Sample>& samples, size_t& next, Sample sample) {
  if (samples.size() < CostModel::kSamplesMax) {
    samples.push_back(sample);
  } else {
    samples[next] = sample;
    next = (next + 1) % CostModel::kSamplesMax;
  }
}

}  // namespace

void CostModel::AddClustering(uint64_t tokens, double iterations, double seconds) {
  MutexLock lock(mutex_);
  Add(clustering_, next_clustering_, {double(tokens) * iterations, seconds});
}

void CostModel::AddPrefill(uint64_t tokens, double seconds) {
  MutexLock lock(mutex_);
  Add(prefill_, next_prefill_, {double(tokens), seconds});
}

uint32_t CostModel::Iterations(uint64_t tokens) const {
  MutexLock lock(mutex_);
  if (clustering_.empty() || prefill_.empty()) return kIterationsUnmeasured;
  const Polynomial clustering = FitTimes(clustering_, 1), prefill = FitTimes(prefill_, 2);
  const double s = double(tokens);
  const double hidden = prefill[0] + prefill[1] * s + prefill[2] * s * s - clustering[0];
  const double per_iteration = clustering[1] * s;
  if (per_iteration <= 0) return Parameters::kIterationsMax;
  return uint32_t(std::clamp<double>(hidden / per_iteration, Parameters::kIterationsMin, Parameters::kIterationsMax));
}

}  // namespace kvmanager::pq
