#include "bench/disaggregated/report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/disaggregated/stacked_bars.h"

namespace kvmanager::bench {
namespace {

struct Column {
  const char* name;
  double Sample::*field;
};
constexpr Column kTimes[] = {{"prefill", &Sample::prefill}, {"encode", &Sample::encode}, {"transfer", &Sample::alone},
                             {"exposed", &Sample::exposed}, {"wait", &Sample::wait},     {"decode", &Sample::decode},
                             {"job", &Sample::job}};

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

double Row::Median(double Sample::*field) const {
  std::vector<double> values;
  for (const Sample& sample : samples) values.push_back(sample.*field);
  return bench::Median(std::move(values));
}

double Row::Hidden() const {
  const double alone = Median(&Sample::alone);
  return alone > 0 ? 1 - Median(&Sample::exposed) / alone : 0;
}

double Row::LinkUse(double bits_per_s) const {
  const double alone = Median(&Sample::alone);
  return alone > 0 && bits_per_s > 0 ? 8 * double(bytes) / alone / bits_per_s : 0;
}

void AddRatios(Report* report) {
  for (LinkReport& link : report->links) {
    const auto raw =
        std::find_if(link.rows.begin(), link.rows.end(), [](const Row& row) { return row.codec == "raw"; });
    if (raw == link.rows.end() || raw->bytes == 0) continue;
    const double bytes = double(raw->bytes), job = raw->Median(&Sample::job);
    for (Row& row : link.rows) {
      row.raw_bytes_ratio = double(row.bytes) / bytes;
      row.raw_job_ratio = job > 0 ? row.Median(&Sample::job) / job : 0;
    }
  }
}

std::string MarkdownTables(const Report& report) {
  std::string text;
  for (const LinkReport& link : report.links) {
    absl::StrAppendFormat(&text, "\n### %s (%.4g Mbit/s)\n\n", link.name, link.bits_per_s / 1e6);
    absl::StrAppend(&text, "| codec | lag | MB | of raw's | ");
    for (const Column& column : kTimes) absl::StrAppend(&text, column.name, " s | ");
    absl::StrAppend(&text, "hidden | link use | job of raw's |\n|---|--:|--:|--:|");
    for (size_t i = 0; i < std::size(kTimes) + 3; ++i) absl::StrAppend(&text, "--:|");
    absl::StrAppend(&text, "\n");
    for (const Row& row : link.rows) {
      absl::StrAppendFormat(&text, "| %s | %d | %.3f | %.4f | ", row.codec, row.lag, double(row.bytes) / 1e6,
                            row.raw_bytes_ratio);
      for (const Column& column : kTimes) absl::StrAppendFormat(&text, "%.4f | ", row.Median(column.field));
      absl::StrAppendFormat(&text, "%.3f | %.2f | %.3f |\n", row.Hidden(), row.LinkUse(link.bits_per_s),
                            row.raw_job_ratio);
    }
  }
  for (const std::string& note : report.notes) absl::StrAppend(&text, "\n", note, "\n");
  return text;
}

nlohmann::ordered_json ToJson(const Report& report) {
  nlohmann::ordered_json json = {{"model", report.model},
                                 {"machine", report.machine},
                                 {"layers", report.layers},
                                 {"prompt_tokens", report.prompt_tokens},
                                 {"decode_tokens", report.decode_tokens},
                                 {"chunk", report.chunk},
                                 {"workers", report.workers},
                                 {"notes", report.notes}};
  for (const LinkReport& link : report.links) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Row& row : link.rows) {
      nlohmann::ordered_json samples = nlohmann::ordered_json::array();
      for (const Sample& sample : row.samples) {
        nlohmann::ordered_json one;
        for (const Column& column : kTimes) one[column.name] = sample.*column.field;
        one["link_bytes"] = sample.link_bytes;
        one["dropped"] = sample.dropped;
        samples.push_back(std::move(one));
      }
      rows.push_back({{"codec", row.codec},
                      {"spec", row.spec},
                      {"lag", row.lag},
                      {"bytes", row.bytes},
                      {"bytes_of_raw", row.raw_bytes_ratio},
                      {"job_of_raw", row.raw_job_ratio},
                      {"hidden", row.Hidden()},
                      {"samples", std::move(samples)}});
    }
    json["links"].push_back({{"name", link.name}, {"bits_per_s", link.bits_per_s}, {"rows", std::move(rows)}});
  }
  return json;
}

std::string Chart(const Report& report) {
  const std::vector<std::string> parts = {"prefill", "encoding, its share of prefill", "decode waits", "decode"};
  std::vector<BarGroup> groups;
  for (const LinkReport& link : report.links) {
    BarGroup group{absl::StrFormat("%s (%.4g Mbit/s)", link.name, link.bits_per_s / 1e6), {}};
    for (const Row& row : link.rows) {
      const double prefill = row.Median(&Sample::prefill);
      const double encode = std::min(prefill, row.Median(&Sample::encode) / std::max(report.workers, 1));
      group.bars.push_back(
          {absl::StrCat(row.codec, row.codec == "raw" ? "" : absl::StrCat(", lag ", row.lag)),
           {prefill - encode, encode, std::max(0.0, row.Median(&Sample::wait)), row.Median(&Sample::decode)},
           absl::StrFormat("%.3f of raw's", row.raw_job_ratio)});
    }
    groups.push_back(std::move(group));
  }
  return StackedBarsSvg(absl::StrFormat("A request of %d prompt tokens, until token %d behind them is known",
                                        report.prompt_tokens, report.decode_tokens),
                        "seconds", parts, groups);
}

}  // namespace kvmanager::bench
