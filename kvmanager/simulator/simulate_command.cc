#include "kvmanager/simulator/simulate_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "codecs/builtin.h"
#include "codecs/registry.h"
#include "kvmanager/base/byte_text.h"
#include "kvmanager/base/exit_code.h"
#include "kvmanager/base/status.h"
#include "kvmanager/simulator/replay.h"
#include "kvmanager/simulator/simulate_report.h"
#include "kvmanager/simulator/trace.h"

namespace kvmanager::simulator {
namespace {

constexpr char kHelp[] =
    "Replay a trace of requests through the daemon's eviction policies: how many blocks would hit? Needs no daemon.\n\n"
    "  kvctl simulate --trace trace.jsonl --tier host=64GiB\n"
    "  kvctl simulate --trace trace.jsonl --tier host=64GiB --tier disk=1TiB --policy all --svg hits.svg\n"
    "  kvctl simulate --trace trace.jsonl --tier host=64GiB --codec hack:k_bits=3,v_bits=2\n"
    "  kvctl simulate --trace trace.jsonl --tier host=64GiB --block-bytes 1382400 --json\n"
    "  kvctl simulate --trace trace.jsonl --tier host=64GiB --rung-bytes 2488320,1382400\n\n"
    "TRACE. JSON, one request a line; all lines of a file are of one of two kinds:\n"
    "  {\"timestamp\": 0, \"input_length\": 1758, \"output_length\": 500, \"hash_ids\": [0, 1, 2, 3]}\n"
    "  {\"session_id\": \"a\", \"delay\": 250, \"input_length\": 812, \"hash_ids\": [0, 7]}\n"
    "timestamp, ms, which never goes back; hash_ids: an integer for each block of --trace-block-tokens tokens of the\n"
    "prompt, input_length; the last block may not be full, or be left out then. Equal ids are equal tokens from the\n"
    "prompt's beginning on. The second kind is of agents: a line without timestamp begins `delay` ms (0 if missing)\n"
    "after the session's line before; sessions may stand one behind the other. A line that does not fit is refused.\n\n"
    "SIZES. --codec NAME[:key=value,...] says what a block takes for the model of --layers, --kv-heads and --head-dim\n"
    "(by default 32, 8, 128: Llama-3.1-8B). --block-bytes says it itself, for codecs that need an artifact:\n"
    "block tokens x layers x KV heads x bytes per token and head (docs/codecs.md).\n\n"
    "LADDERS. With --codec 'ladder=A>B' the highest tier encodes cold blocks again by B, in fewer bytes, before it\n"
    "evicts any. --rung-bytes says what a block takes on each rung. Hits are counted by the rung that they were on.\n\n"
    "POLICIES. lru, s3fifo and cost are kvmanagerd --eviction; arc is there to compare with; optimum knows the "
    "future:\n"
    "the block whose next use is furthest goes first, the end of a chain before its beginning. Of policies that store\n"
    "each block that was computed none has more hits in one tier. cost begins with no knowledge in each run and "
    "learns\n"
    "as it goes; the table shows both halves of the trace.\n\n"
    "RESULTS. hits: of all blocks that requests name, those of the longest prefix that is there; then each tier's\n"
    "share. down, up: bytes copied to a lower tier and back. TTFT: tokens that did not hit at --prefill-rate, and "
    "lower\n"
    "tiers read at --read-rate; queues are not modelled. Requests are replayed one after the other.";

// NAME=REST.
absl::StatusOr<std::pair<std::string, std::string>> SplitName(const char* flag, const std::string& text,
                                                              const char* wanted) {
  const size_t at = text.find('=');
  if (at == 0 || at == std::string::npos) return InvalidField(flag, text, wanted);
  return std::make_pair(text.substr(0, at), text.substr(at + 1));
}

absl::StatusOr<std::vector<TierOptions>> Tiers(const SimulateArguments& arguments) {
  std::vector<TierOptions> tiers;
  for (const std::string& text : arguments.tiers) {
    KV_ASSIGN_OR_RETURN(const auto named, SplitName("--tier", text, "NAME=BYTES, such as host=64GiB"));
    TierOptions tier{.name = named.first};
    KV_ASSIGN_OR_RETURN(tier.bytes, ParseBytes("--tier", named.second));
    for (const TierOptions& other : tiers) {
      if (other.name == tier.name) return InvalidField("--tier", text, "names that differ");
    }
    tiers.push_back(std::move(tier));
  }
  for (const std::string& text : arguments.read_rates) {
    KV_ASSIGN_OR_RETURN(const auto named, SplitName("--read-rate", text, "NAME=BYTES a second, such as disk=3GiB"));
    KV_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes("--read-rate", named.second));
    const auto tier =
        std::find_if(tiers.begin(), tiers.end(), [&](const TierOptions& each) { return each.name == named.first; });
    if (tier == tiers.end()) return InvalidField("--read-rate", text, "the name of a --tier");
    tier->read_bytes_per_s = static_cast<double>(bytes);
  }
  return tiers;
}

absl::StatusOr<std::vector<std::string>> Policies(const SimulateArguments& arguments, bool ladder) {
  std::vector<std::string> policies;
  for (const std::string& text : arguments.policies) {
    for (const absl::string_view name : absl::StrSplit(text, ',')) {
      const bool all = name == "all";
      if (!all && std::find(std::begin(kPolicies), std::end(kPolicies), name) == std::end(kPolicies)) {
        return InvalidField("--policy", name, "lru, s3fifo, cost, arc, optimum or all");
      }
      for (const char* const each : kPolicies) {
        const bool has = std::find(policies.begin(), policies.end(), each) != policies.end();
        const bool left_out = all && ladder && absl::string_view(each) == "optimum";  // its blocks have one size
        if ((all || name == each) && !has && !left_out) policies.push_back(each);
      }
    }
  }
  if (policies.empty()) {
    policies = {"lru", "cost"};
    if (!ladder) policies.push_back("optimum");
  }
  return policies;
}

// What a block takes, on each rung of a ladder.
absl::StatusOr<std::vector<uint64_t>> RungBytes(const SimulateArguments& arguments) {
  std::vector<uint64_t> rungs;
  if (!arguments.block_bytes.empty()) {
    if (!arguments.rung_bytes.empty()) {
      return InvalidField("--block-bytes", arguments.block_bytes, "given without --rung-bytes");
    }
    KV_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes("--block-bytes", arguments.block_bytes));
    if (bytes == 0) return InvalidField("--block-bytes", "0", "1 or more");
    return std::vector<uint64_t>{bytes};
  }
  for (const std::string& text : arguments.rung_bytes) {
    KV_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes("--rung-bytes", text));
    if (bytes == 0) return InvalidField("--rung-bytes", "0", "1 or more");
    rungs.push_back(bytes);
  }
  if (rungs.size() == 1) {
    return InvalidField("--rung-bytes", arguments.rung_bytes.front(), "two or more; --block-bytes is of one");
  }
  if (!rungs.empty()) return rungs;
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  CodecContext context;
  context.layout.kv_heads = static_cast<uint16_t>(arguments.kv_heads);
  context.layout.head_dim = static_cast<uint16_t>(arguments.head_dim);
  context.layout.page_tokens = static_cast<uint16_t>(arguments.page_tokens);
  context.layers = arguments.layers;
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Codec> codec, registry.Create(arguments.codec, context));
  const uint64_t page_tokens = static_cast<uint64_t>(arguments.page_tokens);
  for (int rung = 0; rung < codec->rungs(); ++rung) {
    uint64_t page_bytes = 0;  // of a page in all layers
    for (int layer = 0; layer < arguments.layers; ++layer) page_bytes += codec->rung(rung).info().page_bytes(layer);
    rungs.push_back((arguments.trace_block_tokens * page_bytes + page_tokens - 1) / page_tokens);
  }
  return rungs;
}

// What is asked for, before the trace is read.
struct Simulation {
  SimulateReport report;
  std::vector<ReplayOptions> runs;
};

absl::StatusOr<Simulation> SimulationOf(SimulateArguments arguments) {
  if (arguments.tiers.empty()) arguments.tiers = {"host=64GiB"};
  if (arguments.head_dim % 16 != 0) return InvalidField("--head-dim", arguments.head_dim, "a multiple of 16");
  if (arguments.page_tokens % 16 != 0) return InvalidField("--page-tokens", arguments.page_tokens, "a multiple of 16");
  Simulation simulation;
  SimulateReport& report = simulation.report;
  report.trace = arguments.trace;
  KV_ASSIGN_OR_RETURN(report.tiers, Tiers(arguments));
  KV_ASSIGN_OR_RETURN(report.rung_bytes, RungBytes(arguments));
  const bool ladder = report.rung_bytes.size() > 1;
  KV_ASSIGN_OR_RETURN(const std::vector<std::string> policies, Policies(arguments, ladder));
  report.block_tokens = arguments.trace_block_tokens;
  report.prefill_tokens_per_s = arguments.prefill_rate;
  for (const std::string& policy : policies) {
    simulation.runs.push_back({.tiers = report.tiers,
                               .policy = policy,
                               .block_bytes = report.rung_bytes.front(),
                               .lower_rung_bytes = {report.rung_bytes.begin() + 1, report.rung_bytes.end()},
                               .lowerable_share = arguments.lowerable_share,
                               .block_tokens = report.block_tokens,
                               .prefill_tokens_per_s = report.prefill_tokens_per_s,
                               .writes_named = arguments.writes_named,
                               .least_chance = arguments.least_chance});
    KV_RETURN_IF_ERROR(CheckReplay(simulation.runs.back()));
  }
  return simulation;
}

// A line on stderr that is written over, where that is a terminal; else a line for each tenth.
class Progress {
 public:
  explicit Progress(bool quiet) : quiet_(quiet), terminal_(isatty(STDERR_FILENO) != 0) {}
  void Show(const std::string& what, size_t done, size_t all) {
    const size_t percent = all == 0 ? 100 : done * 100 / all;
    if (quiet_ || (what == what_ && percent < next_)) return;
    what_ = what;
    next_ = percent + (terminal_ ? 1 : 10);
    std::fprintf(stderr, terminal_ ? "\r%s: %3zu%%\033[K" : "%s: %zu%%\n", what.c_str(), percent);
  }
  void End() {
    if (!quiet_ && terminal_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  const bool quiet_, terminal_;
  std::string what_;
  size_t next_ = 0;
};

}  // namespace

void AddSimulateOptions(CLI::App& app, SimulateArguments& a) {
  app.description(kHelp);
  app.add_option("--trace", a.trace, "the trace, JSONL")->type_name("FILE")->required();
  app.add_option("--tier", a.tiers, "a tier and its size, the highest first; may be repeated (default host=64GiB)")
      ->type_name("NAME=BYTES");
  app.add_option("--policy", a.policies,
                 "lru, s3fifo, cost, arc, optimum or all; may be repeated (default lru,cost,optimum)")
      ->type_name("NAME[,NAME...]");
  app.add_option("--codec", a.codec, "the codec that says what a block takes")->capture_default_str();
  app.add_option("--block-bytes", a.block_bytes, "what a block takes, in place of --codec")->type_name("BYTES");
  app.add_option("--rung-bytes", a.rung_bytes, "what a block takes on each rung of a ladder, in place of --codec")
      ->delimiter(',')
      ->type_name("BYTES,BYTES[,...]");
  app.add_option("--lowerable-share", a.lowerable_share,
                 "of a ladder: blocks are lowered before others are evicted while those that can be take more than "
                 "this share of the bytes; 0..1, a daemon has the default")
      ->capture_default_str();
  app.add_option("--layers", a.layers, "of the model")->check(CLI::Range(1, 1024))->capture_default_str();
  app.add_option("--kv-heads", a.kv_heads, "of the model")
      ->check(CLI::Range(1, PageLayout::kKvHeadsMax))
      ->capture_default_str();
  app.add_option("--head-dim", a.head_dim, "of the model, a multiple of 16")
      ->check(CLI::Range(PageLayout::kHeadDimMin, PageLayout::kHeadDimMax))
      ->capture_default_str();
  app.add_option("--page-tokens", a.page_tokens, "of a page, a multiple of 16")
      ->check(CLI::Range(PageLayout::kPageTokensMin, PageLayout::kPageTokensMax))
      ->capture_default_str();
  app.add_option("--trace-block-tokens", a.trace_block_tokens, "tokens of the trace's blocks")
      ->check(CLI::Range(uint64_t{1}, Trace::kBlockTokensMax))
      ->capture_default_str();
  app.add_option("--prefill-rate", a.prefill_rate, "tokens a second that the engine computes")
      ->check(CLI::Range(1e-3, 1e12))
      ->capture_default_str();
  app.add_option("--read-rate", a.read_rates, "bytes a second that a lower tier is read with (default: no time)")
      ->type_name("NAME=BYTES");
  app.add_flag("--write-named", a.writes_named,
               "with a second --tier: it gets each block when it was computed, as the daemon's disk does, and not when "
               "the first one evicts it");
  app.add_option("--least-chance", a.least_chance,
                 "with --policy cost and a second --tier: what is less likely to be used again before it would go from "
                 "there is not copied there, once that is full; 0..1")
      ->capture_default_str();
  app.add_flag("--full-blocks", a.full_blocks,
               "without blocks that a request's tokens do not fill, which a daemon does not name");
  app.add_option("--svg", a.svg, "write a plot of the hit ratio over the trace")->type_name("FILE");
  app.add_flag("--quiet", a.quiet, "no progress on stderr");
}

absl::Status RunSimulate(const SimulateArguments& arguments, bool json) {
  absl::StatusOr<Simulation> simulation = SimulationOf(arguments);
  if (!simulation.ok()) return Misuse(simulation.status());
  SimulateReport& report = simulation->report;
  std::ofstream svg;
  if (!arguments.svg.empty()) {
    svg.open(arguments.svg);
    if (!svg.is_open()) return absl::NotFoundError(absl::StrCat("--svg: ", arguments.svg, " cannot be written"));
  }
  Progress progress(arguments.quiet);
  KV_ASSIGN_OR_RETURN(Trace trace, ReadTraceFile(arguments.trace, arguments.trace_block_tokens, nullptr));
  if (arguments.full_blocks) trace = WithFullBlocks(trace, arguments.trace_block_tokens);
  report.requests = trace.requests.size();
  report.blocks = trace.blocks.size();
  report.distinct = trace.distinct;
  report.seconds = trace.requests.back().at_s - trace.requests.front().at_s;
  report.unlimited = UnlimitedHits(trace);
  for (ReplayOptions& options : simulation->runs) {
    options.progress = [&](size_t requests) { progress.Show(options.policy, requests, trace.requests.size()); };
    KV_ASSIGN_OR_RETURN(ReplayResult result, Replay(trace, options));
    report.runs.push_back({options.policy, std::move(result)});
  }
  progress.End();
  if (svg.is_open()) {
    svg << ReportToSvg(report);
    svg.close();
    if (!svg) return absl::UnavailableError(absl::StrCat("--svg: ", arguments.svg, " cannot be written"));
  }
  const std::string text = json ? ReportToJson(report).dump(2) + "\n" : FormatReport(report);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    return absl::UnavailableError("standard output cannot be written");
  }
  return absl::OkStatus();
}

}  // namespace kvmanager::simulator
