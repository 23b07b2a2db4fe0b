// Reloads of one layer's K and V over an emulated link: everything copied, everything recomputed, and the planner's
// split, over tokens s, batch b, hidden size h, query heads per KV head G and link speed, measured beside what was
// modelled.
//
//   bazel run --config=opt //bench/recompute:recompute_bench -- [--json] [--repeats 3] [--hidden 1024,2048] ...
//
// The link is a copy that is held to a rate (transport/recompute/link.h); its own copying costs this CPU time that a
// device's would not. Compute is OpenBLAS in fp32 on the threads given. Rates for the plan come from the profile, which
// measures both ways once per shape and link before anything is timed; every reload feeds it afterwards.
// Per row the three ways take turns `repeats` times, and the smallest time of each counts.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "examples/engine/blas_core.h"
#include "examples/engine/program.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/plan.h"
#include "transport/recompute/profile.h"
#include "transport/recompute/runtime.h"

namespace kvmanager::recompute {
namespace {

constexpr int kHeadDim = 128, kPageTokens = 64;
constexpr char kNotCovered[] =
    "Not covered: a GPU and a real link (the link is emulated by waiting, and copying into memory takes CPU time of "
    "the\n"
    "compute threads), attention that uses K and V, encoded pages unless --kv-ratio is given, several reloads at "
    "once,\n"
    "weights that are streamed.\n";

struct Arguments {
  std::vector<int64_t> tokens = {256, 1024}, batch = {1, 4}, hidden = {1024, 2048}, group = {1, 2, 8};
  std::vector<double> link_gbps = {0.25, 1, 4};
  int64_t rows_max = 1024;
  double kv_ratio = 1;
  int repeats = 3, threads = 0, chunk_rows = 256;
  bool json = false;
};

/// Memory for the largest row of the grid, and pointers into it.
struct Arena {
  std::vector<uint8_t> activations, stored, pages, weights;
  std::vector<const uint8_t*> activation_pointers, stored_pointers;
  std::vector<uint8_t*> page_pointers;
};

/// Finite values of about unit size.
void FillWithHalves(std::vector<uint8_t>& bytes, float scale) {
  std::mt19937 random(1);
  constexpr size_t kDistinct = 1 << 16;
  std::vector<uint16_t> some(kDistinct);
  for (uint16_t& half : some) half = FloatToHalf(scale * (float(random() % 2001) / 1000 - 1));
  for (size_t i = 0; i + 1 < bytes.size(); i += 2) std::memcpy(&bytes[i], &some[(i / 2 + i / 77777) % kDistinct], 2);
}

struct Row {
  int64_t tokens = 0, batch = 0, hidden = 0, group = 0;
  double link_gbps = 0;
};

struct Times {
  double copy_ms = 1e300, recompute_ms = 1e300, split_ms = 1e300;
  double modelled_copy_ms = 0, modelled_recompute_ms = 0, modelled_split_ms = 0;
  int64_t split_tokens = 0;
  MachineRates rates;
  double over_better() const { return split_ms / std::min(copy_ms, recompute_ms); }
};

class Bench {
 public:
  explicit Bench(const Arguments& arguments) : arguments_(arguments), pool_(std::max(1, arguments.threads - 1)) {}

  absl::StatusOr<Times> Measure(const Row& row) {
    ProjectionModel model{.layers = 1, .hidden = int(row.hidden), .rope = {kHeadDim, 5e5}};
    model.layout = {DType::kFloat16, uint16_t(row.hidden / kHeadDim / row.group), kHeadDim, kPageTokens};
    const size_t page_bytes = std::max<size_t>(1, size_t(model.layout.raw_bytes() * arguments_.kv_ratio));
    const int64_t sequence_pages = (row.tokens + kPageTokens - 1) / kPageTokens, pages = sequence_pages * row.batch;
    Arena arena;
    arena.activations.resize(pages * model.activation_page_bytes());
    arena.stored.resize(pages * page_bytes);
    arena.pages.resize(pages * std::max(page_bytes, model.layout.raw_bytes()));
    arena.weights.resize(size_t(row.hidden) * model.width() * 2);
    FillWithHalves(arena.activations, 1);
    FillWithHalves(arena.weights, 1 / float(row.hidden));
    for (int64_t p = 0; p < pages; ++p) {
      arena.activation_pointers.push_back(&arena.activations[p * model.activation_page_bytes()]);
      arena.stored_pointers.push_back(&arena.stored[p * page_bytes]);
      arena.page_pointers.push_back(&arena.pages[p * std::max(page_bytes, model.layout.raw_bytes())]);
    }
    PacedLink link(row.link_gbps * 1e9 / 8, &clock_);
    KV_ASSIGN_OR_RETURN(const std::unique_ptr<ReloadExecutor> executor,
                        MakeCpuExecutor(model, {.chunk_rows = arguments_.chunk_rows}, &link,
                                        arguments_.threads > 1 ? &pool_ : nullptr, &clock_));
    KV_RETURN_IF_ERROR(executor->RegisterWeights(0, {DType::kFloat16, arena.weights, arena.weights}));
    Profile profile(&clock_);
    ReloadRuntime runtime(executor.get(), &clock_, &profile);

    std::vector<ReloadSequence> sequences(row.batch);
    const auto request = [&](int64_t split, bool everything) {
      const size_t recomputed = (split + kPageTokens - 1) / kPageTokens;
      for (int64_t i = 0; i < row.batch; ++i) {
        const auto pages_of = [&](const auto& pointers) {
          return absl::MakeConstSpan(pointers).subspan(i * sequence_pages, sequence_pages);
        };
        sequences[i] = {row.tokens,
                        split,
                        0,
                        pages_of(arena.activation_pointers),
                        pages_of(arena.page_pointers),
                        pages_of(arena.stored_pointers)};
        if (everything) continue;
        sequences[i].activations = sequences[i].activations.subspan(0, recomputed);
        sequences[i].sources = sequences[i].sources.subspan(recomputed);
      }
      return ReloadRequest{.kv_page_bytes = page_bytes, .sequences = sequences};
    };
    KV_RETURN_IF_ERROR(runtime.Measure(request(0, true)));

    Times times;
    ReloadShape shape{.tokens = row.tokens,
                      .batch = row.batch,
                      .hidden = row.hidden,
                      .kv_heads = model.layout.kv_heads,
                      .query_heads = row.hidden / kHeadDim,
                      .head_dim = kHeadDim,
                      .kv_token_bytes = int64_t(page_bytes / kPageTokens),
                      .chunk_tokens = std::max<int64_t>(1, arguments_.chunk_rows / row.batch),
                      .split_multiple = kPageTokens};
    for (int repeat = 0; repeat < arguments_.repeats; ++repeat) {
      KV_ASSIGN_OR_RETURN(times.rates, RatesOf(profile, {row.hidden, model.width()}));
      KV_ASSIGN_OR_RETURN(const ReloadCosts costs, MakeCosts(times.rates, shape));
      const SplitPlan plan = PlanSplit(costs);
      times.split_tokens = plan.split_tokens;
      times.modelled_copy_ms = Seconds(plan.all_copy) * 1e3;
      times.modelled_recompute_ms = Seconds(plan.recompute_most) * 1e3;
      times.modelled_split_ms = Seconds(plan.time) * 1e3;
      for (const auto& [split, best_ms] :
           {std::pair{int64_t{0}, &times.copy_ms}, std::pair{row.tokens, &times.recompute_ms},
            std::pair{plan.split_tokens, &times.split_ms}}) {
        link.Restart();
        KV_ASSIGN_OR_RETURN(const ReloadReport report, runtime.Run(request(split, false)));
        *best_ms = std::min(*best_ms, double(report.elapsed_ns) / 1e6);
      }
    }
    return times;
  }

 private:
  const Arguments arguments_;
  SteadyClock clock_;
  WorkerPool pool_;
};

absl::Status Check(const Arguments& a) {
  for (const int64_t hidden : a.hidden) {
    for (const int64_t group : a.group) {
      if (hidden < kHeadDim || hidden > 65536 || group < 1 || hidden % (kHeadDim * group) != 0) {
        return InvalidField("--hidden", hidden, absl::StrCat("a multiple of 128 * G, G=", group, ", up to 65536"));
      }
    }
  }
  for (const int64_t tokens : a.tokens) {
    if (tokens < 1 || tokens > 1 << 20) return InvalidField("--tokens", tokens, "1..1048576");
  }
  for (const int64_t batch : a.batch) {
    if (batch < 1 || batch > 1024) return InvalidField("--batch", batch, "1..1024");
  }
  for (const double gbps : a.link_gbps) {
    if (!(gbps >= 0.001) || gbps > 10000) return InvalidField("--link-gbps", gbps, "0.001..10000");
  }
  return absl::OkStatus();
}

absl::Status Run(const Arguments& arguments) {
  KV_RETURN_IF_ERROR(Check(arguments));
  Bench bench(arguments);
  nlohmann::json json = {{"threads", arguments.threads},
                         {"repeats", arguments.repeats},
                         {"kv_ratio", arguments.kv_ratio},
                         {"not_covered", kNotCovered},
                         {"rows", nlohmann::json::array()}};
  if (!arguments.json) {
    std::cout << absl::StrFormat(
                     "%d compute threads, smallest of %d; times in ms; meas/mod: measured over modelled\n\n",
                     arguments.threads, arguments.repeats)
              << absl::StrFormat("%5s %3s %5s %2s %6s  %8s %9s %8s %11s  %7s %7s  %8s %8s  %s\n", "s", "b", "h", "G",
                                 "Gbit/s", "copy", "recompute", "split", "l", "of copy", "of best", "GFLOP/s", "MB/s",
                                 "meas/mod: copy, recompute, split");
  }
  double worst = 0, log_sum = 0;
  int rows = 0;
  for (const int64_t hidden : arguments.hidden) {
    for (const int64_t group : arguments.group) {
      for (const int64_t batch : arguments.batch) {
        for (const int64_t tokens : arguments.tokens) {
          if (tokens * batch > arguments.rows_max) continue;
          for (const double gbps : arguments.link_gbps) {
            KV_ASSIGN_OR_RETURN(const Times t, bench.Measure({tokens, batch, hidden, group, gbps}));
            const double copy_ratio = t.copy_ms / t.modelled_copy_ms, split_ratio = t.split_ms / t.modelled_split_ms;
            const double recompute_ratio = t.recompute_ms / t.modelled_recompute_ms;
            worst = std::max(worst, t.over_better());
            log_sum += std::log(split_ratio);
            ++rows;
            json["rows"].push_back({{"tokens", tokens},
                                    {"batch", batch},
                                    {"hidden", hidden},
                                    {"group", group},
                                    {"link_gbps", gbps},
                                    {"split_tokens", t.split_tokens},
                                    {"copy_ms", t.copy_ms},
                                    {"recompute_ms", t.recompute_ms},
                                    {"split_ms", t.split_ms},
                                    {"split_over_copy", t.split_ms / t.copy_ms},
                                    {"split_over_better", t.over_better()},
                                    {"flops_per_second", t.rates.compute_flops_per_second},
                                    {"link_bytes_per_second", t.rates.link_bytes_per_second},
                                    {"measured_over_modelled",
                                     {{"copy", copy_ratio}, {"recompute", recompute_ratio}, {"split", split_ratio}}}});
            if (arguments.json) continue;
            std::cout
                << absl::StrFormat(
                       "%5d %3d %5d %2d %6g  %8.2f %9.2f %8.2f %5d (%2.0f%%)  %7.3f %7.3f  %8.1f %8.1f  %.2f, %.2f, "
                       "%.2f\n",
                       tokens, batch, hidden, group, gbps, t.copy_ms, t.recompute_ms, t.split_ms, t.split_tokens,
                       100.0 * t.split_tokens / tokens, t.split_ms / t.copy_ms, t.over_better(),
                       t.rates.compute_flops_per_second / 1e9, t.rates.link_bytes_per_second / 1e6, copy_ratio,
                       recompute_ratio, split_ratio)
                << std::flush;
          }
        }
      }
    }
  }
  json["worst_split_over_better"] = worst;
  json["geometric_mean_of_split_measured_over_modelled"] = rows == 0 ? 1 : std::exp(log_sum / rows);
  if (arguments.json) {
    std::cout << json.dump(2) << "\n";
  } else {
    std::cout
        << absl::StrFormat(
               "\nworst split over the better of the two: %.3f; split measured over modelled, geometric mean: %.3f\n",
               worst, rows == 0 ? 1 : std::exp(log_sum / rows))
        << kNotCovered;
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Arguments a;
  CLI::App app{
      "Reloads K and V of a layer: all copied, all recomputed, and the planner's split, over an emulated link.",
      "recompute_bench"};
  app.footer(kNotCovered);
  app.add_option("--tokens", a.tokens, "s, comma-separated")->delimiter(',')->capture_default_str();
  app.add_option("--batch", a.batch, "b")->delimiter(',')->capture_default_str();
  app.add_option("--hidden", a.hidden, "h, multiples of 128 * G")->delimiter(',')->capture_default_str();
  app.add_option("--group", a.group, "G, query heads per KV head")->delimiter(',')->capture_default_str();
  app.add_option("--link-gbps", a.link_gbps, "emulated link, Gbit/s")->delimiter(',')->capture_default_str();
  app.add_option("--rows-max", a.rows_max, "leave out what has more tokens in all")->capture_default_str();
  app.add_option("--kv-ratio", a.kv_ratio, "bytes of a stored page over those of a raw one: 0.172 for hack's default")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  app.add_option("--repeats", a.repeats)->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--chunk-rows", a.chunk_rows, "rows of X that are projected at once")->capture_default_str();
  app.add_option("--threads", a.threads, "that compute; 0: one per usable CPU")->check(CLI::Range(0, 1024));
  app.add_flag("--json", a.json, "JSON instead of a table; sizes in bytes, times in milliseconds");
  CLI11_PARSE(app, argc, argv);
  if (a.threads == 0) a.threads = engine::CoreCount();
  const absl::Status status = Run(a);
  return absl::IsInvalidArgument(status) ? (engine::ExitCode("recompute_bench", status), engine::kUsageExitCode)
                                         : engine::ExitCode("recompute_bench", status);
}

}  // namespace
}  // namespace kvmanager::recompute

int main(int argc, char** argv) {
  kvmanager::engine::ChooseBlasCore(argv);
  return kvmanager::recompute::Main(argc, argv);
}
