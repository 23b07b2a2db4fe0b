// How soon a daemon whose memory outlived the one before serves: blocks are published, the daemon is killed, and
// another is started on the same memory, or it is upgraded. Then how long it takes to match a prefix among so many
// blocks.
//
//   bazel run --config=opt //tests:restart_bench -- [--blocks=N] [--upgrade]
//
// Blocks are of one page of 8 KiB, so a million take 8 GiB.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/client.h"
#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper_testing.h"
#include "tests/harness.h"

namespace kvmanager::testing {
namespace {

using client::Client;

constexpr int kPageTokens = 16, kHeadDim = 128, kBlocksOfText = 4096, kPrefix = 128, kTokensOfStep = 2048;
constexpr uint64_t kBlockBytes = uint64_t{kPageTokens} * kHeadDim * 2 * 2;

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

client::CacheOptions Shape() {
  client::CacheOptions shape;
  shape.model = "restart-bench";
  shape.revision = "1";
  shape.rope = "default:theta=10000";
  shape.layers = shape.kv_heads = shape.query_heads = 1;
  shape.head_dim = kHeadDim;
  shape.page_tokens = kPageTokens;
  shape.codec = "raw";
  return shape;
}

std::vector<BlockName> NamesOf(const client::Cache& cache, uint32_t text, int blocks) {
  std::vector<uint32_t> tokens(size_t(blocks) * kPageTokens);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<uint32_t>(i % 50000);
  tokens[0] = 50000 + text;
  std::vector<BlockName> names;
  NameBlocks(cache.description().digest, tokens, kPageTokens, &names);
  return names;
}

absl::Status Publish(client::Cache& cache, uint32_t text, int blocks) {
  KV_ASSIGN_OR_RETURN(client::CreatedSequence made, cache.CreateSequence());
  std::vector<uint16_t> rows(size_t(kTokensOfStep) * kHeadDim, 0x3c00);
  for (uint64_t at = 0; at < uint64_t(blocks) * kPageTokens; at += kTokensOfStep) {
    const int tokens = static_cast<int>(std::min<uint64_t>(kTokensOfStep, uint64_t(blocks) * kPageTokens - at));
    rows[0] = static_cast<uint16_t>(text);
    const client::StepEntry entry{made.sequence->id(), at, tokens};
    client::StepBatch batch;
    batch.entries = {&entry, 1};
    batch.k = client::TensorView::Inline(rows.data(), size_t(tokens) * kHeadDim * 2);
    batch.v = batch.k;
    KV_RETURN_IF_ERROR(cache.Step(batch).status());
  }
  return made.sequence->Publish(NamesOf(cache, text, blocks)).status();
}

double Metric(const DaemonProcess& daemon, const std::string& name) {
  const auto page = Scrape(daemon);
  return page.ok() ? page->Sum(name) : -1;
}

struct Times {
  double p50_us, p99_us;
};
/// Of a call that is made `kCalls` times.
template <typename Call>
absl::StatusOr<Times> TimesOf(Call call) {
  constexpr uint32_t kCalls = 10000;
  std::vector<double> seconds;
  for (uint32_t i = 0; i < kCalls; ++i) {
    const double begin = Seconds();
    KV_RETURN_IF_ERROR(call(i));
    seconds.push_back(Seconds() - begin);
  }
  std::sort(seconds.begin(), seconds.end());
  return Times{seconds[kCalls / 2] * 1e6, seconds[kCalls / 100 * 99] * 1e6};
}

/// A prefix of each text in turn is looked for, beside calls that do nothing.
absl::Status Match(Client& client, client::Cache& cache, uint32_t texts) {
  std::vector<std::vector<BlockName>> names;
  for (uint32_t text = 0; text < texts; ++text) names.push_back(NamesOf(cache, text, kPrefix));
  const auto match_one = [&](uint32_t i) -> absl::Status {
    const absl::Span<const BlockName> prefix = names[i * 7919 % texts];
    KV_ASSIGN_OR_RETURN(const auto found, cache.Match({&prefix, 1}));
    return found[0].hit_blocks == kPrefix ? absl::OkStatus() : absl::InternalError("a prefix was not found");
  };
  KV_ASSIGN_OR_RETURN(const Times match, TimesOf(match_one));
  KV_ASSIGN_OR_RETURN(const Times ping, TimesOf([&](uint32_t) { return client.Ping(); }));
  std::printf("match of %d blocks: p50 %.0f us, p99 %.0f us; a call that does nothing: p50 %.0f us, p99 %.0f us\n",
              kPrefix, match.p50_us, match.p99_us, ping.p50_us, ping.p99_us);
  return absl::OkStatus();
}

/// From the last call that the daemon answers to the first that its successor does.
struct Gap {
  double begin, end;
};
absl::StatusOr<Gap> Upgrade(const DaemonProcess& daemon) {
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(daemon.listen(), {.connect_ms = 60000}));
  const double asked = Seconds();
  KV_RETURN_IF_ERROR(client->Upgrade("", /*cold=*/false));
  Gap gap{Seconds(), 0};
  std::printf("the new program was tried in %.3f s\n", gap.begin - asked);
  while (client->Ping().ok()) gap.begin = Seconds();
  KV_RETURN_IF_ERROR(client->Reconnect());
  gap.end = Seconds();
  return gap;
}

absl::Status Run(uint64_t blocks, bool upgrade) {
  const TempDir folder;
  const std::string state = folder.path() + "/state";
  DaemonOptions options;
  options.peers = false;
  options.host_pool_bytes = std::max<uint64_t>(blocks * (kBlockBytes + 64), 64 << 20);
  options.more_flags = {"--state-dir", state, "--state-keep-s", "60"};
  KV_ASSIGN_OR_RETURN(std::unique_ptr<DaemonProcess> daemon, DaemonProcess::Start(options));
  const uint32_t texts = static_cast<uint32_t>((blocks + kBlocksOfText - 1) / kBlocksOfText);
  {
    KV_ASSIGN_OR_RETURN(auto client, Client::Connect(daemon->listen(), {}));
    KV_ASSIGN_OR_RETURN(auto cache, client->OpenCache(Shape()));
    for (uint32_t text = 0; text < texts; ++text) {
      std::fprintf(stderr, "\rpublishing: %u of %u texts", text, texts);
      const uint64_t rest = blocks - uint64_t{text} * kBlocksOfText;
      KV_RETURN_IF_ERROR(Publish(*cache, text, static_cast<int>(std::min<uint64_t>(rest, kBlocksOfText))));
    }
    std::fprintf(stderr, "\n");
  }
  const double recorded = Metric(*daemon, "kvmanager_recorded_blocks");
  std::printf("%.0f blocks are published, %.0f recorded\n", Metric(*daemon, "kvmanager_published_blocks"), recorded);
  double begin = Seconds(), ready = 0;
  if (upgrade) {
    KV_ASSIGN_OR_RETURN(const Gap gap, Upgrade(*daemon));
    begin = gap.begin;
    ready = gap.end;
  } else {
    daemon->Kill();
    begin = Seconds();
    KV_ASSIGN_OR_RETURN(daemon, DaemonProcess::Start(options));
    ready = Seconds();
  }
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(daemon->listen(), {}));
  KV_ASSIGN_OR_RETURN(auto cache, client->OpenCache(Shape()));
  const double opened = Seconds();
  const std::vector<BlockName> names = NamesOf(*cache, texts / 2, kPrefix);
  int hits = 0;
  while (hits < kPrefix && Seconds() - begin < 60) {
    KV_ASSIGN_OR_RETURN(const client::CreatedSequence made, cache->CreateSequence(names));
    hits = made.match.hit_blocks;
  }
  const double hit = Seconds();
  while (Metric(*daemon, "kvmanager_unclaimed_blocks") > 0) usleep(20000);
  const double claimed = Seconds();
  std::printf("%.0f of them were recovered; seconds after the %s:\n",
              Metric(*daemon, "kvmanager_recovered_blocks_total"), upgrade ? "last answer" : "start");
  std::printf("  ready %.3f, cache open %.3f, %d blocks of a prefix hit and verified %.3f, all claimed %.3f\n",
              ready - begin, opened - begin, hits, hit - begin, claimed - begin);
  KV_RETURN_IF_ERROR(Match(*client, *cache, static_cast<uint32_t>(blocks / kBlocksOfText)));
  KV_ASSIGN_OR_RETURN(const MetricsPage page, Scrape(*daemon));
  std::printf("matches at the daemon, %.0f: ", page.Sum("kvmanager_match_seconds_count"));
  for (const char* const bound : {"5e-05", "7e-05", "0.0001", "0.00015", "0.0002"}) {
    const double within = page.Sum("kvmanager_match_seconds_bucket", {absl::StrCat("le=\"", bound, "\"")});
    std::printf(" %.1f%% within %s s", 100 * within / page.Sum("kvmanager_match_seconds_count"), bound);
  }
  std::printf("\n");
  std::printf("turns of the event loop over 5 ms: %.0f\n", page.Sum("kvmanager_loop_long_turns_total"));
  for (const auto& [series, count] : page.families.at("kvmanager_loop_long_turns_total").samples) {
    if (count > 0) std::printf("  %s %.0f\n", series.c_str(), count);
  }
  client.reset();
  daemon.reset();
  KillKeeperOf(state);
  return absl::OkStatus();
}

}  // namespace

int RunBench(int argc, char** argv) {
  uint64_t blocks = 1000000;
  bool upgrade = false;
  for (int i = 1; i < argc; ++i) {
    absl::string_view flag = argv[i];
    if (absl::ConsumePrefix(&flag, "--blocks=") && absl::SimpleAtoi(flag, &blocks) && blocks >= kBlocksOfText) continue;
    if (flag == "--upgrade") {
      upgrade = true;
      continue;
    }
    std::fprintf(stderr, "usage: restart_bench [--blocks=N] [--upgrade], N at least %d\n", kBlocksOfText);
    return 2;
  }
  const absl::Status status = Run(blocks, upgrade);
  if (!status.ok()) std::fprintf(stderr, "restart_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace kvmanager::testing

int main(int argc, char** argv) { return kvmanager::testing::RunBench(argc, argv); }
