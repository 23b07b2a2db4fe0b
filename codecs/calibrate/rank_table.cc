#include "codecs/calibrate/rank_table.h"

#include <algorithm>
#include <cmath>

#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

/// Removed share of the total at rank 16, 32, ..., d, which is the last and 0.
std::vector<double> RemovedShares(absl::Span<const float> weights, bool squared) {
  std::vector<double> shares(weights.size() / kRankMultiple, 0.0);
  double removed = 0;
  for (size_t i = weights.size(); i-- > 0;) {
    if ((i + 1) % kRankMultiple == 0) shares[(i + 1) / kRankMultiple - 1] = removed;
    removed += squared ? double(weights[i]) * weights[i] : double(weights[i]);
  }
  if (removed > 0) {
    for (double& share : shares) share /= removed;
  }
  return shares;
}

int RankOf(absl::Span<const double> shares, double removed) {
  int step = 0;
  while (shares[step] > removed) ++step;  // the last is 0
  return (step + 1) * kRankMultiple;
}

}  // namespace

int RankFor(absl::Span<const float> weights, bool squared, double removed) {
  KV_CHECK(removed >= 0 && !weights.empty() && weights.size() % kRankMultiple == 0);
  return RankOf(RemovedShares(weights, squared), removed);
}

RankTable MakeRankTable(absl::Span<const float> weights, int d, bool squared) {
  KV_CHECK(d > 0 && d % kRankMultiple == 0 && !weights.empty() && weights.size() % d == 0);
  const size_t heads = weights.size() / d;
  std::vector<std::vector<double>> shares;
  std::vector<double> bounds;  // a rank changes at a removed share of some head, and nowhere else
  for (size_t h = 0; h < heads; ++h) {
    shares.push_back(RemovedShares(weights.subspan(h * d, d), squared));
    bounds.insert(bounds.end(), shares.back().begin(), shares.back().end());
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  const auto rate_of = [&](double bound) {
    uint64_t kept = 0;
    for (const auto& head : shares) kept += RankOf(head, bound);
    return 1 - double(kept) / double(heads * d);
  };
  RankTable table;
  const double rate_max = rate_of(bounds.back());
  double next = 0;
  for (size_t i = 0; i < bounds.size(); ++i) {
    const double rate = rate_of(bounds[i]);
    const bool last = i + 1 == bounds.size();
    if (bounds.size() > kRankStepsMax && !last && rate < next) continue;
    table.rates.push_back(float(rate));
    for (const auto& head : shares) table.ranks.push_back(RankOf(head, bounds[i]));
    next = rate + rate_max / (kRankStepsMax - 2);
  }
  return table;
}

}  // namespace kvmanager::calibrate
