// `kvctl simulate`: replays a trace of requests through the daemon's eviction policies. Needs no daemon.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/eviction/ladder_share.h"

namespace CLI {
class App;
}

namespace kvmanager::simulator {

struct SimulateArguments {
  std::string trace, codec = "raw", block_bytes, svg;
  std::vector<std::string> tiers, policies, read_rates, rung_bytes;
  int layers = 32, kv_heads = 8, head_dim = 128, page_tokens = 64;
  uint64_t trace_block_tokens = 512;
  double prefill_rate = 10000;
  double least_chance = 0, lowerable_share = kLowerableShare;
  bool writes_named = false, full_blocks = false;
  bool quiet = false;
};

/// Adds the subcommand's options and its help to `app`, which fill `arguments`.
void AddSimulateOptions(CLI::App& app, SimulateArguments& arguments);

/// Runs it: the table, or JSON, on stdout, progress on stderr. Errors: those of files; those of options and codecs, as
/// misuses (exit_code.h).
absl::Status RunSimulate(const SimulateArguments& arguments, bool json);

}  // namespace kvmanager::simulator
