// Multiply-adds per second of rotations, one thread.
//
//   bazel run --config=opt //codecs/zack:rotation_bench
#include <random>
#include <vector>

#include "benchmark/benchmark.h"
#include "codecs/zack/rotation.h"
#include "kvmanager/base/half.h"

namespace kvmanager::zack {
namespace {

constexpr int kDim = 128;

void Count(benchmark::State& state, int rows, int n) {
  state.counters["multiply_adds_per_second"] =
      benchmark::Counter(double(rows) * kDim * n, benchmark::Counter::kIsIterationInvariantRate);
}

void Raw(benchmark::State& state) {
  const int tokens = int(state.range(0)), n = int(state.range(1));
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<uint16_t> x(size_t(tokens) * kDim);
  std::vector<float> factor(size_t(kDim) * n), out(size_t(tokens) * n);
  for (uint16_t& h : x) h = FloatToHalf(normal(random));
  for (float& f : factor) f = normal(random);
  for (auto _ : state) {
    RotateRaw(reinterpret_cast<const uint8_t*>(x.data()), DType::kFloat16, tokens, kDim, factor.data(), n, out.data());
    benchmark::ClobberMemory();
  }
  Count(state, tokens, n);
}

void Rows(benchmark::State& state) {
  const int rows = int(state.range(0)), n = int(state.range(1));
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(size_t(rows) * kDim), factor(size_t(kDim) * n), out(size_t(rows) * n);
  for (float& f : x) f = normal(random);
  for (float& f : factor) f = normal(random);
  for (auto _ : state) {
    RotateRows(x.data(), kDim, rows, kDim, factor.data(), n, out.data(), n);
    benchmark::ClobberMemory();
  }
  Count(state, rows, n);
}

BENCHMARK(Raw)->Args({64, 128})->Args({64, 64})->Args({64, 48});
BENCHMARK(Rows)->Args({1, 64})->Args({4, 64})->Args({4, 128});

}  // namespace
}  // namespace kvmanager::zack

BENCHMARK_MAIN();
