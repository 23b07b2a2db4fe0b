// A trace replayed through a real daemon has the hits that the simulator foretells: both run the same policies.
//
// KVMANAGER_TRACE=FILE replays that trace, whole, in place of one that is made up; pages are small whatever the trace's
// blocks stand for.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/eviction/eviction_policy.h"
#include "kvmanager/simulator/replay.h"
#include "kvmanager/simulator/trace.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using simulator::Replay;
using simulator::ReplayOptions;
using simulator::ReplayResult;
using simulator::Trace;
using simulator::TraceRequest;

constexpr int kPageTokens = 16, kHeadDim = 32;
constexpr uint64_t kBlockBytes = 2 * kPageTokens * kHeadDim * 2;  // K and V of one layer and head
constexpr double kPoint = 0.01;

CacheOptions TinyCache() {
  CacheOptions options;
  options.model = "trace";
  options.layers = 1;
  options.kv_heads = 1;
  options.query_heads = 1;
  options.head_dim = kHeadDim;
  options.page_tokens = kPageTokens;
  options.codec = "raw";
  return options;
}

// Blocks that hit in a daemon with such a pool, of each request in turn.
absl::StatusOr<ReplayResult::Part> ReplayThroughDaemon(const Trace& trace, const std::string& policy,
                                                       uint64_t pool_bytes) {
  DaemonOptions daemon_options;
  daemon_options.host_pool_bytes = pool_bytes;
  daemon_options.more_flags = {"--eviction", policy, "--quality-sample", "0", "--slab-bytes", "2MiB"};
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<DaemonProcess> daemon, DaemonProcess::Start(daemon_options));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(daemon->listen(), {}));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<client::Cache> cache, client->OpenCache(TinyCache()));
  ReplayResult::Part part;
  std::vector<uint32_t> tokens;
  std::vector<BlockName> names;
  std::vector<uint8_t> zeros;
  for (const TraceRequest& request : trace.requests) {
    tokens.clear();
    for (const uint32_t block : trace.BlocksOf(request)) {
      for (uint32_t i = 0; i < kPageTokens; ++i) tokens.push_back(block * kPageTokens + i);
    }
    names.clear();
    NameBlocks(cache->description().digest, tokens, kPageTokens, &names);
    KV_ASSIGN_OR_RETURN(const CreatedSequence made, cache->CreateSequence(names));
    part.blocks += names.size();
    part.hit_blocks += static_cast<uint64_t>(made.match.hit_blocks);
    const uint64_t position = static_cast<uint64_t>(made.match.hit_blocks) * kPageTokens;
    if (position < tokens.size()) {
      const client::StepEntry entry{made.sequence->id(), position, static_cast<int>(tokens.size() - position)};
      zeros.resize(std::max<size_t>(zeros.size(), (tokens.size() - position) * kHeadDim * 2));
      const size_t bytes = (tokens.size() - position) * kHeadDim * 2;
      client::StepBatch batch;
      batch.entries = absl::MakeConstSpan(&entry, 1);
      batch.k = client::TensorView::Inline(zeros.data(), bytes);
      batch.v = client::TensorView::Inline(zeros.data(), bytes);
      KV_RETURN_IF_ERROR(cache->Step(batch).status());
    }
    KV_RETURN_IF_ERROR(made.sequence->Publish(names).status());
  }
  return part;
}

class SimulateTest : public ::testing::TestWithParam<EvictionKind> {};

TEST_P(SimulateTest, ADaemonHasTheHitsThatAreForetold) {
  const std::string policy = EvictionKindName(GetParam());
  const char* const file = std::getenv("KVMANAGER_TRACE");
  Trace trace = simulator::MakeTrace(/*seed=*/3, /*requests=*/kSanitized ? 300 : 1200);
  std::vector<uint64_t> pools = {2 << 20};
  if (file != nullptr) {
    ASSERT_OK_AND_ASSIGN(trace, simulator::ReadTraceFile(file, nullptr));
    pools = {uint64_t{6} << 20, uint64_t{34} << 20};
  }
  for (const uint64_t pool_bytes : pools) {
    ReplayOptions options;
    options.tiers = {{"host", pool_bytes}};
    options.policy = policy;
    options.block_bytes = kBlockBytes;
    ASSERT_OK_AND_ASSIGN(const ReplayResult foretold, Replay(trace, options));
    ASSERT_OK_AND_ASSIGN(const ReplayResult::Part real, ReplayThroughDaemon(trace, policy, pool_bytes));
    std::printf("%s, %llu blocks: %.4f foretold, %.4f in a daemon\n", policy.c_str(),
                static_cast<unsigned long long>(pool_bytes / kBlockBytes), foretold.all.ratio(), real.ratio());
    EXPECT_EQ(real.blocks, foretold.all.blocks);
    EXPECT_NEAR(real.ratio(), foretold.all.ratio(), kPoint) << pool_bytes;
    // Something was evicted, and something was not.
    EXPECT_LT(real.ratio(), UnlimitedHits(trace).ratio());
    EXPECT_GT(real.ratio(), 0.02);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SimulateTest,
                         ::testing::Values(EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost),
                         [](const auto& info) { return EvictionKindName(info.param); });

}  // namespace
}  // namespace kvmanager::testing
