// k-means' search for the nearest centroid, one thread, of each instruction set that this processor runs: multiplies
// and adds per second, beside those of registers alone (`limit`), which are this core's bound without fused ones.
//
//   bazel run --config=opt //codecs/calibrate:kmeans_bench
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "codecs/calibrate/kmeans_kernels.h"

namespace kvmanager::calibrate {
namespace {

constexpr size_t kRows = 16384;  // of 8 dimensions 512 KiB
constexpr int kCentroids = 256;

void CountOperations(benchmark::State& state, double each_time) {
  state.counters["operations_per_second"] =
      benchmark::Counter(each_time, benchmark::Counter::kIsIterationInvariantRate, benchmark::Counter::kIs1000);
}

void Assign(benchmark::State& state, Isa isa) {
  const int dims = int(state.range(0));
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(kRows * dims), centroids(size_t{kCentroids} * dims), half_norms(kCentroids), score(kRows);
  std::vector<int32_t> nearest(kRows);
  for (float& f : x) f = normal(random);
  for (float& f : centroids) f = normal(random);
  for (int i = 0; i < kCentroids * dims; ++i) half_norms[i / dims] += centroids[i] * centroids[i] / 2;
  for (auto _ : state) {
    KernelsOf(isa).assign(x.data(), kRows, dims, centroids.data(), half_norms.data(), kCentroids, nearest.data(),
                          score.data());
    benchmark::ClobberMemory();
  }
  CountOperations(state, double(kRows) * kCentroids * dims * 2);
}

// Chains of a multiply and an add, as many as registers hold beside the two operands, hide both latencies.
template <int kLanes>
[[gnu::always_inline]] inline void MultiplyAndAdd(benchmark::State& state) {
  typedef float F __attribute__((vector_size(4 * kLanes)));
  constexpr int kChains = 13, kTimes = 4096;
  const volatile float half = 0.5f;
  const F factor = F{} + half, one = F{} + 1.0f;
  F chains[kChains] = {};
  for (auto _ : state) {
    for (int i = 0; i < kTimes; ++i) {
      for (F& chain : chains) chain = chain * factor + one;
    }
  }
  float values[kChains * kLanes];
  std::memcpy(values, chains, sizeof values);
  benchmark::DoNotOptimize(values);
  CountOperations(state, double(kChains) * kTimes * kLanes * 2);
}
void LimitPortable(benchmark::State& state) { MultiplyAndAdd<4>(state); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) void LimitAvx2(benchmark::State& state) { MultiplyAndAdd<8>(state); }
__attribute__((target("avx512f"))) void LimitAvx512(benchmark::State& state) { MultiplyAndAdd<16>(state); }
#endif

void (*LimitOf(Isa isa))(benchmark::State&) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return LimitAvx512;
  if (isa == Isa::kAvx2) return LimitAvx2;
#endif
  return LimitPortable;
}

}  // namespace
}  // namespace kvmanager::calibrate

int main(int argc, char** argv) {
  using namespace kvmanager;
  for (const Isa isa : SupportedIsas()) {
    const std::string name = IsaName(isa);
    benchmark::RegisterBenchmark((name + "/limit").c_str(), calibrate::LimitOf(isa));
    benchmark::RegisterBenchmark((name + "/assign").c_str(), calibrate::Assign, isa)->Arg(1)->Arg(2)->Arg(4)->Arg(8);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
