// A model that prefills on one daemon and decodes on another, which recomputed part of K and V from activations: it
// says what it would have said where it was.
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "examples/engine/generation.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/model.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::Client;
using engine::KvEngine;
using engine::KvEngineOptions;
using engine::Runner;
using engine::SamplingState;

struct Host {
  std::unique_ptr<DaemonProcess> daemon;
  std::unique_ptr<Client> client;
  std::unique_ptr<KvEngine> engine;
  std::unique_ptr<Runner> runner;
};

absl::StatusOr<Host> Start(const engine::Model& model, const std::vector<std::string>& flags) {
  Host host;
  DaemonOptions options;
  options.more_flags = flags;
  KV_ASSIGN_OR_RETURN(host.daemon, DaemonProcess::Start(options));
  KV_ASSIGN_OR_RETURN(host.client, Client::Connect(host.daemon->listen(), {.deadline_ms = 120000}));
  KvEngineOptions engine;
  engine.activations = true;
  engine.lag_pages = 1;
  KV_ASSIGN_OR_RETURN(host.engine, KvEngine::Open(host.client.get(), model, engine));
  host.runner = std::make_unique<Runner>(&model, host.engine.get(), 1);
  return host;
}

struct Prompted {
  std::unique_ptr<client::Sequence> sequence;
  uint32_t first = 0;
};
absl::StatusOr<Prompted> PrefillText(Host& host, absl::string_view text) {
  std::vector<uint32_t> tokens;
  for (const unsigned char byte : text) tokens.push_back(byte);
  Prompted made;
  KV_ASSIGN_OR_RETURN(client::CreatedSequence created, host.engine->CreateSequence(tokens, tokens.size()));
  made.sequence = std::move(created.sequence);
  std::vector<float> logits;
  KV_RETURN_IF_ERROR(engine::Prefill(
      *host.runner, made.sequence->id(), tokens, uint64_t(created.match.hit_blocks) * 64, 128, [](uint64_t) {},
      &logits));
  SamplingState greedy;
  made.first = engine::Sample(logits, &greedy);
  return made;
}

absl::StatusOr<std::vector<uint32_t>> DecodeText(Host& host, uint64_t sequence, uint64_t position, uint32_t first) {
  SamplingState greedy;
  std::vector<uint32_t> generated;
  KV_RETURN_IF_ERROR(engine::Decode(
      *host.runner, sequence, position, first, 48, &greedy, [](uint32_t) {}, &generated));
  return generated;
}

TEST(RecomputeEngine, SaysTheSameAfterAReload) {
  const std::string config = DataPath("examples/model/config.json");
  ASSERT_OK_AND_ASSIGN(const auto model, engine::Model::Load(config.substr(0, config.rfind('/'))));
  ASSERT_OK_AND_ASSIGN(Host here,
                       Start(*model, {"--threads", "2", "--peer-local-copy", "off", "--peer-rate-bytes", "512KiB"}));
  ASSERT_OK_AND_ASSIGN(Host there, Start(*model, {"--threads", "2"}));
  ASSERT_OK_AND_ASSIGN(const client::RecomputeDescription ready, there.client->Recompute());
  ASSERT_EQ(ready.sets.size(), 1u);
  EXPECT_EQ(ready.sets[0].layers_ready, uint32_t(model->config().layers));

  // The first hand-off shows the link to the receiver, the second is planned.
  const std::string text =
      "The harbour lay quiet under the first snow of the year, and the ferry that should have left at noon was still "
      "tied to the quay. Nobody in the waiting room seemed to mind. An old man with a parcel on his knees slept by the "
      "stove; two children counted the flakes that reached the window before they melted. \"It will go when it goes,\" "
      "said the woman behind the counter, and she poured more tea.";
  ASSERT_OK_AND_ASSIGN(const Prompted other, PrefillText(here, text.substr(100, 150)));
  ASSERT_OK(other.sequence->HandOff(there.daemon->peer(), "", 60000));
  ASSERT_OK_AND_ASSIGN(const Prompted prompted, PrefillText(here, text));
  ASSERT_OK_AND_ASSIGN(const client::HandOffOutcome sent, prompted.sequence->HandOff(there.daemon->peer(), "", 120000));
  ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*there.daemon));
  const double recomputed = page.Sum("kvmanager_recompute_tokens_total", {"how=\"recomputed\""});
  EXPECT_GE(recomputed, 64.0);
  std::printf("%d bytes sent, %d tokens (of one layer) recomputed\n", int(sent.bytes_sent), int(recomputed));

  ASSERT_OK_AND_ASSIGN(client::ClaimedSequence claimed, there.engine->cache().Claim(sent.ticket));
  ASSERT_EQ(claimed.tokens, text.size());
  ASSERT_OK_AND_ASSIGN(const std::vector<uint32_t> stayed,
                       DecodeText(here, prompted.sequence->id(), text.size(), prompted.first));
  ASSERT_OK_AND_ASSIGN(const std::vector<uint32_t> went,
                       DecodeText(there, claimed.sequence->id(), text.size(), prompted.first));
  EXPECT_EQ(stayed, went);
}

}  // namespace
}  // namespace kvmanager::testing
