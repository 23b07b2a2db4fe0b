// Reloads of one layer's K and V: everything copied, everything recomputed, and the planner's split, over tokens s,
// batch b, hidden size h, query heads per KV head G and link speed, measured beside what was modelled.
//
//   bazel run --config=opt //bench/recompute:recompute_bench -- [--json] [--repeats 3] [--hidden 1024,2048] ...
//   ... --device 0: on a GPU
//
// Without --device the link is a copy that is held to a rate (transport/recompute/link.h); its own copying costs this
// CPU time that a device's would not. Compute is OpenBLAS in fp32 on the threads given. With it the link is the GPU's
// own, activations and stored pages lie in pinned memory, and one large copy in the same run says what the link can do.
// Pages are random and lie in random order. Rates for the plan come from the profile, which measures both ways once per
// shape and link before anything is timed; every reload feeds it afterwards.
// Per row the three ways take turns `repeats` times, and the smallest time of each counts. On a GPU each way has
// `repeats` in a row behind warm-ups of its own, and medians count: it lowers its clock after tens of milliseconds of
// products, and ways in turns would profit from each other's rests. Short ones have five rounds of 20 ms and more: what
// a machine does beside lasts longer than one.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "bench/recompute/machine.h"
#include "examples/engine/blas_core.h"
#include "examples/engine/program.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/plan.h"
#include "transport/recompute/profile.h"
#include "transport/recompute/runtime.h"

namespace kvmanager::recompute {
namespace {

constexpr int kHeadDim = 128, kPageTokens = 64;
constexpr char kNotCovered[] =
    "Not covered: without --device a real link (it is emulated by waiting, and copying into memory takes CPU time of "
    "the\n"
    "compute threads); attention that uses K and V, encoded pages unless --kv-ratio is given, several reloads at "
    "once,\n"
    "weights that are streamed.\n";

struct Arguments {
  std::vector<int64_t> tokens = {256, 1024}, batch = {1, 4}, hidden = {1024, 2048}, group = {1, 2, 8};
  std::vector<double> link_gbps = {0.25, 1, 4};
  int64_t rows_max = 1024;
  double kv_ratio = 1;
  int repeats = 3, threads = 0, chunk_rows = 0, buffers = 0, device = -1;
  bool json = false;
};

constexpr int kCpuChunkRows = 256;
constexpr double kLinkOfGpu = 0;  // Gbit/s: not emulated

/// This CPU, and a link held to a rate.
class CpuMachine final : public Machine {
 public:
  CpuMachine(int threads, int chunk_rows)
      : threads_(threads), chunk_rows_(chunk_rows), pool_(std::max(1, threads - 1)) {}

  std::string description() const override { return absl::StrFormat("%d compute threads", threads_); }
  absl::StatusOr<Arena> MakeArena(size_t activation_bytes, size_t stored_bytes, size_t page_bytes) override {
    if (activation_bytes > activations_.size()) {
      activations_.resize(activation_bytes);
      FillWithHalves(activations_.data(), activation_bytes, 1);
    }
    if (stored_bytes > stored_.size()) {
      stored_.resize(stored_bytes);
      FillWithHalves(stored_.data(), stored_bytes, 1);
    }
    if (page_bytes > pages_.size()) pages_.resize(page_bytes);
    return Arena{activations_.data(), stored_.data(), pages_.data()};
  }
  absl::StatusOr<std::unique_ptr<ReloadExecutor>> MakeExecutor(const ProjectionModel& model,
                                                               double link_gbps) override {
    link_.emplace(link_gbps * 1e9 / 8, &clock_);
    return MakeCpuExecutor(model, {.chunk_rows = chunk_rows_ > 0 ? chunk_rows_ : kCpuChunkRows}, &*link_,
                           threads_ > 1 ? &pool_ : nullptr, &clock_);
  }
  void Restart() override { link_->Restart(); }

 private:
  const int threads_, chunk_rows_;
  SteadyClock clock_;
  WorkerPool pool_;
  std::optional<PacedLink> link_;
  std::vector<uint8_t> activations_, stored_, pages_;
};

struct Row {
  int64_t tokens = 0, batch = 0, hidden = 0, group = 0;
  double link_gbps = 0;
};

struct Times {
  double copy_ms = 0, recompute_ms = 0, split_ms = 0;
  double split_link_ms = 0, split_compute_ms = 0;  // that the lanes worked in a split's reload
  double modelled_copy_ms = 0, modelled_recompute_ms = 0, modelled_split_ms = 0;
  int64_t split_tokens = 0;  // of a sequence, rounded down
  MachineRates rates;
  double over_better() const { return split_ms / std::min(copy_ms, recompute_ms); }
};

class Bench {
 public:
  Bench(const Arguments& arguments, Machine* machine) : arguments_(arguments), machine_(machine) {}

  /// The largest arena of the grid: memory is taken, pinned and filled once.
  absl::Status Reserve() {
    size_t activations = 0, stored = 0, to = 0;
    ForRows([&](const Row& row) {
      const Sizes sizes = SizesOf(row);
      activations = std::max(activations, sizes.pages * sizes.model.activation_page_bytes());
      stored = std::max(stored, sizes.pages * sizes.page_bytes);
      to = std::max(to, sizes.pages * sizes.slot_bytes);
      return absl::OkStatus();
    }).IgnoreError();
    return machine_->MakeArena(activations, stored, to).status();
  }

  /// Ends with the first error of `call`.
  absl::Status ForRows(const std::function<absl::Status(const Row& row)>& call) const {
    for (const int64_t hidden : arguments_.hidden) {
      for (const int64_t group : arguments_.group) {
        for (const double gbps : arguments_.link_gbps) {
          for (const int64_t batch : arguments_.batch) {
            for (const int64_t tokens : arguments_.tokens) {
              if (tokens * batch > arguments_.rows_max) continue;
              KV_RETURN_IF_ERROR(call({tokens, batch, hidden, group, gbps}));
            }
          }
        }
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Times> Measure(const Row& row) {
    const auto [model, sequence_pages, pages, page_bytes, slot_bytes] = SizesOf(row);
    KV_ASSIGN_OR_RETURN(const Arena arena, machine_->MakeArena(pages * model.activation_page_bytes(),
                                                               pages * page_bytes, pages * slot_bytes));
    std::vector<const uint8_t*> activations, stored;
    std::vector<uint8_t*> to;
    for (int64_t p = 0; p < pages; ++p) {
      activations.push_back(arena.activations + p * model.activation_page_bytes());
      stored.push_back(arena.stored + p * page_bytes);
      to.push_back(arena.pages + p * slot_bytes);
    }
    std::mt19937_64 random(3);
    std::shuffle(activations.begin(), activations.end(), random);
    std::shuffle(stored.begin(), stored.end(), random);
    std::shuffle(to.begin(), to.end(), random);
    KV_ASSIGN_OR_RETURN(ReloadExecutor* const executor, Executor(model, row.link_gbps));
    Profile profile(&clock_);
    ReloadRuntime runtime(executor, &clock_, &profile);

    std::vector<ReloadSequence> sequences(row.batch);
    const auto request = [&](int64_t split, bool everything) {  // split: of the batch
      for (int64_t i = 0; i < row.batch; ++i) {
        const int64_t mine = SplitOfSequence(split, row.batch, row.tokens, kPageTokens, i);
        const size_t recomputed = (mine + kPageTokens - 1) / kPageTokens;
        const auto pages_of = [&](const auto& pointers) {
          return absl::MakeConstSpan(pointers).subspan(i * sequence_pages, sequence_pages);
        };
        sequences[i] = {row.tokens, mine, 0, pages_of(activations), pages_of(to), pages_of(stored)};
        if (everything) continue;
        sequences[i].activations = sequences[i].activations.subspan(0, recomputed);
        sequences[i].sources = sequences[i].sources.subspan(recomputed);
      }
      return ReloadRequest{.kv_page_bytes = page_bytes, .sequences = sequences};
    };

    Times times;
    // The batch as one sequence: SplitOfSequence.
    const ReloadShape shape{.tokens = row.tokens * row.batch,
                            .hidden = row.hidden,
                            .kv_heads = model.layout.kv_heads,
                            .query_heads = row.hidden / kHeadDim,
                            .head_dim = kHeadDim,
                            .kv_token_bytes = int64_t(page_bytes / kPageTokens),
                            .chunk_tokens = executor->chunk_rows(),
                            .split_multiple = kPageTokens};
    std::vector<ReloadReport> copies, recomputations, splits;
    const auto reload = [&](ReloadRuntime& by, int64_t split, std::vector<ReloadReport>* reports) -> absl::Status {
      machine_->Restart();
      KV_ASSIGN_OR_RETURN(reports->emplace_back(), by.Run(request(split, false)));
      return absl::OkStatus();
    };
    const auto reload_split = [&]() -> absl::Status {
      KV_ASSIGN_OR_RETURN(times.rates, RatesOf(profile, {row.hidden, model.width()}));
      KV_ASSIGN_OR_RETURN(const ReloadCosts costs, MakeCosts(times.rates, shape));
      const SplitPlan plan = PlanSplit(costs);
      times.split_tokens = plan.split_tokens / row.batch;
      times.modelled_copy_ms = Seconds(plan.all_copy) * 1e3;
      times.modelled_recompute_ms = Seconds(plan.recompute_most) * 1e3;
      times.modelled_split_ms = Seconds(plan.time) * 1e3;
      return reload(runtime, plan.split_tokens, &splits);
    };
    if (machine_->sustained()) {
      // Each way goes on for itself: a GPU that has rested computes faster than one that always computes.
      ReloadRuntime unprofiled(executor, &clock_, nullptr);
      const int64_t everything = row.tokens * row.batch;
      for (int i = 0; i < kMeasures; ++i) KV_RETURN_IF_ERROR(runtime.Measure(request(0, true)));
      for (int64_t timed_ns = 0; timed_ns < kTimedNs;) {
        KV_RETURN_IF_ERROR(Sustain(&copies, [&] { return reload(unprofiled, 0, &copies); }).status());
        KV_RETURN_IF_ERROR(
            Sustain(&recomputations, [&] { return reload(unprofiled, everything, &recomputations); }).status());
        KV_ASSIGN_OR_RETURN(const int64_t ns, Sustain(&splits, reload_split));
        timed_ns += ns;
      }
    } else {
      KV_RETURN_IF_ERROR(runtime.Measure(request(0, true)));
      for (int repeat = 0; repeat < arguments_.repeats; ++repeat) {
        KV_RETURN_IF_ERROR(reload(runtime, 0, &copies));
        KV_RETURN_IF_ERROR(reload(runtime, row.tokens * row.batch, &recomputations));
        KV_RETURN_IF_ERROR(reload_split());
      }
    }
    times.copy_ms = MillisecondsOf(copies, &ReloadReport::elapsed_ns);
    times.recompute_ms = MillisecondsOf(recomputations, &ReloadReport::elapsed_ns);
    times.split_ms = MillisecondsOf(splits, &ReloadReport::elapsed_ns);
    times.split_link_ms = MillisecondsOf(splits, &ReloadReport::link_ns);
    times.split_compute_ms = MillisecondsOf(splits, &ReloadReport::compute_ns);
    return times;
  }

 private:
  static constexpr int kMeasures = 3, kWarmUps = 8;
  static constexpr int64_t kRoundNs = 20'000'000, kTimedNs = 5 * kRoundNs;

  /// Runs `reload`, which adds to `reports`: warm-ups that are not kept, kWarmUps of them and for kRoundNs at least,
  /// and then as often as is timed, also for kRoundNs at least. Returns how long that took, in ns.
  absl::StatusOr<int64_t> Sustain(std::vector<ReloadReport>* reports, const std::function<absl::Status()>& reload) {
    const size_t kept = reports->size();
    const auto repeat = [&](size_t times) -> absl::StatusOr<int64_t> {
      const int64_t begin_ns = clock_.NowNs();
      while (reports->size() < kept + times || clock_.NowNs() - begin_ns < kRoundNs) KV_RETURN_IF_ERROR(reload());
      return clock_.NowNs() - begin_ns;
    };
    KV_RETURN_IF_ERROR(repeat(kWarmUps).status());
    reports->resize(kept);
    return repeat(arguments_.repeats);
  }
  double MillisecondsOf(const std::vector<ReloadReport>& reports, int64_t ReloadReport::*what) const {
    std::vector<int64_t> ns;
    for (const ReloadReport& report : reports) ns.push_back(report.*what);
    std::sort(ns.begin(), ns.end());
    return double(machine_->sustained() ? ns[ns.size() / 2] : ns[0]) / 1e6;
  }

  struct Sizes {
    ProjectionModel model;
    int64_t sequence_pages, pages;
    size_t page_bytes, slot_bytes;
  };
  Sizes SizesOf(const Row& row) const {
    ProjectionModel model{.layers = 1, .hidden = int(row.hidden), .rope = {kHeadDim, 5e5}};
    model.layout = {DType::kFloat16, uint16_t(row.hidden / kHeadDim / row.group), kHeadDim, kPageTokens};
    const size_t page_bytes = std::max<size_t>(1, size_t(model.layout.raw_bytes() * arguments_.kv_ratio));
    const int64_t sequence_pages = (row.tokens + kPageTokens - 1) / kPageTokens;
    return {model, sequence_pages, sequence_pages * row.batch, page_bytes,
            std::max(page_bytes, model.layout.raw_bytes())};
  }

  /// That of the row before, if it serves.
  absl::StatusOr<ReloadExecutor*> Executor(const ProjectionModel& model, double link_gbps) {
    if (executor_ != nullptr && link_gbps == link_gbps_ && model.hidden == executor_->model().hidden &&
        model.layout == executor_->model().layout) {
      return executor_.get();
    }
    executor_ = nullptr;
    KV_ASSIGN_OR_RETURN(executor_, machine_->MakeExecutor(model, link_gbps));
    link_gbps_ = link_gbps;
    std::vector<uint8_t> weights(size_t(model.hidden) * model.width() * 2);
    FillWithHalves(weights.data(), weights.size(), 1 / std::sqrt(float(model.hidden)));
    KV_RETURN_IF_ERROR(executor_->RegisterWeights(0, {DType::kFloat16, weights, weights}));
    return executor_.get();
  }

  const Arguments arguments_;
  Machine* const machine_;
  SteadyClock clock_;
  std::unique_ptr<ReloadExecutor> executor_;
  double link_gbps_ = 0;
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
    if (a.device < 0 && (!(gbps >= 0.001) || gbps > 10000)) return InvalidField("--link-gbps", gbps, "0.001..10000");
  }
  return absl::OkStatus();
}

absl::Status Run(const Arguments& arguments) {
  KV_RETURN_IF_ERROR(Check(arguments));
  std::unique_ptr<Machine> machine;
  if (arguments.device >= 0) {
    KV_ASSIGN_OR_RETURN(
        machine, MakeGpuMachine(
                     {.ordinal = arguments.device, .chunk_rows = arguments.chunk_rows, .buffers = arguments.buffers}));
  } else {
    machine = std::make_unique<CpuMachine>(arguments.threads, arguments.chunk_rows);
  }
  Bench bench(arguments, machine.get());
  KV_RETURN_IF_ERROR(bench.Reserve());
  const char* const summary = machine->sustained() ? "median" : "smallest";
  nlohmann::json json = {{"machine", machine->description()}, {"times", summary},
                         {"repeats", arguments.repeats},      {"kv_ratio", arguments.kv_ratio},
                         {"not_covered", kNotCovered},        {"rows", nlohmann::json::array()}};
  if (!arguments.json) {
    std::cout << absl::StrFormat("%s\n%s of %d; times in ms; meas/mod: measured over modelled\n\n",
                                 machine->description(), summary, arguments.repeats)
              << absl::StrFormat("%5s %3s %5s %2s %6s  %8s %9s %8s %11s  %7s %7s  %13s  %8s %8s  %s\n", "s", "b", "h",
                                 "G", "Gbit/s", "copy", "recompute", "split", "l", "of copy", "of best",
                                 "link, compute", "GFLOP/s", "MB/s", "meas/mod: copy, recompute, split");
  }
  double worst = 0, log_sum = 0;
  int rows = 0;
  KV_RETURN_IF_ERROR(bench.ForRows([&](const Row& row) -> absl::Status {
    KV_ASSIGN_OR_RETURN(const Times t, bench.Measure(row));
    const double copy_ratio = t.copy_ms / t.modelled_copy_ms, split_ratio = t.split_ms / t.modelled_split_ms;
    const double recompute_ratio = t.recompute_ms / t.modelled_recompute_ms;
    worst = std::max(worst, t.over_better());
    log_sum += std::log(split_ratio);
    ++rows;
    json["rows"].push_back(
        {{"tokens", row.tokens},
         {"batch", row.batch},
         {"hidden", row.hidden},
         {"group", row.group},
         {"link_gbps", row.link_gbps},
         {"split_tokens", t.split_tokens},
         {"copy_ms", t.copy_ms},
         {"recompute_ms", t.recompute_ms},
         {"split_ms", t.split_ms},
         {"split_link_ms", t.split_link_ms},
         {"split_compute_ms", t.split_compute_ms},
         {"split_over_copy", t.split_ms / t.copy_ms},
         {"split_over_better", t.over_better()},
         {"flops_per_second", t.rates.compute_flops_per_second},
         {"link_bytes_per_second", t.rates.link_bytes_per_second},
         {"measured_over_modelled", {{"copy", copy_ratio}, {"recompute", recompute_ratio}, {"split", split_ratio}}}});
    if (arguments.json) return absl::OkStatus();
    std::cout << absl::StrFormat(
                     "%5d %3d %5d %2d %6g  %8.3f %9.3f %8.3f %5d (%2.0f%%)  %7.3f %7.3f  %6.2f %6.2f  %8.1f %8.1f  "
                     "%.2f, %.2f, %.2f\n",
                     row.tokens, row.batch, row.hidden, row.group, row.link_gbps, t.copy_ms, t.recompute_ms, t.split_ms,
                     t.split_tokens, 100.0 * t.split_tokens / row.tokens, t.split_ms / t.copy_ms, t.over_better(),
                     t.split_link_ms, t.split_compute_ms, t.rates.compute_flops_per_second / 1e9,
                     t.rates.link_bytes_per_second / 1e6, copy_ratio, recompute_ratio, split_ratio)
              << std::flush;
    return absl::OkStatus();
  }));
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
      "Reloads K and V of a layer: all copied, all recomputed, and the planner's split, over an emulated link or to a "
      "GPU.",
      "recompute_bench"};
  app.footer(kNotCovered);
  auto* const tokens = app.add_option("--tokens", a.tokens, "s, comma-separated");
  auto* const batch = app.add_option("--batch", a.batch, "b");
  auto* const hidden = app.add_option("--hidden", a.hidden, "h, multiples of 128 * G");
  for (auto* const option : {tokens, batch, hidden}) option->delimiter(',')->capture_default_str();
  app.add_option("--group", a.group, "G, query heads per KV head")->delimiter(',')->capture_default_str();
  app.add_option("--link-gbps", a.link_gbps, "emulated link, Gbit/s")->delimiter(',')->capture_default_str();
  auto* const rows_max =
      app.add_option("--rows-max", a.rows_max, "leave out what has more tokens in all")->capture_default_str();
  app.add_option("--kv-ratio", a.kv_ratio, "bytes of a stored page over those of a raw one: 0.172 for hack's default")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  auto* const repeats = app.add_option("--repeats", a.repeats)->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--device", a.device, "a GPU, by number: its own link, pinned memory, and a grid of its own");
  app.add_option("--chunk-rows", a.chunk_rows, "rows of X that are projected at once; 0: 256, or the GPU's default");
  app.add_option("--buffers", a.buffers, "of a GPU, for chunks; 0: its default")->check(CLI::Range(0, 8));
  app.add_option("--threads", a.threads, "that compute; 0: one per usable CPU")->check(CLI::Range(0, 1024));
  app.add_flag("--json", a.json, "JSON instead of a table; sizes in bytes, times in milliseconds");
  CLI11_PARSE(app, argc, argv);
  if (a.threads == 0) a.threads = engine::CoreCount();
  if (a.device >= 0) {
    a.link_gbps = {kLinkOfGpu};
    if (tokens->count() == 0) a.tokens = {64, 256, 1024, 2048, 4096};
    if (batch->count() == 0) a.batch = {1, 32};
    if (hidden->count() == 0) a.hidden = {4096, 8192};
    if (rows_max->count() == 0) a.rows_max = 1 << 17;
    if (repeats->count() == 0) a.repeats = 9;
  }
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
