// What the benchmark found: medians over repeats as a table, everything as JSON, the parts of each request as a chart.
// Values; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace kvmanager::bench {

/// One request, in seconds; `alone` is the same hand-off sent behind the prefill in one piece.
struct Sample {
  double prefill = 0, encode = 0, exposed = 0, wait = 0, decode = 0, job = 0, alone = 0;
  uint64_t link_bytes = 0;  // that left the prefill host's interface while it was streamed
  uint64_t dropped = 0;     // packets, because the link's queue was full
};

/// A codec over a link.
struct Row {
  std::string codec, spec;  // as in tables; canonical
  int lag = 0;
  uint64_t bytes = 0;                             // of pages: the same in every repeat
  double raw_bytes_ratio = 0, raw_job_ratio = 0;  // to raw's over the same link
  std::vector<Sample> samples;

  double Median(double Sample::*field) const;
  /// 1 - exposed / alone, of their medians: the share of the transfer that prefill hides.
  double Hidden() const;
  /// The share of the link's rate at which the pages went behind the prefill.
  double LinkUse(double bits_per_s) const;
};

struct LinkReport {
  std::string name;
  double bits_per_s = 0;
  std::vector<Row> rows;
};

struct Report {
  std::string model, machine;   // in words
  int layers = 0, workers = 0;  // workers: threads of the prefill daemon that encode
  uint64_t prompt_tokens = 0;
  int decode_tokens = 0, chunk = 0;
  std::vector<LinkReport> links;
  std::vector<std::string> notes;  // what was left out, and why
};

/// Ratios to the row called "raw" of each link; 0 where there is none.
void AddRatios(Report* report);
std::string MarkdownTables(const Report& report);
nlohmann::ordered_json ToJson(const Report& report);
std::string Chart(const Report& report);

}  // namespace kvmanager::bench
