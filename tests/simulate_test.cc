// A trace replayed through a real daemon has the hits that the simulator foretells: both run the same policies.
//
// KVMANAGER_TRACE=FILE replays that trace, whole, in place of one that is made up; pages are small whatever the trace's
// blocks stand for.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
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
constexpr int kTokensOfStep = 256;

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

struct Replayed {
  ReplayResult::Part part;
  uint64_t block_bytes = 0;  // encoded, on the first rung
};

// The simulator lowers at once: so workers end what they have before the next request.
absl::Status AwaitLowering(const DaemonProcess& daemon) {
  absl::Status failed;
  const bool ended = Eventually([&] {
    const absl::StatusOr<MetricsPage> page = Scrape(daemon);
    failed.Update(page.status());
    return !failed.ok() || page->Sum("kvmanager_lowering_bytes") == 0;
  });
  if (failed.ok() && !ended) return absl::DeadlineExceededError("blocks are still being lowered");
  return failed;
}

// Blocks that hit in a daemon with such a pool, of each request in turn.
absl::StatusOr<Replayed> ReplayThroughDaemon(const Trace& trace, const std::string& policy, uint64_t pool_bytes,
                                             const CacheOptions& shape = TinyCache()) {
  DaemonOptions daemon_options;
  daemon_options.host_pool_bytes = pool_bytes;
  daemon_options.more_flags = {"--eviction", policy, "--quality-sample", "0", "--slab-bytes", "2MiB"};
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<DaemonProcess> daemon, DaemonProcess::Start(daemon_options));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(daemon->listen(), {}));
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<client::Cache> cache, client->OpenCache(shape));
  Replayed result{.block_bytes = cache->description().encoded_page_bytes};
  ReplayResult::Part& part = result.part;
  const bool is_ladder = absl::StartsWith(shape.codec, "ladder=");
  const uint32_t page_tokens = static_cast<uint32_t>(shape.page_tokens);
  const size_t row_bytes = static_cast<size_t>(shape.kv_heads) * shape.head_dim * 2;
  std::vector<uint32_t> tokens;
  std::vector<BlockName> names;
  std::vector<uint16_t> rows(kTokensOfStep * row_bytes / 2), k = rows, v = rows;
  std::mt19937_64 random(1);
  for (uint16_t& value : rows) value = static_cast<uint16_t>(0x3000 + random() % 0xc00 + (random() % 2 << 15));  // fp16
  for (const TraceRequest& request : trace.requests) {
    tokens.clear();
    for (const uint32_t block : trace.BlocksOf(request)) {
      for (uint32_t i = 0; i < page_tokens; ++i) tokens.push_back(block * page_tokens + i);
    }
    names.clear();
    NameBlocks(cache->description().digest, tokens, shape.page_tokens, &names);
    KV_ASSIGN_OR_RETURN(const CreatedSequence made, cache->CreateSequence(names));
    part.blocks += names.size();
    part.hit_blocks += static_cast<uint64_t>(made.match.hit_blocks);
    for (uint64_t at = static_cast<uint64_t>(made.match.hit_blocks) * page_tokens; at < tokens.size();) {
      const size_t count = std::min<size_t>(tokens.size() - at, kTokensOfStep);
      const client::StepEntry entry{made.sequence->id(), at, static_cast<int>(count)};
      client::StepBatch batch;
      batch.entries = absl::MakeConstSpan(&entry, 1);
      batch.k = client::TensorView::Inline(rows.data(), count * row_bytes);
      batch.v = batch.k;
      KV_RETURN_IF_ERROR(cache->Step(batch).status());
      // Waits until pages are encoded: an engine computes meanwhile.
      const client::ReadBatch read{.entries = batch.entries,
                                   .k = client::TensorView::Inline(k.data(), count * row_bytes),
                                   .v = client::TensorView::Inline(v.data(), count * row_bytes)};
      KV_RETURN_IF_ERROR(cache->Read(read).status());
      at += count;
    }
    KV_RETURN_IF_ERROR(made.sequence->Publish(names).status());
    if (is_ladder) KV_RETURN_IF_ERROR(AwaitLowering(*daemon));
  }
  return result;
}

class SimulateTest : public ::testing::TestWithParam<EvictionKind> {};

TEST_P(SimulateTest, ADaemonHasTheHitsThatAreForetold) {
  const std::string policy = EvictionKindName(GetParam());
  const char* const file = std::getenv("KVMANAGER_TRACE");
  Trace trace = simulator::MakeTrace(/*seed=*/3, /*requests=*/kSanitized ? 300 : 1200);
  std::vector<uint64_t> pools = {2 << 20};
  if (file != nullptr) {
    ASSERT_OK_AND_ASSIGN(trace, simulator::ReadTraceFile(file, Trace::kBlockTokens, nullptr));
    pools = {uint64_t{6} << 20, uint64_t{34} << 20};
  }
  for (const uint64_t pool_bytes : pools) {
    ReplayOptions options;
    options.tiers = {{"host", pool_bytes}};
    options.policy = policy;
    options.block_bytes = kBlockBytes;
    ASSERT_OK_AND_ASSIGN(const ReplayResult foretold, Replay(trace, options));
    ASSERT_OK_AND_ASSIGN(const Replayed replayed, ReplayThroughDaemon(trace, policy, pool_bytes));
    const ReplayResult::Part& real = replayed.part;
    std::printf("%s, %llu blocks: %.4f foretold, %.4f in a daemon\n", policy.c_str(),
                static_cast<unsigned long long>(pool_bytes / kBlockBytes), foretold.all.ratio(), real.ratio());
    EXPECT_EQ(real.blocks, foretold.all.blocks);
    EXPECT_NEAR(real.ratio(), foretold.all.ratio(), kPoint) << pool_bytes;
    // Something was evicted, and something was not.
    EXPECT_LT(real.ratio(), UnlimitedHits(trace).ratio());
    EXPECT_GT(real.ratio(), 0.02);
  }
}

// What the simulator knows nothing of: raw pages of the running sequence, slabs that hold slots of one size alone, and
// some that are kept free. A pool of few slabs has much less.
TEST(SimulateLadderTest, ADaemonHasAboutTheHitsThatAreForetold) {
  if (kSanitized) GTEST_SKIP() << "takes minutes";
  const Trace trace = simulator::MakeTrace(/*seed=*/3, /*requests=*/5000);
  const uint64_t pool_bytes = 96 << 20;
  CacheOptions shape = TinyCache();
  shape.head_dim = 128;
  shape.page_tokens = 64;
  shape.lag_pages = 0;
  const std::string rungs[] = {"hack:k_bits=8,v_bits=8", "hack:k_bits=3,v_bits=2"};
  uint64_t bytes[2], hits[2];
  for (int rung = 0; rung < 2; ++rung) {
    shape.codec = absl::StrCat(rungs[rung], ";sinks=0");
    ASSERT_OK_AND_ASSIGN(const Replayed alone, ReplayThroughDaemon(trace, "cost", pool_bytes, shape));
    bytes[rung] = alone.block_bytes;
    hits[rung] = alone.part.hit_blocks;
  }
  shape.codec = absl::StrCat("ladder=", rungs[0], ">", rungs[1], ";sinks=0");
  ASSERT_OK_AND_ASSIGN(const Replayed ladder, ReplayThroughDaemon(trace, "cost", pool_bytes, shape));
  ReplayOptions options{.tiers = {{"host", pool_bytes}}, .block_bytes = bytes[0], .lower_rung_bytes = {bytes[1]}};
  ASSERT_OK_AND_ASSIGN(const ReplayResult foretold, Replay(trace, options));
  const double blocks = static_cast<double>(ladder.part.blocks);
  std::printf("%llu and %llu bytes: %.4f and %.4f alone; the ladder %.4f foretold, %.4f in a daemon\n",
              static_cast<unsigned long long>(bytes[0]), static_cast<unsigned long long>(bytes[1]), hits[0] / blocks,
              hits[1] / blocks, foretold.all.ratio(), ladder.part.ratio());
  EXPECT_EQ(ladder.block_bytes, bytes[0]);
  EXPECT_GT(ladder.part.hit_blocks, hits[0]);
  EXPECT_NEAR(ladder.part.ratio(), foretold.all.ratio(), 2 * kPoint);
}

INSTANTIATE_TEST_SUITE_P(All, SimulateTest,
                         ::testing::Values(EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost),
                         [](const auto& info) { return EvictionKindName(info.param); });

}  // namespace
}  // namespace kvmanager::testing
