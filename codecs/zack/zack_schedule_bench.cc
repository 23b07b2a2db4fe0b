// How evenly heads of unequal ranks are shared out: makespan over the ideal (all work divided by the workers) of three
// schedules, and the time that the paper's takes to decide.
//
//   bazel run --config=opt //codecs/zack:zack_schedule_bench
//
// Ranks are skewed: a few heads keep most dimensions, most keep few (a geometric fall over the heads, shuffled). Costs
// are bytes of K' and V' of 32K tokens. by_bytes cuts lengths as the plan does (4 pieces per worker, 1024 tokens or
// more each) and pays a merge of 4 rows of 128 per piece.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "codecs/zack/schedule.h"

namespace kvmanager::zack {
namespace {

constexpr int kTokens = 32768, kHeadDim = 128, kPiecesPerWorker = 4, kPieceTokensMin = 1024, kRows = 4;

std::vector<double> SkewedCosts(int heads) {
  std::mt19937 random(heads);
  std::vector<double> costs;
  for (int h = 0; h < heads; ++h) {
    double ranks = 0;
    for (int side = 0; side < 2; ++side) {
      const double share = std::pow(0.05, double(h) / std::max(heads - 1, 1)) * (side == 0 ? 0.8 : 1.0);
      ranks += std::clamp(std::ceil(share * kHeadDim / 16) * 16, 16.0, double(kHeadDim));
    }
    costs.push_back(ranks * kTokens * 2);
  }
  std::shuffle(costs.begin(), costs.end(), random);
  return costs;
}

void Schedules(benchmark::State& state) {
  const int heads = int(state.range(0)), workers = int(state.range(1));
  const std::vector<double> costs = SkewedCosts(heads);
  double total = 0;
  for (double cost : costs) total += cost;
  double makespan = 0;
  for (auto _ : state) {
    makespan = MakespanSortAndAssign(costs, workers);
    benchmark::DoNotOptimize(makespan);
  }
  const double ideal = total / workers;
  const int parts = std::min(kTokens / kPieceTokensMin, kPiecesPerWorker * workers);
  // A merge reads and writes a state of kRows rows.
  const double merge = 2.0 * kRows * (kHeadDim + 2) * sizeof(float);
  state.counters["by_heads"] = MakespanByHeads(costs, workers) / ideal;
  state.counters["sort_and_assign"] = makespan / ideal;
  state.counters["by_bytes"] = MakespanByBytes(costs, workers, parts, merge) / ideal;
}

BENCHMARK(Schedules)->ArgsProduct({{8, 32, 256}, {2, 4, 8, 16, 132}});

}  // namespace
}  // namespace kvmanager::zack

BENCHMARK_MAIN();
