#include "codecs/zack/schedule.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>

#include "kvmanager/base/status.h"

namespace kvmanager::zack {

double MakespanByHeads(absl::Span<const double> costs, int workers) {
  KV_CHECK(workers >= 1);
  double most = 0;
  for (size_t worker = 0; worker < size_t(workers); ++worker) {
    const size_t begin = costs.size() * worker / workers, end = costs.size() * (worker + 1) / workers;
    most = std::max(most, std::accumulate(costs.begin() + begin, costs.begin() + end, 0.0));
  }
  return most;
}

double MakespanSortAndAssign(absl::Span<const double> costs, int workers) {
  KV_CHECK(workers >= 1);
  std::vector<double> sorted(costs.begin(), costs.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  std::priority_queue<double, std::vector<double>, std::greater<>> assigned;
  for (int worker = 0; worker < workers; ++worker) assigned.push(0);
  double most = 0;
  for (double cost : sorted) {
    const double total = assigned.top() + cost;
    assigned.pop();
    assigned.push(total);
    most = std::max(most, total);
  }
  return most;
}

double MakespanByBytes(absl::Span<const double> costs, int workers, int parts, double merge_cost) {
  KV_CHECK(parts >= 1);
  std::vector<double> pieces;
  pieces.reserve(costs.size() * parts);
  for (double cost : costs) {
    for (int part = 0; part < parts; ++part) pieces.push_back(cost / parts + (part == 0 ? 0 : merge_cost));
  }
  return MakespanSortAndAssign(pieces, workers);
}

}  // namespace kvmanager::zack
