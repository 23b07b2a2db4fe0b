// The traces that are read, and replays of them: against results worked out by hand, and against all orders of
// eviction.
#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/simulator/optimum.h"
#include "kvmanager/simulator/replay.h"
#include "kvmanager/simulator/trace.h"

namespace kvmanager::simulator {
namespace {

absl::StatusOr<Trace> Read(const std::string& text, uint64_t block_tokens = Trace::kBlockTokens) {
  std::istringstream in(text);
  return ReadTrace(in, block_tokens, nullptr);
}

void ExpectSays(const absl::Status& status, const std::vector<std::string>& words) {
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  for (const std::string& word : words) {
    EXPECT_NE(std::string(status.message()).find(word), std::string::npos) << "no `" << word << "` in: " << status;
  }
}

std::string Line(int64_t timestamp, uint64_t input_length, const std::string& hash_ids) {
  return absl::StrCat("{\"timestamp\": ", timestamp, ", \"input_length\": ", input_length, ", \"hash_ids\": [",
                      hash_ids, "]}\n");
}

TEST(TraceTest, ReadsRequests) {
  const auto trace = Read(
      "{\"timestamp\": 1000, \"input_length\": 512, \"hash_ids\": [70], \"type\": \"x\"}\n\n"
      "{\"timestamp\": 2000, \"input_length\": 1000, \"output_length\": 5, \"hash_ids\": [70, 9]}\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->requests.size(), 2u);
  EXPECT_EQ(trace->distinct, 2u);
  EXPECT_EQ(trace->requests[0].at_s, 1);
  EXPECT_EQ(trace->requests[0].input_tokens, 512u);
  EXPECT_EQ(trace->BlocksOf(trace->requests[1]), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(trace->requests[1].output_tokens, 5u);
}

TEST(TraceTest, ReadsSessionsOfAgents) {
  const auto trace = Read(
      "{\"session_id\": \"a\", \"timestamp\": 100, \"input_length\": 1, \"hash_ids\": [1]}\n"
      "{\"session_id\": 7, \"input_length\": 1, \"hash_ids\": [2]}\n"
      "{\"session_id\": \"a\", \"delay\": 50, \"input_length\": 600, \"hash_ids\": [1, 3]}\n"
      "{\"session_id\": 7, \"delay\": 120, \"input_length\": 600, \"hash_ids\": [2, 4]}\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  std::vector<double> times;
  for (const TraceRequest& request : trace->requests) times.push_back(request.at_s);
  EXPECT_EQ(times, (std::vector<double>{0, 0.1, 0.12, 0.15}));
}

TEST(TraceTest, MayBeWithoutBlocksThatAreNotFull) {
  const auto trace = Read(
      "{\"timestamp\": 1, \"input_length\": 1000, \"hash_ids\": [7, 8]}\n"
      "{\"timestamp\": 2, \"input_length\": 1024, \"hash_ids\": [7, 9]}\n"
      "{\"timestamp\": 3, \"input_length\": 5, \"hash_ids\": [7]}\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  const Trace full = WithFullBlocks(*trace, 512);
  EXPECT_EQ(full.blocks, (std::vector<uint32_t>{0, 0, 1}));
  EXPECT_EQ(full.distinct, 2u);
  ASSERT_EQ(full.requests.size(), 3u);
  EXPECT_EQ(full.BlocksOf(full.requests[1]), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(full.requests[2].blocks, 0u);
}

TEST(TraceTest, SaysWhatIsWrong) {
  const std::string good = "{\"timestamp\": 1, \"input_length\": 1, \"hash_ids\": [1]}\n";
  const std::pair<const char*, const char*> cases[] = {
      {"nonsense", "line 2"},
      {"{\"input_length\": 1, \"hash_ids\": [1]}", "line 2: timestamp"},
      {"{\"timestamp\": -1, \"input_length\": 1, \"hash_ids\": [1]}", "line 2: timestamp"},
      {"{\"timestamp\": 1, \"hash_ids\": [1]}", "line 2: input_length"},
      {"{\"timestamp\": 1, \"input_length\": -1, \"hash_ids\": [1]}", "line 2: input_length"},
      {"{\"timestamp\": 1, \"input_length\": 1}", "line 2: hash_ids"},
      {"{\"timestamp\": 1, \"input_length\": 1, \"hash_ids\": [\"a\"]}", "line 2: hash_ids"},
      {"{\"timestamp\": 1, \"input_length\": 1300, \"hash_ids\": [1, 2, 1]}", "line 2: hash_ids"},
      {"{\"timestamp\": 1e300, \"input_length\": 1, \"hash_ids\": [1]}", "line 2: timestamp"},
      {"{\"session_id\": 1.5, \"input_length\": 1, \"hash_ids\": [1]}", "line 2: session_id"},
      {"{\"session_id\": {}, \"input_length\": 1, \"hash_ids\": [1]}", "line 2: session_id"}};
  const std::string agent = "{\"session_id\": 1, \"input_length\": 1, \"hash_ids\": [1]}\n";
  for (const auto& [line, field] : cases) {
    const bool of_agent = absl::StrContains(line, "session_id");
    ExpectSays(Read((of_agent ? agent : good) + line).status(), {field});
  }
  EXPECT_TRUE(absl::IsNotFound(ReadTraceFile("/nowhere", 512, nullptr).status()));
}

TEST(TraceTest, LengthsAgreeWithBlocks) {
  // The last block may be full, partly full, or left out if it is not full.
  for (const std::string& line : {Line(0, 1024, "1, 2"), Line(0, 1023, "1, 2"), Line(0, 513, "1, 2"),
                                  Line(0, 1025, "1, 2"), Line(0, 1535, "1, 2"), Line(0, 511, ""), Line(0, 0, "")}) {
    EXPECT_TRUE(Read(line).ok()) << line << Read(line).status();
  }
  const std::string good = Line(0, 512, "1");
  ExpectSays(Read(good + Line(0, 512, "1, 2")).status(),
             {"line 2: input_length is 512, must be 513..1535, as hash_ids has 2 blocks of 512 tokens",
              "--trace-block-tokens", "(256 would fit this line)"});
  ExpectSays(Read(good + Line(0, 1536, "1, 2")).status(), {"line 2: input_length is 1536, must be 513..1535"});
  ExpectSays(Read(good + Line(0, 512, "")).status(), {"line 2: input_length is 512, must be 0..511"});
  ExpectSays(Read(good + Line(0, 0, "1")).status(), {"line 2: input_length is 0, must be 1..1023"});
  ExpectSays(Read(good + Line(0, UINT64_MAX, "1")).status(), {"line 2: input_length is 18446744073709551615"});
  // What a block is, the caller says.
  EXPECT_TRUE(Read(Line(0, 64, "1, 2, 3, 4"), 16).ok());
  ExpectSays(Read(Line(0, 64, "1, 2, 3, 4")).status(), {"must be 1537..2559", "(16 would fit this line)"});
  ExpectSays(Read("{\"session_id\": 1, \"input_length\": 1, \"hash_ids\": [1, 2]}").status(),
             {"line 1: input_length is 1, must be 513..1535"});
}

TEST(TraceTest, TimeDoesNotGoBack) {
  EXPECT_TRUE(Read(Line(5, 1, "1") + Line(5, 1, "2") + Line(6, 1, "3")).ok()) << "equal times are fine";
  ExpectSays(Read(Line(5, 1, "1") + Line(1000000007, 1, "2") + "\n" + Line(1000000006, 1, "3")).status(),
             {"line 4: timestamp is 1000000006, must be 1000000007 or more, the timestamp of line 2", "sort_by"});
  // Sessions may stand one behind the other; within one time goes on.
  const auto of = [](const std::string& session, const std::string& time) {
    return absl::StrCat("{\"session_id\": \"", session, "\", ", time, ", \"input_length\": 1, \"hash_ids\": [1]}\n");
  };
  const std::string first = of("a", "\"timestamp\": 100") + of("a", "\"delay\": 50");
  const auto trace =
      Read(first + of("b", "\"timestamp\": 20") + of("b", "\"timestamp\": 20") + of("b", "\"delay\": 1"));
  ASSERT_TRUE(trace.ok()) << trace.status();
  std::vector<double> times;
  for (const TraceRequest& request : trace->requests) times.push_back(request.at_s);
  EXPECT_EQ(times, (std::vector<double>{0.02, 0.02, 0.021, 0.1, 0.15}));
  ExpectSays(Read(first + of("b", "\"timestamp\": 20") + of("a", "\"timestamp\": 149.5")).status(),
             {"line 4: timestamp is 149.5, must be 150 or more, when the request before of this session_id begins, on "
              "line 2"});
}

TEST(TraceTest, LinesHaveOneFormat) {
  const std::string request = Line(0, 1, "1");
  const std::string agent = "{\"session_id\": \"a\", \"timestamp\": 0, \"input_length\": 1, \"hash_ids\": [1]}\n";
  ExpectSays(Read(request + "\n" + agent).status(), {"line 3: session_id is \"a\", must be absent, as on line 1"});
  ExpectSays(Read("\n" + agent + request).status(), {"line 3: session_id is missing, must be given, as on line 2"});
}

TEST(TraceTest, ErrorsNameTheFile) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/lengths.jsonl");
  std::ofstream(path) << Line(0, 512, "1") << Line(0, 512, "1, 2");
  ExpectSays(ReadTraceFile(path, 512, nullptr).status(), {path + ", line 2: input_length is 512"});
  EXPECT_TRUE(ReadTraceFile(path, 256, nullptr).status().message().find(path + ", line 1: ") == 0)
      << "one block of 256 is too few for 512 tokens";
  EXPECT_TRUE(ReadTraceFile(path, 400, nullptr).ok());
  std::ofstream(path) << "[\n" << Line(0, 512, "1") << "]\n";
  ExpectSays(ReadTraceFile(path, 512, nullptr).status(), {path + ", line 1 is \"[\", must be a JSON object"});
}

// A line nests as deep as it is long.
TEST(TraceTest, WhatNestsIsRefusedOrIgnored) {
  constexpr size_t kDepth = 1 << 20;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  const std::map<std::string, std::string> good = {
      {"session_id", "1"}, {"timestamp", "1"}, {"input_length", "1"}, {"hash_ids", "[1]"}, {"other", "1"}};
  for (const auto& [field, value] : good) {
    std::string line;
    for (const auto& [each, usual] : good) {
      absl::StrAppend(&line, line.empty() ? "{" : ",", "\"", each, "\":", each == field ? deep : usual);
    }
    const absl::Status status = Read(line + "}").status();
    EXPECT_EQ(status.ok(), field == "other") << field;
    EXPECT_LT(status.message().size(), 300u) << field;
  }
}

Trace TraceOf(const std::vector<std::vector<uint32_t>>& requests) {
  Trace trace;
  for (const std::vector<uint32_t>& blocks : requests) {
    TraceRequest request{.input_tokens = blocks.size() * 512, .first = trace.blocks.size(), .blocks = blocks.size()};
    trace.blocks.insert(trace.blocks.end(), blocks.begin(), blocks.end());
    for (const uint32_t block : blocks) trace.distinct = std::max<size_t>(trace.distinct, block + 1);
    trace.requests.push_back(request);
  }
  return trace;
}

ReplayResult ReplayIn(const Trace& trace, const std::string& policy, std::vector<uint64_t> tiers) {
  ReplayOptions options;
  for (const uint64_t blocks : tiers) options.tiers.push_back({absl::StrCat("tier", options.tiers.size()), blocks});
  options.policy = policy;
  const auto result = Replay(trace, options);
  EXPECT_TRUE(result.ok()) << result.status();
  return *result;
}

TEST(ReplayTest, CountsAsByHand) {
  // Four blocks. The third request evicts 2, the end of the first chain; the last finds 0 and 1 alone.
  const Trace trace = TraceOf({{0, 1, 2}, {3}, {4}, {0, 1, 2}});
  const ReplayResult lru = ReplayIn(trace, "lru", {4});
  EXPECT_EQ(lru.all.blocks, 8u);
  EXPECT_EQ(lru.all.hit_blocks, 2u);
  EXPECT_EQ(lru.halves[0].hit_blocks, 0u);
  EXPECT_EQ(lru.tiers[0].evicted_blocks, 2u);
  // One block is computed: 512 tokens at 10,000 a second.
  EXPECT_DOUBLE_EQ(lru.ttft_p50_s, 0.0512);
  EXPECT_EQ(ReplayIn(trace, "optimum", {4}).all.hit_blocks, 3u);  // it evicts 3
  EXPECT_EQ(UnlimitedHits(trace).hit_blocks, 3u);
}

TEST(ReplayTest, ALowerTierHasWhatWasEvicted) {
  const Trace trace = TraceOf({{0, 1, 2}, {3, 4, 5}, {0, 1, 2}, {3, 4, 5}});
  const ReplayResult result = ReplayIn(trace, "lru", {3, 6});
  EXPECT_EQ(result.all.hit_blocks, 6u);
  EXPECT_EQ(result.tiers[0].hit_blocks, 0u);
  EXPECT_EQ(result.tiers[1].hit_blocks, 6u);
  EXPECT_EQ(result.tiers[1].fetched_blocks, 6u);
  EXPECT_EQ(result.tiers[0].demoted_blocks, 6u);  // once each: the lower tier keeps what is fetched
}

TEST(ReplayTest, TheSecondTierMayGetWhatIsNamed) {
  const Trace trace = TraceOf({{0, 1, 2}, {3, 4, 5}, {0, 1, 2}});
  ReplayOptions options{.tiers = {{"host", 9}, {"disk", 9}}, .policy = "lru", .writes_named = true};
  const auto result = Replay(trace, options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->tiers[0].hit_blocks, 3u);
  EXPECT_EQ(result->tiers[0].demoted_blocks, 6u);  // each once
  EXPECT_EQ(result->tiers[0].evicted_blocks, 0u);
}

// Conversations whose turns return, each once, soon, and prompts that never do.
TEST(ReplayTest, WhatWillHardlyReturnIsNotCopied) {
  std::vector<std::vector<uint32_t>> requests;
  uint32_t next = 0;
  for (int round = 0; round < 3000; ++round) {
    const uint32_t talk = next, prompt = next + 6;
    next += 12;
    requests.push_back({talk, talk + 1, talk + 2});
    requests.push_back({prompt, prompt + 1, prompt + 2, prompt + 3, prompt + 4, prompt + 5});
    requests.push_back({talk, talk + 1, talk + 2, talk + 3, talk + 4, talk + 5});
  }
  const Trace trace = TraceOf(requests);
  ReplayOptions options{.tiers = {{"host", 8}, {"disk", 80}}, .policy = "cost"};
  const auto all = Replay(trace, options);
  options.least_chance = 0.1;
  const auto some = Replay(trace, options);
  ASSERT_TRUE(all.ok() && some.ok()) << all.status() << some.status();
  EXPECT_EQ(all->tiers[0].refused_blocks, 0u);
  EXPECT_GT(some->tiers[0].refused_blocks, all->tiers[0].demoted_blocks / 5);
  EXPECT_LT(some->tiers[0].demoted_blocks, all->tiers[0].demoted_blocks * 4 / 5);
  EXPECT_GT(some->all.ratio(), all->all.ratio() - 0.02);
  std::printf("copied %llu of %llu blocks, hits %.3f and %.3f\n",
              static_cast<unsigned long long>(some->tiers[0].demoted_blocks),
              static_cast<unsigned long long>(all->tiers[0].demoted_blocks), some->all.ratio(), all->all.ratio());
}

TEST(ReplayTest, WhatIsOfASecondTierNeedsOne) {
  const Trace trace = TraceOf({{0}});
  ReplayOptions options{.tiers = {{"host", 9}}, .policy = "cost", .writes_named = true};
  ExpectSays(Replay(trace, options).status(), {"--write-named is given with one tier", "a second --tier"});
  options.writes_named = false;
  options.least_chance = 0.5;
  ExpectSays(Replay(trace, options).status(), {"--least-chance is 0.5 with one tier", "a second --tier"});
  options.tiers.push_back({"disk", 9});
  options.writes_named = true;
  EXPECT_TRUE(Replay(trace, options).ok());
}

TEST(ReplayTest, ARequestThatDoesNotFitStoresNothing) {
  const Trace trace = TraceOf({{0, 1}, {2, 3, 4, 5}, {0, 1}});
  const ReplayResult result = ReplayIn(trace, "cost", {3});
  EXPECT_EQ(result.refused_requests, 1u);
  EXPECT_EQ(result.all.hit_blocks, 2u);
}

TEST(ReplayTest, RefusesWhatMakesNoSense) {
  const Trace trace = TraceOf({{0}});
  ReplayOptions options;
  EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status()));
  options.tiers = {{"host", 100}};
  options.block_bytes = 101;
  EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status()));
  options.block_bytes = 1;
  options.policy = "fifo";
  EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status()));
  options.policy = "lru";
  options.least_chance = 0.1;
  EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status())) << "it learns no chances";
  options.policy = "cost";
  options.least_chance = 1.5;
  EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status()));
}

ReplayResult ReplayLadder(const Trace& trace, const std::string& policy, std::vector<uint64_t> tiers,
                          double share = kLowerableShare) {
  ReplayOptions options{.policy = policy, .block_bytes = 4, .lower_rung_bytes = {2}, .lowerable_share = share};
  for (const uint64_t bytes : tiers) options.tiers.push_back({absl::StrCat("tier", options.tiers.size()), bytes});
  const auto result = Replay(trace, options);
  EXPECT_TRUE(result.ok()) << result.status();
  return *result;
}

TEST(LadderTest, LowersHalfAndEvictsTheRestAsByHand) {
  // The fourth lowers 0 and 1. 0 hits on rung 1. The sixth lowers 2 and evicts 1; the seventh lowers 3 and evicts 2.
  const Trace trace = TraceOf({{0}, {1}, {2}, {3}, {0}, {4}, {1}, {1}});
  const ReplayResult result = ReplayLadder(trace, "lru", {12});
  EXPECT_EQ(result.all.hit_blocks, 2u);
  ASSERT_EQ(result.rungs.size(), 2u);
  EXPECT_EQ(result.rungs[1].hit_blocks, 1u);
  EXPECT_EQ(result.rungs[0].hit_blocks, 1u);  // what was evicted and computed again
  EXPECT_EQ(result.rungs[1].lowered_blocks, 4u);
  EXPECT_EQ(result.tiers[0].evicted_blocks, 2u);
}

TEST(LadderTest, ALowerTierHasBlocksOnTheirRung) {
  const Trace trace = TraceOf({{0}, {1}, {2}, {3}, {4}, {0}});
  const ReplayResult result = ReplayLadder(trace, "lru", {12, 12});
  EXPECT_EQ(result.tiers[1].hit_blocks, 1u);
  EXPECT_EQ(result.rungs[1].hit_blocks, 1u);
  EXPECT_EQ(result.tiers[0].demoted_bytes, 2u);
  EXPECT_EQ(result.tiers[1].fetched_bytes, 2u);
}

TEST(LadderTest, ItsHitsAreBetweenThoseOfItsRungs) {
  const Trace trace = MakeTrace(5, 3000);
  for (const char* const policy : {"lru", "s3fifo", "cost", "arc"}) {
    const auto alone = [&](uint64_t bytes) {
      const auto result = Replay(trace, {.tiers = {{"host", 1600}}, .policy = policy, .block_bytes = bytes});
      EXPECT_TRUE(result.ok()) << result.status();
      return result->all.hit_blocks;
    };
    const ReplayResult ladder = ReplayLadder(trace, policy, {1600});
    EXPECT_GT(ladder.all.hit_blocks, alone(4)) << policy;
    EXPECT_LT(ladder.all.hit_blocks, alone(2)) << policy;
    EXPECT_EQ(ladder.rungs[0].hit_blocks + ladder.rungs[1].hit_blocks, ladder.all.hit_blocks);
    EXPECT_GT(ladder.rungs[1].hit_blocks, 0u) << policy;
    // Nothing is lowered.
    EXPECT_EQ(ReplayLadder(trace, policy, {1600}, /*share=*/1).all.hit_blocks, alone(4)) << policy;
  }
}

TEST(LadderTest, RefusesRungsThatMakeNoSense) {
  const Trace trace = TraceOf({{0}});
  ReplayOptions options{.tiers = {{"host", 100}}, .block_bytes = 10};
  for (const std::vector<uint64_t>& lower :
       std::vector<std::vector<uint64_t>>{{10}, {0}, {5, 6}, {9, 8, 7, 6, 5, 4, 3, 2}}) {
    options.lower_rung_bytes = lower;
    EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status())) << lower[0];
  }
  options.lower_rung_bytes = {5};
  EXPECT_TRUE(Replay(trace, options).ok());
  options.lowerable_share = 1.5;
  EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status()));
  options.lowerable_share = 0.5;
  options.policy = "optimum";
  EXPECT_TRUE(absl::IsInvalidArgument(Replay(trace, options).status()));
}

// Hits of the best choice of victims, by trying all. State: the blocks that are there.
size_t BestHits(const Trace& trace, size_t capacity) {
  std::map<std::pair<size_t, std::set<uint32_t>>, size_t> known;
  std::function<size_t(size_t, const std::set<uint32_t>&)> best = [&](size_t at, const std::set<uint32_t>& here) {
    if (at == trace.requests.size()) return size_t{0};
    const auto found = known.find({at, here});
    if (found != known.end()) return found->second;
    const auto blocks = trace.BlocksOf(trace.requests[at]);
    size_t hits = 0;
    while (hits < blocks.size() && here.count(blocks[hits]) > 0) ++hits;
    std::set<uint32_t> wanted = here;
    wanted.insert(blocks.begin(), blocks.end());
    std::vector<uint32_t> others;
    for (const uint32_t block : wanted) {
      if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) others.push_back(block);
    }
    size_t most = 0;
    for (uint32_t mask = 0; mask < (1u << others.size()); ++mask) {  // which of the others stay
      std::set<uint32_t> after(blocks.begin(), blocks.end());
      for (size_t i = 0; i < others.size(); ++i) {
        if (mask >> i & 1) after.insert(others[i]);
      }
      if (after.size() <= capacity) most = std::max(most, best(at + 1, after));
    }
    return known[{at, here}] = hits + most;
  };
  return best(0, {});
}

TEST(OptimumTest, NoChoiceOfVictimsHasMoreHits) {
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    // Chains of a tree: 0 is everybody's, 1 and 2 below it, and so on.
    const std::vector<std::vector<uint32_t>> paths = {{0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {0, 2}, {6, 7}, {0, 1}};
    std::vector<std::vector<uint32_t>> requests;
    uint32_t random = seed * 2654435761u;
    for (int i = 0; i < 10; ++i) {
      random = random * 1664525u + 1013904223u;
      requests.push_back(paths[(random >> 16) % paths.size()]);
    }
    const Trace trace = TraceOf(requests);
    for (const size_t capacity : {3, 4, 5}) {
      EXPECT_EQ(ReplayIn(trace, "optimum", {capacity}).all.hit_blocks, BestHits(trace, capacity))
          << seed << " " << capacity;
    }
  }
}

TEST(ReplayTest, EveryPolicyIsBetweenNothingAndTheOptimum) {
  const Trace trace = MakeTrace(5, 3000);
  const double best = ReplayIn(trace, "optimum", {800}).all.ratio();
  EXPECT_LT(best, UnlimitedHits(trace).ratio());
  std::map<std::string, double> ratio;
  for (const char* const policy : kPolicies) {
    const ReplayResult result = ReplayIn(trace, policy, {800});
    ratio[policy] = result.all.ratio();
    EXPECT_LE(ratio[policy], best) << policy;
    EXPECT_GT(ratio[policy], 0.03) << policy;
    EXPECT_EQ(result.refused_requests, 0u) << policy;
  }
  EXPECT_GT(ratio["cost"], ratio["lru"]);
}

}  // namespace
}  // namespace kvmanager::simulator
