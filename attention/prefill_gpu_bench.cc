// Attention by many query tokens on a GPU, one layer: microseconds over raw, HACK and ZACK pages.
//
//   bazel run --config=opt //attention:prefill_gpu_bench -- --json FILE
//
// The query tokens are the newest of their context, on raw pages, as are the lag's pages before them; what lies before
// these is encoded. Random data; the pages of a sequence are distinct and shuffled; launches take turns between sets of
// pages; a CUDA graph is replayed, and medians are printed. bench/gpu/compare_prefill.py runs the same shapes through
// torch in the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "attention/device_plan_testing.h"
#include "attention/gpu_bench_codec.h"
#include "attention/gpu_bench_fill.h"
#include "attention/prefill_plan.h"
#include "codecs/device/device_codec.h"
#include "codecs/hack/hack.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_format.h"
#include "codecs/raw/raw.h"
#include "codecs/registry.h"
#include "codecs/zack/zack_codec.h"
#include "codecs/zack/zack_testing.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "kvmanager/memory/gpu_benchmark.h"

namespace kvmanager {
namespace {

constexpr int kPageTokens = device::kPrefillPageTokens, kLagPages = 2;
constexpr int kWarmUps = 2, kRepetitions = 9, kSetsMax = 8;
constexpr size_t kRotateBytes = size_t{320} << 20;  // several times the second-level cache
constexpr double kMeasuredUs = 20e3;                // what one replay takes at least, where that is few calls

struct Shape {
  int batch, tokens, history;  // query tokens behind `history` tokens
  int query_heads, kv_heads, head_dim;
};

struct Format {
  const char* name;
  int k_bits, v_bits;  // of HACK; 0: raw, or
  bool zack = false;   // ranks that differ from head to head and average half of all dimensions; or
  bool made = false;   // the codec whose spec `name` is, by an artifact made up

  bool raw() const { return k_bits == 0 && !zack && !made; }
};

/// Multiplications and additions, two each, of what is not masked.
double Flops(const Shape& s) {
  const double pairs = double(s.tokens) * s.history + double(s.tokens) * (s.tokens + 1) / 2;
  return 4 * pairs * s.batch * s.query_heads * s.head_dim;
}

nlohmann::json Run(const Format& format, const Shape& shape, int blocks) {
  PageLayout layout;
  layout.kv_heads = uint16_t(shape.kv_heads), layout.head_dim = uint16_t(shape.head_dim);
  std::unique_ptr<Codec> codec;
  hack::HackFormat hack_format;
  if (format.zack) {
    if (shape.head_dim != 128 || shape.kv_heads % 8 != 0) return {};
    constexpr int kRanks[] = {112, 112, 32, 96, 96, 80, 48, 64, 80, 64, 64, 48, 48, 32, 32, 16};
    std::vector<int32_t> ranks;
    for (int i = 0; i < 2 * shape.kv_heads; ++i) ranks.push_back(kRanks[i % 16]);
    layout.page_tokens = kPageTokens;
    codec = std::make_unique<zack::ZackCodec>(
        zack::MakeFormat(zack::MakeContext(layout, 1, shape.query_heads), "balanced", false, ranks), nullptr);
  } else if (format.made) {
    layout.page_tokens = kPageTokens;
    codec = MakeBenchCodec(format.name, layout, shape.query_heads);
    if (codec->info().name == "zack+hack") {
      const auto& inner = static_cast<const zack::RotatedCodec&>(*codec).inner(0);
      hack_format = static_cast<const hack::HackCodec&>(inner).format();
    }
  } else if (format.k_bits == 0) {
    CodecRegistry registry;
    RegisterRaw(registry);
    codec = *registry.Create("raw", layout);
  } else {
    hack::HackParameters parameters;
    parameters.k_bits = format.k_bits, parameters.v_bits = format.v_bits;
    hack_format = hack::MakeHackFormat(layout, parameters);
    codec = MakeHackCodec(hack_format);
  }
  const std::unique_ptr<DeviceCodec> device_codec = codec->NewDeviceCodec();
  const device::Prefill prefill = device_codec->prefill(0);
  CHECK_CUDA(prefill.kernels->prepare());

  const bool raw_alone = format.raw();
  const uint64_t context = uint64_t(shape.history) + shape.tokens;
  const size_t pages = (context + kPageTokens - 1) / kPageTokens, history = size_t(shape.history) / kPageTokens;
  const size_t encoded_of = raw_alone ? 0 : history,
               raw_first = raw_alone ? 0 : history - std::min<size_t>(history, kLagPages);
  const size_t raw_of = pages - raw_first, encoded_bytes = codec->info().encoded_bytes;
  const size_t set_bytes = shape.batch * (raw_of * layout.raw_bytes() + encoded_of * (raw_alone ? 0 : encoded_bytes));
  const int sets = int(std::clamp<size_t>((kRotateBytes + set_bytes - 1) / set_bytes, 1, kSetsMax));
  const size_t encoded_count = sets * shape.batch * encoded_of, raw_count = sets * shape.batch * raw_of;
  const size_t raw_at = raw_alone ? 0 : encoded_count * encoded_bytes;
  const DeviceArray<uint8_t> pool = Allocate<uint8_t>(raw_at + raw_count * layout.raw_bytes());
  if (format.zack) {
    CHECK_CUDA(FillRandomElements(pool.get(), raw_at / 2, 1, 1, false));
  } else if (encoded_count > 0) {
    CHECK_CUDA(FillRandomBits(pool.get(), raw_at / 8 * 8, 1));
    for (const hack::HeadLayout& head : hack_format.heads) {
      for (const hack::SideLayout& side : head.side) {
        CHECK_CUDA(FillPairs(pool.get(), encoded_count, hack_format.page_bytes, head.offset + side.tops, 0.5f, 1.f));
        if (side.norms == 0) continue;
        CHECK_CUDA(FillPairs(pool.get(), encoded_count, hack_format.page_bytes, head.offset + side.norm_top, 1.f, 0.f));
      }
    }
  }
  CHECK_CUDA(FillRandomElements(pool.get() + raw_at, raw_count * layout.raw_bytes() / 2, 2, 1, false));
  std::mt19937_64 random(3);
  const auto shuffled = [&](size_t count, size_t first, size_t bytes) {
    std::vector<uint32_t> units(count);
    for (size_t i = 0; i < count; ++i) units[i] = uint32_t((first + i * bytes) / device::kSlotUnitBytes);
    std::shuffle(units.begin(), units.end(), random);
    return units;
  };
  std::vector<uint32_t> encoded_units = shuffled(encoded_count, 0, encoded_bytes);
  std::vector<uint32_t> raw_units = shuffled(raw_count, raw_at, layout.raw_bytes());
  // Every set's tables have the same places.
  std::vector<uint32_t> slots;
  size_t set_slots = 0;
  std::vector<device::PrefillItem> items(1 << 15);
  std::vector<device::PrefillRun> runs(1 << 15);
  PrefillPlanSize size;
  PrefillPlanner::Options o;
  o.layout = layout, o.query_heads = shape.query_heads, o.lag_pages = kLagPages, o.identity = raw_alone;
  o.blocks = blocks;
  o.apart = prefill.kernels->maps;
  const device::HeadCosts costs = device_codec->head_costs(0);
  if (prefill.costs != nullptr) o.head_costs.assign(prefill.costs, prefill.costs + shape.kv_heads);
  double plan_us = 0;
  for (int set = 0; set < sets; ++set) {
    DeviceTables tables;
    for (int s = 0; s < shape.batch; ++s) {
      std::vector<DevicePage> of(pages);
      for (size_t j = 0; j < pages; ++j) {
        if (j >= raw_first) of[j].raw = raw_units.back(), raw_units.pop_back();
        if (j < encoded_of) of[j].encoded = encoded_units.back(), encoded_units.pop_back();
      }
      tables.Add(of, 0, uint64_t(shape.history), shape.tokens);
    }
    set_slots = tables.slots().size();
    slots.insert(slots.end(), tables.slots().begin(), tables.slots().end());
    if (set == 0) {
      PrefillPlanner planner(o);
      std::vector<double> us;
      for (int i = 0; i < 5; ++i) {
        timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        const auto planned = planner.Plan(tables.sequences(), absl::MakeSpan(items), absl::MakeSpan(runs));
        clock_gettime(CLOCK_MONOTONIC, &end);
        if (!planned.ok()) {
          std::fprintf(stderr, "prefill_gpu_bench: %s\n", planned.status().ToString().c_str());
          std::exit(1);
        }
        size = *planned;
        us.push_back(double(end.tv_sec - begin.tv_sec) * 1e6 + double(end.tv_nsec - begin.tv_nsec) * 1e-3);
      }
      plan_us = Median(us);
    }
  }
  items.resize(size.items);
  runs.resize(size.runs);
  const size_t rows = size_t(shape.batch) * shape.tokens * shape.query_heads;
  const size_t part_rows = size_t{size.parts} * device::kPrefillRows;
  const auto d_items = Upload(items);
  const auto d_runs = Upload(runs);
  const auto d_slots = Upload(slots);
  const auto q = Allocate<uint16_t>(rows * shape.head_dim), out = Allocate<uint16_t>(rows * shape.head_dim);
  const auto lse = Allocate<float>(rows), partial = Allocate<float>(part_rows * shape.head_dim),
             state = Allocate<float>(part_rows * 2);
  const auto arrived = Allocate<uint32_t>(2 * size.parts);
  CHECK_CUDA(cudaMemset(arrived.get(), 0, 8 * size.parts));
  CHECK_CUDA(FillRandomElements(q.get(), rows * shape.head_dim, 5, 1, false));
  device::PrefillParams p;
  p.pool = pool.get(), p.items = d_items.get(), p.runs = d_runs.get();
  p.q = q.get(), p.out = out.get(), p.lse = lse.get();
  p.partial = partial.get(), p.partial_state = state.get(), p.arrived = arrived.get();
  p.format = prefill.format;
  DeviceArray<float> mapped;
  if (o.apart) mapped = Allocate<float>(device::kMappedRows * rows * shape.head_dim);
  p.mapped = mapped.get(), p.tokens = uint32_t(shape.batch * shape.tokens), p.heads = costs.heads;
  p.query_heads = shape.query_heads, p.kv_heads = shape.kv_heads;
  p.scale_log2 = float(M_LOG2E / std::sqrt(double(shape.head_dim)));
  const int calls = int(std::clamp(kMeasuredUs / (Flops(shape) / 5e8), 1., 64.));
  const double us = GraphUs(calls, kWarmUps, kRepetitions, [&](int call, cudaStream_t stream) {
    device::PrefillParams of = p;
    of.slots = d_slots.get() + call % sets * set_slots;
    return prefill.kernels->launch(of, blocks, stream);
  });
  return {{"codec", format.name},
          {"batch", shape.batch},
          {"tokens", shape.tokens},
          {"history", shape.history},
          {"query_heads", shape.query_heads},
          {"kv_heads", shape.kv_heads},
          {"head_dim", shape.head_dim},
          {"us", us},
          {"tflops", Flops(shape) / us * 1e-6},
          {"parts", size.parts},
          {"plan_us", plan_us}};
}

int Main(int argc, char** argv) {
  CLI::App app("Attention by many query tokens of one layer on a GPU, over raw pages and HACK pages.");
  std::string json, codec;
  int shape_count = INT_MAX;
  app.add_option("--json", json, "write the results to this file");
  app.add_option("--codec", codec, "this one alone: raw, hack:k_bits=3,v_bits=2, ...");
  app.add_option("--shapes", shape_count, "the first of the shapes alone")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  NeedGpu();
  int blocks = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
  const Format formats[] = {{"raw", 0, 0},
                            {"hack:k_bits=3,v_bits=2", 3, 2},
                            {"hack:k_bits=2,v_bits=2", 2, 2},
                            {"hack:k_bits=4,v_bits=3", 4, 3},
                            {"zack:rate=0.5", 0, 0, true},
                            // Measured where they are named.
                            {"zack+hack:bytes=56", 0, 0, false, true},
                            {"million:m=64,bits=8", 0, 0, false, true},
                            {"zack+million:m=64,bits=8", 0, 0, false, true}};
  const Shape shapes[] = {{1, 2048, 32768, 32, 8, 128},  {4, 2048, 8192, 32, 8, 128},  {8, 512, 16384, 32, 8, 128},
                          {1, 8192, 0, 32, 8, 128},      {1, 512, 32768, 32, 8, 128},  {1, 64, 32768, 32, 8, 128},
                          {1, 2048, 32768, 32, 32, 128}, {1, 2048, 32768, 64, 8, 128}, {1, 2048, 32768, 32, 8, 64}};
  std::printf("%-24s %5s %6s %8s %7s %4s %10s %8s %6s %8s\n", "codec", "batch", "tokens", "history", "heads", "dim",
              "us", "TFLOP/s", "parts", "plan us");
  nlohmann::json results = {{"runs", nlohmann::json::array()}};
  for (const Shape& shape : shapes) {
    if (shape_count-- == 0) break;
    for (const Format& format : formats) {
      if (codec.empty() ? format.made : codec != format.name) continue;
      const nlohmann::json run = Run(format, shape, blocks);
      if (run.empty()) continue;
      results["runs"].push_back(run);
      std::printf("%-24s %5d %6d %8d %3d/%-3d %4d %10.1f %8.1f %6d %8.0f\n", format.name, shape.batch, shape.tokens,
                  shape.history, shape.query_heads, shape.kv_heads, shape.head_dim, run["us"].get<double>(),
                  run["tflops"].get<double>(), run["parts"].get<int>(), run["plan_us"].get<double>());
      std::fflush(stdout);
    }
  }
  if (!json.empty()) std::ofstream(json) << results.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) { return kvmanager::Main(argc, argv); }
