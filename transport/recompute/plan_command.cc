#include "transport/recompute/plan_command.h"

#include <CLI/CLI.hpp>
#include <cmath>

#include "absl/strings/str_format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

constexpr double kBytesPerGigabit = 1e9 / 8;
constexpr double kMicrosecondsMax = double(MachineRates::kLatencyNsMax) / 1000;

/// Four significant digits in the largest unit that leaves one before the point.
std::string FormatTime(TimeFs time) {
  const double s = Seconds(time);
  if (s >= 1) return absl::StrFormat("%.4g s", s);
  if (s >= 1e-3) return absl::StrFormat("%.4g ms", s * 1e3);
  if (s >= 1e-6) return absl::StrFormat("%.4g us", s * 1e6);
  return absl::StrFormat("%.4g ns", s * 1e9);
}

double Share(TimeFs part, TimeFs whole) { return whole == 0 ? 1 : Seconds(part) / Seconds(whole); }

std::string SplitName(const PlanExplanation& e, const SplitPlan& plan) {
  if (plan.split_tokens == 0) return "0 (all-copy)";
  if (plan.split_tokens == e.shape.tokens) return absl::StrFormat("%d (all)", plan.split_tokens);
  return absl::StrFormat("%d (%.1f%%)", plan.split_tokens, 100.0 * plan.split_tokens / e.shape.tokens);
}

/// `value` times `scale` as a rate of the planner. Errors: INVALID_ARGUMENT naming `option`.
absl::StatusOr<int64_t> Rate(absl::string_view option, double value, double scale, int64_t max) {
  const double rate = value * scale;
  if (!(rate >= 1) || rate > double(max)) {
    return InvalidField(option, value, absl::StrFormat("%g..%g", 1 / scale, double(max) / scale));
  }
  return int64_t(rate);
}

absl::StatusOr<int64_t> Latency(absl::string_view option, double us) {
  if (!(us >= 0) || us > kMicrosecondsMax) return InvalidField(option, us, absl::StrFormat("0..%g", kMicrosecondsMax));
  return int64_t(std::llround(us * 1000));
}

}  // namespace

void AddPlanOptions(CLI::App& app, PlanArguments& a) {
  app.footer(
      "A sequence's K and V come back from slower memory over a link. For its first l tokens the engine may\n"
      "have kept X, the input of the K and V projections: X is fetched and K, V recomputed, while K and V of\n"
      "the other tokens are copied. This prints how long every way takes for one layer, and the best l:\n"
      "  row      X is there already\n"
      "  column   X is moved first, then recomputation runs beside the copy\n"
      "  shared   X, in chunks, and the rest of K and V share the link: the one to go by\n\n"
      "Example: 32 sequences of 4,096 tokens, hidden size 8192, over a link of 440 Gbit/s (55 GB/s) to a GPU that\n"
      "projects at 700 TFLOP/s; then the same with 8 query heads per KV head, and with encoded pages:\n"
      "  kvctl recompute-plan --tokens 4096 --batch 32 --hidden 8192 --kv-heads 64 --query-heads 64 \\\n"
      "      --head-dim 128 --link-gbps 440 --tflops 700\n"
      "  kvctl recompute-plan --tokens 4096 --batch 32 --hidden 8192 --kv-heads 8 --query-heads 64 \\\n"
      "      --head-dim 128 --link-gbps 440 --tflops 700\n"
      "  kvctl recompute-plan --tokens 4096 --batch 32 --hidden 8192 --kv-heads 64 --query-heads 64 \\\n"
      "      --head-dim 128 --link-gbps 440 --tflops 700 --kv-bytes-per-token 5632   # 88 bytes x 64 KV heads");
  app.add_option("--tokens", a.shape.tokens, "tokens of each sequence")->required();
  app.add_option("--batch", a.shape.batch, "sequences that are reloaded together")->capture_default_str();
  app.add_option("--hidden", a.shape.hidden, "hidden size: values of X per token");
  app.add_option("--kv-heads", a.shape.kv_heads, "KV heads of a layer, of this shard");
  app.add_option("--query-heads", a.shape.query_heads, "query heads, a multiple of --kv-heads");
  app.add_option("--head-dim", a.shape.head_dim, "channels of a head")->capture_default_str()->default_val(128);
  app.add_option("--link-gbps", a.link_gbps, "link to the device, gigabits per second: 8 is 1 GB/s");
  app.add_option("--link-latency-us", a.link_latency_us, "once for X, once for K and V")->capture_default_str();
  app.add_option("--tflops", a.tflops, "TFLOP/s of the projections, as measured: 4 * tokens * hidden * KV width");
  app.add_option("--compute-latency-us", a.compute_latency_us, "once, if anything is recomputed")
      ->capture_default_str();
  app.add_option("--kv-bytes-per-token", a.shape.kv_token_bytes,
                 "of K and V of a token, all KV heads of the layer, as they travel: the codec's form (0: raw, 16 bits)")
      ->capture_default_str();
  app.add_option("--x-bytes-per-token", a.shape.x_token_bytes, "of X of a token as it travels (0: 16 bits a value)")
      ->capture_default_str();
  app.add_option("--x-tokens", a.shape.x_tokens, "tokens that have X, the first ones (-1: all)")->capture_default_str();
  app.add_option("--chunk-tokens", a.shape.chunk_tokens, "tokens of each sequence that are projected at once")
      ->capture_default_str();
  app.add_option("--split-multiple", a.shape.split_multiple, "l is a multiple of this: the page size for whole pages")
      ->capture_default_str();
}

absl::StatusOr<PlanExplanation> Explain(const PlanArguments& a) {
  PlanExplanation e{.shape = a.shape};
  KV_ASSIGN_OR_RETURN(e.rates.link_bytes_per_second,
                      Rate("--link-gbps", a.link_gbps, kBytesPerGigabit, MachineRates::kLinkBytesPerSecondMax));
  KV_ASSIGN_OR_RETURN(e.rates.compute_flops_per_second,
                      Rate("--tflops", a.tflops, 1e12, MachineRates::kFlopsPerSecondMax));
  KV_ASSIGN_OR_RETURN(e.rates.link_latency_ns, Latency("--link-latency-us", a.link_latency_us));
  KV_ASSIGN_OR_RETURN(e.rates.compute_latency_ns, Latency("--compute-latency-us", a.compute_latency_us));
  KV_ASSIGN_OR_RETURN(e.costs, MakeCosts(e.rates, e.shape));
  for (size_t i = 0; i < std::size(kSchedules); ++i) e.plans[i] = PlanSplit(e.costs, kSchedules[i]);
  return e;
}

std::string FormatPlan(const PlanExplanation& e) {
  std::string text = absl::StrFormat(
      "one layer, %d sequences of %d tokens, %d query heads per KV head\n"
      "per token: X %s, K and V %s on the link, projections %s\n\n"
      "%-8s  %12s  %13s  %16s  %12s  %11s\n",
      e.shape.batch, e.shape.tokens, e.shape.query_heads / e.shape.kv_heads, FormatTime(e.costs.x_fs),
      FormatTime(e.costs.kv_fs), FormatTime(e.costs.compute_fs), "SCHEDULE", "ALL-COPY",
      e.costs.split_max == e.costs.tokens ? "ALL-RECOMPUTE" : "ALL X", "BEST SPLIT", "TIME", "OF ALL-COPY");
  for (const SplitPlan& plan : e.plans) {
    absl::StrAppendFormat(&text, "%-8s  %12s  %13s  %16s  %12s  %11.3f\n", ScheduleName(plan.schedule),
                          FormatTime(plan.all_copy), FormatTime(plan.recompute_most), SplitName(e, plan),
                          FormatTime(plan.time), Share(plan.time, plan.all_copy));
  }
  const SplitPlan& shared = e.plans[std::size(kSchedules) - 1];
  if (shared.split_tokens == 0) {
    text += "\ncopy everything: no split is faster over a shared link";
    if (e.costs.x_fs >= e.costs.kv_fs) text += " (X of a token takes no less of it than K and V do)";
    text += "\n";
  } else if (shared.split_tokens == e.shape.tokens) {
    text += "\nrecompute everything: activations are all that need cross the link\n";
  } else {
    absl::StrAppendFormat(&text, "\nrecompute the first %d tokens, copy the other %d\n", shared.split_tokens,
                          e.shape.tokens - shared.split_tokens);
  }
  return text;
}

nlohmann::json PlanToJson(const PlanExplanation& e) {
  nlohmann::json json = {{"tokens", e.shape.tokens},
                         {"batch", e.shape.batch},
                         {"link_bytes_per_second", e.rates.link_bytes_per_second},
                         {"compute_flops_per_second", e.rates.compute_flops_per_second},
                         {"x_seconds_per_token", Seconds(e.costs.x_fs)},
                         {"kv_seconds_per_token", Seconds(e.costs.kv_fs)},
                         {"compute_seconds_per_token", Seconds(e.costs.compute_fs)},
                         {"schedules", nlohmann::json::object()}};
  for (const SplitPlan& plan : e.plans) {
    json["schedules"][ScheduleName(plan.schedule)] = {{"all_copy_seconds", Seconds(plan.all_copy)},
                                                      {"recompute_most_seconds", Seconds(plan.recompute_most)},
                                                      {"split_tokens", plan.split_tokens},
                                                      {"seconds", Seconds(plan.time)}};
  }
  json["split_tokens"] = e.plans[std::size(kSchedules) - 1].split_tokens;
  return json;
}

}  // namespace kvmanager::recompute
