// What `kvctl simulate` shows of its replays: a table, JSON, and a plot.
//
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kvmanager/simulator/replay.h"

namespace kvmanager::simulator {

struct SimulateReport {
  std::string trace;
  uint64_t requests = 0, blocks = 0, distinct = 0;
  double seconds = 0;                // that the trace covers
  std::vector<uint64_t> rung_bytes;  // what a block takes, on each rung of a ladder
  uint64_t block_tokens = 0;
  double prefill_tokens_per_s = 0;
  std::vector<TierOptions> tiers;
  ReplayResult::Part unlimited;
  struct Run {
    std::string policy;
    ReplayResult result;
  };
  std::vector<Run> runs;
};

std::string FormatReport(const SimulateReport& report);
/// Sizes in bytes, times in seconds, ratios of 1.
nlohmann::json ReportToJson(const SimulateReport& report);
/// Hit ratio over the trace's requests, a line per policy.
std::string ReportToSvg(const SimulateReport& report);

}  // namespace kvmanager::simulator
