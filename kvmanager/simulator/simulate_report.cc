#include "kvmanager/simulator/simulate_report.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace kvmanager::simulator {
namespace {

double Gib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }
double Share(uint64_t part, uint64_t all) {
  return all == 0 ? 0 : static_cast<double>(part) / static_cast<double>(all);
}

// "25600", or of a ladder "14222 to 25600": on the first rung, and on the last.
std::string BlocksIn(const SimulateReport& report, const TierOptions& tier) {
  std::string text = absl::StrCat(tier.bytes / report.rung_bytes.front());
  if (report.rung_bytes.size() > 1) absl::StrAppend(&text, " to ", tier.bytes / report.rung_bytes.back());
  return text;
}

void AppendRungs(const SimulateReport& report, const ReplayResult& result, std::string* text) {
  for (size_t rung = 0; rung < result.rungs.size(); ++rung) {
    const ReplayResult::Rung& of = result.rungs[rung];
    absl::StrAppendFormat(text, "  rung %d, %d bytes: %.4f of the blocks hit on it, %.1f%% of the hits", rung,
                          report.rung_bytes[rung], Share(of.hit_blocks, result.all.blocks),
                          100 * Share(of.hit_blocks, result.all.hit_blocks));
    if (rung > 0) absl::StrAppendFormat(text, "; %d blocks were lowered to it", of.lowered_blocks);
    *text += "\n";
  }
}

}  // namespace

std::string FormatReport(const SimulateReport& report) {
  std::string text =
      absl::StrFormat("%s: %d requests in %.0f s name %d blocks of %d tokens, %d of them different\n", report.trace,
                      report.requests, report.seconds, report.blocks, report.block_tokens, report.distinct);
  absl::StrAppendFormat(&text, "a block takes %s bytes;", absl::StrJoin(report.rung_bytes, ", "));
  for (const TierOptions& tier : report.tiers) {
    absl::StrAppendFormat(&text, " %s has %.2f GiB, %s blocks;", tier.name, Gib(tier.bytes), BlocksIn(report, tier));
  }
  absl::StrAppendFormat(&text, " without a bound %.4f of the blocks hit\n\n", report.unlimited.ratio());
  absl::StrAppendFormat(&text, "%-8s %8s %8s %8s", "policy", "hits", "1st half", "2nd half");
  for (const TierOptions& tier : report.tiers) absl::StrAppendFormat(&text, " %9s", tier.name);
  absl::StrAppendFormat(&text, " %12s %12s %9s %9s %9s\n", "down GiB", "up GiB", "TTFT s", "p50", "p95");
  for (const SimulateReport::Run& run : report.runs) {
    const ReplayResult& result = run.result;
    absl::StrAppendFormat(&text, "%-8s %8.4f %8.4f %8.4f", run.policy, result.all.ratio(), result.halves[0].ratio(),
                          result.halves[1].ratio());
    uint64_t down = 0, up = 0;
    for (const ReplayResult::Tier& tier : result.tiers) {
      absl::StrAppendFormat(&text, " %9.4f", Share(tier.hit_blocks, result.all.blocks));
      down += tier.demoted_bytes;
      up += tier.fetched_bytes;
    }
    absl::StrAppendFormat(&text, " %12.1f %12.1f %9.3f %9.3f %9.3f\n", Gib(down), Gib(up), result.ttft_mean_s,
                          result.ttft_p50_s, result.ttft_p95_s);
    if (report.rung_bytes.size() > 1) AppendRungs(report, result, &text);
    if (result.refused_requests > 0) {
      absl::StrAppendFormat(&text, "         %d requests found no room for their blocks\n", result.refused_requests);
    }
  }
  absl::StrAppendFormat(&text,
                        "\nhits: blocks of a request's longest prefix that is there, of all blocks named. TTFT: tokens "
                        "that did not hit at %.0f tokens/s, and copies from lower tiers.\n",
                        report.prefill_tokens_per_s);
  return text;
}

nlohmann::json ReportToJson(const SimulateReport& report) {
  nlohmann::json json = {{"trace", report.trace},
                         {"requests", report.requests},
                         {"blocks", report.blocks},
                         {"distinct_blocks", report.distinct},
                         {"seconds", report.seconds},
                         {"block_bytes", report.rung_bytes.front()},
                         {"rung_bytes", report.rung_bytes},
                         {"block_tokens", report.block_tokens},
                         {"prefill_tokens_per_second", report.prefill_tokens_per_s},
                         {"unlimited_hit_ratio", report.unlimited.ratio()}};
  for (const TierOptions& tier : report.tiers) {
    json["tiers"].push_back(
        {{"name", tier.name}, {"bytes", tier.bytes}, {"blocks", tier.bytes / report.rung_bytes.front()}});
  }
  for (const SimulateReport::Run& run : report.runs) {
    const ReplayResult& result = run.result;
    nlohmann::json one = {{"policy", run.policy},
                          {"hit_ratio", result.all.ratio()},
                          {"hit_ratio_first_half", result.halves[0].ratio()},
                          {"hit_ratio_second_half", result.halves[1].ratio()},
                          {"refused_requests", result.refused_requests},
                          {"ttft_seconds",
                           {{"mean", result.ttft_mean_s},
                            {"p50", result.ttft_p50_s},
                            {"p95", result.ttft_p95_s},
                            {"p99", result.ttft_p99_s}}}};
    for (size_t i = 0; i < result.tiers.size(); ++i) {
      const ReplayResult::Tier& tier = result.tiers[i];
      one["tiers"].push_back({{"name", report.tiers[i].name},
                              {"hit_ratio", Share(tier.hit_blocks, result.all.blocks)},
                              {"hit_blocks", tier.hit_blocks},
                              {"evicted_blocks", tier.evicted_blocks},
                              {"refused_blocks", tier.refused_blocks},
                              {"demoted_bytes", tier.demoted_bytes},
                              {"fetched_bytes", tier.fetched_bytes}});
    }
    for (const ReplayResult::Rung& rung : result.rungs) {
      one["rungs"].push_back({{"hit_ratio", Share(rung.hit_blocks, result.all.blocks)},
                              {"share_of_hits", Share(rung.hit_blocks, result.all.hit_blocks)},
                              {"hit_blocks", rung.hit_blocks},
                              {"lowered_blocks", rung.lowered_blocks}});
    }
    for (const ReplayResult::Part& slice : result.slices) one["slices"].push_back(slice.ratio());
    json["runs"].push_back(std::move(one));
  }
  return json;
}

std::string ReportToSvg(const SimulateReport& report) {
  constexpr int kWidth = 760, kHeight = 380, kLeft = 60, kRight = 110, kTop = 40, kBottom = 50;
  constexpr const char* kColours[] = {"#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"};
  double most = 0.05;
  for (const SimulateReport::Run& run : report.runs) {
    for (const ReplayResult::Part& slice : run.result.slices) most = std::max(most, slice.ratio());
  }
  most = std::ceil(most * 10) / 10;
  const auto y_of = [&](double ratio) { return kHeight - kBottom - ratio / most * (kHeight - kTop - kBottom); };
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  absl::StrAppendFormat(&svg, "<text x=\"%d\" y=\"22\">Prefix hit ratio over the trace", kLeft);
  for (const TierOptions& tier : report.tiers) {
    absl::StrAppendFormat(&svg, ", %s %s blocks", tier.name, BlocksIn(report, tier));
  }
  absl::StrAppend(&svg, "</text>\n");
  for (int step = 0; step <= 5; ++step) {
    const double ratio = most * step / 5;
    absl::StrAppendFormat(&svg, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#dddddd\"/>\n", kLeft,
                          kWidth - kRight, y_of(ratio), y_of(ratio));
    absl::StrAppendFormat(&svg, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.2f</text>\n", kLeft - 6,
                          y_of(ratio) + 4, ratio);
  }
  absl::StrAppendFormat(&svg, "<text x=\"%d\" y=\"%d\">requests: 0 to %d</text>\n", kLeft, kHeight - 20,
                        report.requests);
  for (size_t i = 0; i < report.runs.size(); ++i) {
    const SimulateReport::Run& run = report.runs[i];
    const char* const colour = kColours[i % std::size(kColours)];
    const size_t slices = run.result.slices.size();
    std::string points;
    for (size_t at = 0; at < slices; ++at) {
      const double x =
          kLeft + (static_cast<double>(at) + 0.5) / static_cast<double>(slices) * (kWidth - kLeft - kRight);
      absl::StrAppendFormat(&points, "%.1f,%.1f ", x, y_of(run.result.slices[at].ratio()));
    }
    absl::StrAppendFormat(&svg, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\" points=\"%s\"/>\n", colour,
                          points);
    absl::StrAppendFormat(&svg, "<text x=\"%d\" y=\"%d\" fill=\"%s\">%s %.3f</text>\n", kWidth - kRight + 8,
                          kTop + 16 * static_cast<int>(i) + 8, colour, run.policy, run.result.all.ratio());
  }
  absl::StrAppend(&svg, "</svg>\n");
  return svg;
}

}  // namespace kvmanager::simulator
