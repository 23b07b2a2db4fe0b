// Decode attention on a GPU: microseconds per layer over a grid of batches, with the bytes read, and the read ceiling
// and the multiprocessors' clock of the same run.
//
//   bazel run --config=opt //attention:attention_gpu_bench -- --json FILE
//
// Random data; the pages of a sequence are distinct and shuffled; lag and open pages are raw and part of the sequence;
// inputs rotate so that they do not fit the second-level cache; a CUDA graph is replayed, and medians are printed.
// bench/gpu/compare_torch.py runs the same shapes through torch in the same run.
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/device_plan.h"
#include "attention/gpu_bench_fill.h"
#include "codecs/hack/hack_attention_cuda.h"
#include "codecs/raw/raw_attention_cuda.h"

namespace kvmanager {
namespace {

constexpr int kPageTokens = 64, kLagPages = 2, kOpenTokens = 33;
constexpr size_t kRotateBytes = size_t{320} << 20;  // several times the second-level cache
constexpr int kCallsPerGraph = 8, kRepetitions = 15;

#define CHECK_CUDA(call)                                                                        \
  do {                                                                                          \
    const cudaError_t error_ = cudaError_t(call);                                               \
    if (error_ != cudaSuccess) {                                                                \
      std::fprintf(stderr, "attention_gpu_bench: %s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                             \
    }                                                                                           \
  } while (0)

struct Shape {
  int batch;  // sequences of `context` tokens; 0: one of 128 Ki and 31 of 4 Ki
  int context;
  int query_heads, kv_heads;
};

struct CodecUnderTest {
  const char* name;
  int k_bits, v_bits;  // 0: raw
};

template <typename T>
std::unique_ptr<T, decltype(&cudaFree)> Allocate(size_t count) {
  void* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<size_t>(count * sizeof(T), 256)));
  return {static_cast<T*>(p), &cudaFree};
}
template <typename T>
std::unique_ptr<T, decltype(&cudaFree)> Upload(const std::vector<T>& from) {
  auto to = Allocate<T>(from.size());
  CHECK_CUDA(cudaMemcpy(to.get(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  return to;
}

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

/// Microseconds of one call, of which a graph holds several.
template <typename Call>
double Time(Call call) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaStreamCreate(&stream));
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kCallsPerGraph; ++i) CHECK_CUDA(call(i, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&ready, graph, 0));
  std::vector<double> us;
  for (int r = -3; r < kRepetitions; ++r) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(ready, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (r >= 0) us.push_back(ms * 1e3 / kCallsPerGraph);
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return Median(us);
}

class Bench {
 public:
  explicit Bench(size_t pool_bytes) : pool_bytes_(pool_bytes), pool_(Allocate<uint8_t>(pool_bytes)) {
    CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, 0));
    int khz = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
    clock_mhz_ = khz / 1e3;
  }

  double ReadCeiling() {
    const size_t bytes = std::min<size_t>(pool_bytes_, size_t{4} << 30);
    CHECK_CUDA(FillRandomBits(pool_.get(), bytes, 1));
    return bytes / Time([&](int, cudaStream_t stream) { return ReadAll(pool_.get(), bytes, stream); }) * 1e-6;
  }
  double clock_mhz() const { return clock_mhz_; }

  /// Empty: it does not fit.
  nlohmann::json Run(const CodecUnderTest& codec, const Shape& shape, double ceiling) {
    PageLayout layout;
    layout.kv_heads = uint16_t(shape.kv_heads);
    layout.head_dim = 128;
    layout.page_tokens = kPageTokens;
    const AttendKernels* kernels = RawAttentionKernels(128);
    std::unique_ptr<hack::HackFormat> format;
    if (codec.k_bits != 0) {
      hack::HackParameters parameters;
      parameters.k_bits = codec.k_bits, parameters.v_bits = codec.v_bits;
      format = std::make_unique<hack::HackFormat>(hack::MakeHackFormat(layout, parameters));
      kernels = HackAttentionKernels(*format);
    }
    if (kernels == nullptr) return {};
    // Pages: [all sets][sequences][pages]; raw ones behind the encoded ones.
    std::vector<int> contexts(shape.batch, shape.context);
    if (shape.batch == 0) contexts.assign(32, 4096), contexts[0] = 131072;
    const size_t raw_bytes = layout.raw_bytes(), encoded_bytes = format ? format->page_bytes : raw_bytes;
    size_t encoded = 0, raw = 0;
    for (const int context : contexts) {
      const size_t pages = (context + kPageTokens - 1) / kPageTokens;
      const size_t raw_pages = format ? std::min<size_t>(kLagPages + 1, pages) : pages;
      encoded += pages - raw_pages, raw += raw_pages;
    }
    const size_t set_bytes = encoded * encoded_bytes + raw * raw_bytes;
    const int sets = int(std::clamp<size_t>((kRotateBytes + set_bytes - 1) / set_bytes, 1, kCallsPerGraph));
    if (set_bytes * sets > pool_bytes_) return {};
    const size_t raw_at = encoded * sets * encoded_bytes;
    CHECK_CUDA(FillRandomBits(pool_.get(), raw_at, 2));
    CHECK_CUDA(FillRandomHalves(pool_.get() + raw_at, raw * sets * raw_bytes / 2, 3));
    if (format) {
      // Any code and any 8-bit step or minimum is valid; the largest of them must be numbers.
      const size_t record = format->heads.size() > 1 ? format->heads[1].offset : encoded_bytes;
      for (int side = 0; side < 2; ++side) {
        CHECK_CUDA(FillPairs(pool_.get(), encoded * sets * shape.kv_heads, record, format->heads[0].side[side].tops,
                             0.5f, 1.f));
      }
    }
    std::mt19937_64 random(4);
    const auto shuffled = [&](size_t count, size_t first, size_t bytes) {
      std::vector<uint32_t> units(count);
      for (size_t i = 0; i < count; ++i) units[i] = uint32_t((first + i * bytes) / device::kSlotUnitBytes);
      std::shuffle(units.begin(), units.end(), random);
      return units;
    };
    const std::vector<uint32_t> encoded_units = shuffled(encoded * sets, 0, encoded_bytes);
    const std::vector<uint32_t> raw_units = shuffled(raw * sets, raw_at, raw_bytes);

    DevicePlanner::Options o;
    o.layout = layout;
    o.query_heads = shape.query_heads;
    o.lag_pages = kLagPages;
    o.identity = format == nullptr;
    o.blocks = multiprocessors_ * kernels->grid.blocks_per_sm;
    o.warps = kernels->grid.warps;
    o.encoded_cost = kernels->encoded_cost;
    DevicePlanner planner(o);
    std::vector<device::AttendItem> items(1 << 17);
    std::vector<uint32_t> slots((encoded + raw) * sets);
    size_t encoded_next = 0, raw_next = 0;
    DevicePlanSize planned;
    for (int set = 0; set < sets; ++set) {
      // Page j's slot stands at place j of its sequence's part of the table, in either form.
      std::vector<DeviceSequence> sequences;
      std::vector<PageRun> raw_runs;
      raw_runs.reserve(contexts.size());
      uint32_t place = 0;
      uint32_t* const table = slots.data() + set * (encoded + raw);
      for (const int context : contexts) {
        const uint32_t count = uint32_t(context + kPageTokens - 1) / kPageTokens;
        const uint32_t raw_pages = format ? std::min<uint32_t>(kLagPages + 1, count) : count;
        DeviceSequence sequence;
        sequence.raw_table = sequence.encoded_table = place;
        raw_runs.push_back({count - raw_pages, count});
        sequence.not_encoded = {&raw_runs.back(), 1};
        // The newest page is open.
        sequence.first_position = uint64_t(context - kPageTokens + kOpenTokens - 1);
        sequence.tokens = 1;
        sequences.push_back(sequence);
        for (uint32_t j = 0; j < count; ++j) {
          table[place++] = j + raw_pages < count ? encoded_units[encoded_next++] : raw_units[raw_next++];
        }
      }
      const auto made = planner.Plan(sequences, absl::MakeSpan(items));
      if (!made.ok()) {
        std::fprintf(stderr, "attention_gpu_bench: %s\n", made.status().ToString().c_str());
        std::exit(1);
      }
      planned = *made;
    }
    items.resize(planned.items);
    const auto d_items = Upload(items);
    const auto d_slots = Upload(slots);
    const size_t rows = contexts.size() * shape.query_heads;
    const auto q = Allocate<uint16_t>(rows * 128), out = Allocate<uint16_t>(rows * 128);
    CHECK_CUDA(FillRandomHalves(q.get(), rows * 128, 5));
    const auto partial = Allocate<float>(size_t{planned.parts} * device::kTileRows * 128);
    const auto partial_max = Allocate<float>(size_t{planned.parts} * device::kTileRows * 2);
    const auto arrived = Allocate<uint32_t>(size_t{planned.parts} * device::kTileRows);
    CHECK_CUDA(cudaMemset(arrived.get(), 0, size_t{planned.parts} * device::kTileRows * 4));
    device::AttendParams p;
    p.pool = pool_.get();
    p.items = d_items.get();
    p.q = q.get();
    p.out = out.get();
    p.partial = partial.get();
    p.partial_max = partial_max.get();
    p.arrived = arrived.get();
    p.query_heads = shape.query_heads;
    p.kv_heads = shape.kv_heads;
    p.page_tokens = kPageTokens;
    p.scale_log2 = float(M_LOG2E / std::sqrt(128.0));
    CHECK_CUDA(kernels->prepare());
    const double us = Time([&](int call, cudaStream_t stream) {
      device::AttendParams mine = p;
      mine.slots = d_slots.get() + size_t(call % sets) * (encoded + raw);
      return kernels->launch(mine, planned.rows_max, o.blocks, stream);
    });
    const double bytes = double(encoded) * encoded_bytes + double(raw - contexts.size()) * raw_bytes +
                         double(contexts.size()) * raw_bytes * kOpenTokens / kPageTokens;
    return {{"codec", codec.name},
            {"batch", shape.batch},
            {"context", shape.context},
            {"query_heads", shape.query_heads},
            {"kv_heads", shape.kv_heads},
            {"us", us},
            {"bytes", bytes},
            {"tb_per_s", bytes / us * 1e-6},
            {"of_read_ceiling", bytes / us * 1e-6 / ceiling}};
  }

 private:
  using AttendKernels = device::AttendKernels;
  const size_t pool_bytes_;
  std::unique_ptr<uint8_t, decltype(&cudaFree)> pool_;
  int multiprocessors_ = 0;
  double clock_mhz_ = 0;
};

int Main(int argc, char** argv) {
  CLI::App app(
      "Decode attention of one layer on a GPU, over raw pages and HACK pages: time, bytes, share of the read ceiling.");
  std::string json, grid = "bars";
  double pool_gib = 24;
  app.add_option("--json", json, "write the results to this file");
  app.add_option("--grid", grid, "bars (the shapes that the project promises numbers for) or full")
      ->check(CLI::IsMember({"bars", "full"}))
      ->capture_default_str();
  app.add_option("--pool-gib", pool_gib, "device memory to use")->check(CLI::Range(1.0, 200.0))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    std::fprintf(stderr, "attention_gpu_bench: no GPU here: %s\n", cudaGetErrorString(error));
    return 1;
  }
  std::vector<Shape> shapes = {{16, 32768, 32, 8}, {1, 131072, 32, 8}, {64, 8192, 32, 8}, {1, 4096, 32, 8}};
  if (grid == "full") {
    shapes.clear();
    for (const auto& [q, kv] : {std::pair{32, 32}, {32, 8}, {64, 8}, {32, 4}, {8, 1}}) {
      for (const int batch : {1, 8, 32, 128}) {
        for (const int context : {4096, 16384, 32768, 131072}) shapes.push_back({batch, context, q, kv});
      }
      shapes.push_back({0, 0, q, kv});
    }
  }
  const CodecUnderTest codecs[] = {{"raw", 0, 0},
                                   {"hack:k_bits=2,v_bits=2", 2, 2},
                                   {"hack:k_bits=3,v_bits=2", 3, 2},
                                   {"hack:k_bits=4,v_bits=3", 4, 3}};
  Bench bench(size_t(pool_gib * (1 << 30)));
  const double ceiling = bench.ReadCeiling();
  std::printf("read ceiling %.3f TB/s, SM clock at most %.0f MHz\n", ceiling, bench.clock_mhz());
  std::printf("%-24s %5s %7s %6s %10s %8s %6s\n", "codec", "batch", "context", "heads", "us", "TB/s", "share");
  nlohmann::json results = {{"read_ceiling_tb_per_s", ceiling}, {"runs", nlohmann::json::array()}};
  for (const Shape& shape : shapes) {
    for (const CodecUnderTest& codec : codecs) {
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
