// A trace of requests, of either format, and what replaying it makes of it.
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "kvmanager/simulator/replay.h"
#include "kvmanager/simulator/trace.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/target_util.h"

namespace kvmanager::fuzz {
namespace {

using simulator::ReplayOptions;
using simulator::ReplayResult;
using simulator::Trace;
using simulator::TraceRequest;

/// The first byte chooses the policy, how many tiers there are and how many blocks each has.
class TraceTarget final : public FuzzTarget {
 public:
  std::vector<std::string> Seeds() override {
    const std::string requests =
        R"({"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1e3, "input_length": 3, "hash_ids": []}

{"timestamp": 1000.5, "input_length": 2048, "hash_ids": [0, 1, 2, 4]}
{"timestamp": 27482, "input_length": 900, "output_length": 0, "hash_ids": [0, 3], "type": "text"}
)";
    const std::string agents =
        R"({"session_id": "a", "timestamp": 100, "input_length": 513, "hash_ids": [-1, 9223372036854775807]}
{"session_id": 7, "input_length": 1, "hash_ids": [18446744073709551615]}
{"session_id": "a", "delay": 50, "input_length": 1700, "output_length": 3, "hash_ids": [-1, 9223372036854775807, 5]}
{"session_id": 7, "delay": 0.25, "input_length": 1024, "hash_ids": [2, 4]}
)";
    std::vector<std::string> seeds;
    for (char policy = 'a'; policy < 'a' + 15; ++policy) {
      seeds.push_back(policy + requests);
      seeds.push_back(policy + agents);
    }
    seeds.push_back("a" + requests + agents);  // of two formats: refused
    return seeds;
  }
  void Run(absl::Span<const uint8_t> input) override {
    if (input.empty()) return;
    std::istringstream in{std::string(TextOf(input.subspan(1)))};
    const absl::StatusOr<Trace> trace = simulator::ReadTrace(in, Trace::kBlockTokens, nullptr);
    MustExplain(trace.status());
    if (!trace.ok()) return;
    MustHold(*trace);
    if (trace->blocks.empty()) return;  // ReadTraceFile refuses it
    constexpr size_t kPolicies = std::size(simulator::kPolicies);
    ReplayOptions options{.policy = simulator::kPolicies[input[0] % kPolicies]};
    for (size_t tier = 0; tier <= input[0] / kPolicies % 3; ++tier) options.tiers.push_back({"tier", 3 + 2 * tier, 1});
    const absl::StatusOr<ReplayResult> result = Replay(*trace, options);
    KV_CHECK(result.ok());
    KV_CHECK(result->all.blocks == trace->blocks.size());
    KV_CHECK(result->all.hit_blocks <= UnlimitedHits(*trace).hit_blocks);
    KV_CHECK(std::isfinite(result->ttft_mean_s) && std::isfinite(result->ttft_p99_s));
    uint64_t hits = 0;
    for (const ReplayResult::Tier& tier : result->tiers) hits += tier.hit_blocks;
    KV_CHECK(hits == result->all.hit_blocks);
  }

 private:
  static void MustHold(const Trace& trace) {
    std::vector<size_t> named_by(trace.distinct, SIZE_MAX);
    double last_s = 0;
    size_t blocks = 0;
    for (size_t i = 0; i < trace.requests.size(); ++i) {
      const TraceRequest& request = trace.requests[i];
      KV_CHECK(std::isfinite(request.at_s) && request.at_s >= last_s);
      last_s = request.at_s;
      blocks += request.blocks;
      for (const uint32_t number : trace.BlocksOf(request)) {
        KV_CHECK(number < trace.distinct);
        KV_CHECK(named_by[number] != i);
        named_by[number] = i;
      }
    }
    KV_CHECK(blocks == trace.blocks.size());
    for (const size_t request : named_by) KV_CHECK(request != SIZE_MAX);
  }
};

}  // namespace

std::unique_ptr<FuzzTarget> MakeTraceTarget() { return std::make_unique<TraceTarget>(); }

}  // namespace kvmanager::fuzz
