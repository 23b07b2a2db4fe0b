// Decode attention on a GPU: microseconds per layer over a grid of batches, with the bytes read, and the read ceiling
// and the multiprocessors' clock of the same run; with --check, its results against double precision instead.
//
//   bazel run --config=opt //attention:attention_gpu_bench -- --json FILE
//   bazel run --config=opt //attention:attention_gpu_bench -- --grid full --check
//
// Random data; the pages of a sequence are distinct and shuffled; lag and open pages are raw and part of the sequence;
// inputs rotate so that they do not fit the second-level cache; a CUDA graph is replayed, and medians are printed.
// bench/gpu/compare_torch.py runs the same shapes through torch in the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "attention/gpu_bench_batch.h"
#include "attention/gpu_bench_check.h"
#include "attention/gpu_bench_fill.h"
#include "kvmanager/memory/gpu_benchmark.h"

namespace kvmanager {
namespace {

constexpr int kWarmUps = 3, kRepetitionsMin = 7, kRepetitionsMax = 15, kCallsMax = BenchBatch::kSetsMax;
constexpr double kMeasuredUs = 60e3;  // what the replays of one batch take together, where fewer are enough
constexpr double kLeftFree = 0.06;    // of the device's memory, for tables and partial results

class Bench {
 public:
  explicit Bench(size_t pool_bytes) : pool_bytes_(pool_bytes), memory_(Allocate<uint8_t>(pool_bytes)) {
    CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, 0));
    int khz = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    clock_mhz_ = khz / 1e3;
  }

  double clock_mhz() const { return clock_mhz_; }
  int multiprocessors() const { return multiprocessors_; }
  absl::Span<uint8_t> pool() const { return {memory_.get(), pool_bytes_}; }

  double ReadCeiling() {
    const size_t bytes = std::min<size_t>(pool_bytes_, size_t{4} << 30);
    CHECK_CUDA(FillRandomBits(memory_.get(), bytes, 1));
    return bytes /
           GraphUs(kCallsMax, kWarmUps, kRepetitionsMax,
                   [&](int, cudaStream_t stream) { return ReadAll(memory_.get(), bytes, stream); }) *
           1e-6;
  }

  /// Empty: there is no kernel, or it does not fit.
  nlohmann::json Run(const BenchCodec& codec, const BenchShape& shape, double ceiling) const {
    const auto batch = BenchBatch::Make(codec, shape, BenchBatch::Contents::kAnyBits, pool(), multiprocessors_);
    if (batch == nullptr) return {};
    const double likely_us = batch->bytes() / ceiling * 1e-6;
    const int calls =
        batch->sets() > 1 ? kCallsMax : int(std::clamp(kMeasuredUs / 10 / likely_us, 1., double{kCallsMax}));
    const int repetitions =
        int(std::clamp(kMeasuredUs / (likely_us * calls), double{kRepetitionsMin}, double{kRepetitionsMax}));
    const double us = GraphUs(calls, kWarmUps, repetitions,
                              [&](int call, cudaStream_t stream) { return batch->Launch(call, stream); });
    return {{"codec", codec.name},
            {"batch", shape.batch},
            {"context", shape.context},
            {"query_heads", shape.query_heads},
            {"kv_heads", shape.kv_heads},
            {"us", us},
            {"bytes", batch->bytes()},
            {"tb_per_s", batch->bytes() / us * 1e-6},
            {"of_read_ceiling", batch->bytes() / us * 1e-6 / ceiling}};
  }

 private:
  const size_t pool_bytes_;
  DeviceArray<uint8_t> memory_;
  int multiprocessors_ = 0;
  double clock_mhz_ = 0;
};

std::vector<BenchShape> Shapes(const std::string& grid) {
  if (grid == "bars") return {{16, 32768, 32, 8}, {1, 131072, 32, 8}, {64, 8192, 32, 8}, {1, 4096, 32, 8}};
  if (grid == "small") {
    return {{1, 4096, 32, 8}, {1, 16384, 32, 8}, {1, 32768, 32, 8}, {8, 4096, 32, 8}, {1, 4096, 32, 4},
            {1, 4096, 8, 1},  {1, 16384, 8, 1},  {1, 32768, 8, 1},  {1, 131072, 8, 1}};
  }
  std::vector<BenchShape> shapes;
  for (const auto& [q, kv] : {std::pair{32, 32}, {32, 8}, {64, 8}, {32, 4}, {8, 1}}) {
    for (const int batch : {1, 8, 32, 128}) {
      for (const int context : {4096, 16384, 32768, 131072}) shapes.push_back({batch, context, q, kv});
    }
    shapes.push_back({0, 0, q, kv});
  }
  return shapes;
}

int Main(int argc, char** argv) {
  CLI::App app(
      "Decode attention of one layer on a GPU, over pages of every codec: time, bytes, share of the read "
      "ceiling.");
  std::string json, grid = "bars";
  std::vector<std::string> wanted;
  double pool_gib = 0;
  bool check = false;
  Spoil spoil = Spoil::kNothing;
  app.add_option("--json", json, "write the results to this file");
  app.add_option("--grid", grid, "bars (the shapes that the project promises numbers for), small (batches) or full")
      ->check(CLI::IsMember({"bars", "small", "full"}))
      ->capture_default_str();
  app.add_option("--codec", wanted, "these alone, by the names that are printed");
  app.add_option("--pool-gib", pool_gib, "device memory to use; 0: nearly all of it")
      ->check(CLI::Range(0.0, 200.0))
      ->capture_default_str();
  app.add_flag("--check", check, "compare results with double precision; measure nothing");
  app.add_option("--spoil", spoil, "with --check: make the other side wrong, to see that it is noticed")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, Spoil>{{"nothing", Spoil::kNothing}, {"lag", Spoil::kLag}, {"codes", Spoil::kCodes}}));
  CLI11_PARSE(app, argc, argv);
  NeedGpu();
  size_t free_bytes = 0, total_bytes = 0;
  CHECK_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  Bench bench(pool_gib > 0 ? size_t(pool_gib * (1 << 30)) : size_t(double(free_bytes) * (1 - kLeftFree)) / 256 * 256);
  const BenchCodec all[] = {{"raw", 0, 0},
                            {"hack:k_bits=2,v_bits=2", 2, 2},
                            {"hack:k_bits=3,v_bits=2", 3, 2},
                            {"hack:k_bits=4,v_bits=3", 4, 3},
                            {"million:m=64,bits=8", 0, 0, true},
                            {"zack+hack:bytes=56", 0, 0, false, 56},
                            {"zack+hack:bytes=48", 0, 0, false, 48},
                            {"zack:rate=0.5", 0, 0, false, 0, true}};
  // Those that are measured where they are named.
  const BenchCodec more[] = {{"million:m=64,bits=6", 0, 0, false, 0, false, true},
                             {"million:m=32,bits=8", 0, 0, false, 0, false, true},
                             {"million:k_m=64,k_bits=8,v_m=32,v_bits=8", 0, 0, false, 0, false, true},
                             {"million:m=32,bits=12", 0, 0, false, 0, false, true},
                             {"zack+million:m=64,bits=8", 0, 0, false, 0, false, true},
                             {"zack+million:m=32,bits=8", 0, 0, false, 0, false, true}};
  std::vector<BenchCodec> codecs;
  for (const BenchCodec& codec : all) {
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), codec.name) != wanted.end()) codecs.push_back(codec);
  }
  for (const BenchCodec& codec : more) {
    if (std::find(wanted.begin(), wanted.end(), codec.name) != wanted.end()) codecs.push_back(codec);
  }
  const std::vector<BenchShape> shapes = Shapes(grid);
  if (check) return CheckAttention(shapes, codecs, bench.pool(), bench.multiprocessors(), spoil) == 0 ? 0 : 1;

  const double ceiling = bench.ReadCeiling();
  std::printf("read ceiling %.3f TB/s, SM clock at most %.0f MHz\n", ceiling, bench.clock_mhz());
  std::printf("%-24s %5s %7s %6s %10s %8s %6s\n", "codec", "batch", "context", "heads", "us", "TB/s", "share");
  nlohmann::json results = {{"read_ceiling_tb_per_s", ceiling}, {"runs", nlohmann::json::array()}};
  for (const BenchShape& shape : shapes) {
    for (const BenchCodec& codec : codecs) {
      const nlohmann::json run = bench.Run(codec, shape, ceiling);
      if (run.empty()) continue;
      results["runs"].push_back(run);
      std::printf("%-24s %5d %7d %3d/%-3d %9.2f %8.3f %6.2f\n", codec.name, shape.batch, shape.context,
                  shape.query_heads, shape.kv_heads, run["us"].get<double>(), run["tb_per_s"].get<double>(),
                  run["of_read_ceiling"].get<double>());
      std::fflush(stdout);
    }
  }
  if (!json.empty()) std::ofstream(json) << results.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) { return kvmanager::Main(argc, argv); }
