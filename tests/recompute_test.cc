// Recomputing K and V at the receiver of a hand-off: projections as clients register them, activations as they append
// them, plans by what was measured, and what becomes of all of it when somebody goes.
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"
#include "tests/projected_source.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::ClaimedSequence;
using client::Client;
using client::CreatedSequence;
using client::HandOffOutcome;
using client::ProjectionFacts;
using client::Projections;

constexpr auto kBad = absl::StatusCode::kInvalidArgument;
constexpr auto kBefore = absl::StatusCode::kFailedPrecondition;

double Metric(const DaemonProcess& daemon, absl::string_view name, const std::vector<std::string>& labels = {}) {
  const absl::StatusOr<MetricsPage> page = Scrape(daemon);
  EXPECT_OK(page);
  return page.ok() ? page->Sum(name, labels) : -1;
}

class ProjectionsTest : public ::testing::Test {
 protected:
  void Start(std::vector<std::string> flags = {}) {
    DaemonOptions options;
    options.more_flags = std::move(flags);
    options.more_flags.insert(options.more_flags.end(), {"--threads", "2"});
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, client_->OpenCache(source_.shape));
  }
  double WeightBytes() { return Metric(*daemon_, "kvmanager_recompute_weight_bytes"); }

  const ProjectedSource source_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<client::Cache> cache_;
};

TEST_F(ProjectionsTest, WhatIsWrongIsRefusedAndChangesNothing) {
  Start();
  ASSERT_OK_AND_ASSIGN(auto projections, cache_->OpenProjections(source_.facts));
  const double buffers = WeightBytes();
  EXPECT_GT(buffers, 0);
  const auto refused = [&](auto change, absl::StatusCode code, const char* field) {
    Registration registration(source_, 1);
    change(registration);
    const absl::Status status = projections->SetLayer(registration.wire);
    EXPECT_TRUE(NamesField(status, code, field)) << status;
  };
  refused([](Registration& r) { r.wire.layer = 2; }, kBad, "layer");
  refused([](Registration& r) { r.wire.k.bytes -= 4; }, kBad, "k.inline");
  refused([](Registration& r) { r.wire.v = {}; }, kBad, "v");
  refused([](Registration& r) { r.wire.dtype = DType::kFloat16; }, kBad, "k.inline");
  refused([](Registration& r) { r.wire.k_bias = r.wire.k; }, kBad, "kBias.inline");
  refused([](Registration& r) { r.wire.proof.tokens = 0; }, kBad, "proof.tokens");
  refused([](Registration& r) { r.wire.proof.tokens = 65; }, kBad, "proof.tokens");
  refused([](Registration& r) { r.wire.proof.tokens = 15; }, kBad, "proof.x.inline");
  refused([](Registration& r) { r.wire.proof.position = 255; }, kBad, "proof.position");
  refused([](Registration& r) { r.wire.proof.position = UINT64_MAX; }, kBad, "proof.position");
  refused([](Registration& r) { r.wire.proof.k = {}; }, kBad, "proof.k");
  refused([](Registration& r) { r.k[77] = std::numeric_limits<float>::quiet_NaN(); }, kBad, "weights.k[77]");
  refused([](Registration& r) { r.v.back() = std::numeric_limits<float>::infinity(); }, kBad, "weights.v[4095]");
  // The proof finds what sizes cannot: other weights, rows in another order, K before RoPE or at other positions.
  refused([](Registration& r) { std::swap(r.k, r.v), r.Point(); }, kBad, "proof.k");
  refused([](Registration& r) { std::rotate(r.v.begin(), r.v.begin() + 64, r.v.end()); }, kBad, "proof.v");
  refused([](Registration& r) { r.wire.proof.position += 1; }, kBad, "proof.k");
  refused([](Registration& r) { std::fill(r.proof.v.begin(), r.proof.v.end(), 0); }, kBad, "proof.v");
  ASSERT_OK_AND_ASSIGN(client::RecomputeDescription now, client_->Recompute());
  ASSERT_EQ(now.sets.size(), 1u);
  EXPECT_TRUE(now.sets[0].digest == cache_->description().digest);
  EXPECT_EQ(now.sets[0].layers_ready, 0u);
  EXPECT_EQ(now.sets[0].flops.samples, 0u);
  // The right ones.
  for (int layer = 0; layer < 2; ++layer) EXPECT_OK(projections->SetLayer(Registration(source_, layer).wire));
  ASSERT_OK_AND_ASSIGN(now, client_->Recompute());
  EXPECT_EQ(now.sets[0].layers_ready, 2u);
  EXPECT_GT(now.sets[0].flops.per_second, 0);
  EXPECT_GT(double(now.weight_bytes), buffers);
  EXPECT_EQ(double(now.weight_bytes), WeightBytes());
  projections.reset();
  EXPECT_TRUE(Eventually([&] { return WeightBytes() == 0; }));
  ASSERT_OK_AND_ASSIGN(now, client_->Recompute());
  EXPECT_TRUE(now.sets.empty());
}

TEST_F(ProjectionsTest, FactsMustBeTheEngines) {
  Start();
  const auto refused = [&](ProjectionFacts facts, const char* field) {
    const absl::Status status = cache_->OpenProjections(facts).status();
    EXPECT_TRUE(NamesField(status, kBad, field)) << status;
  };
  refused({.rotary_dims = 33}, "rotaryDims");
  refused({.rotary_dims = 31}, "rope.rotary_dims");
  refused({.rotary_dims = 32, .theta = 0}, "rope.theta");
  refused({.rotary_dims = 32, .theta = std::numeric_limits<double>::quiet_NaN()}, "rope.theta");
  // Legal, but not those that K was made with.
  for (const ProjectionFacts& facts : {ProjectionFacts{.rotary_dims = 0}, ProjectionFacts{.rotary_dims = 16},
                                       ProjectionFacts{.rotary_dims = 32, .theta = 10500},
                                       ProjectionFacts{.rotary_dims = 32, .theta = 10000, .interleaved = true}}) {
    ASSERT_OK_AND_ASSIGN(auto projections, cache_->OpenProjections(facts));
    const absl::Status status = projections->SetLayer(Registration(source_, 0).wire);
    EXPECT_TRUE(NamesField(status, kBad, "proof.k")) << status;
  }
  CacheOptions without = source_.shape;
  without.hidden_size = 0;
  ASSERT_OK_AND_ASSIGN(auto plain, client_->OpenCache(without));
  EXPECT_FALSE(plain->description().digest == cache_->description().digest);
  EXPECT_TRUE(NamesField(plain->OpenProjections(source_.facts).status(), kBad, "hiddenSize"));
}

TEST_F(ProjectionsTest, ClientsShareASet) {
  Start();
  ASSERT_OK_AND_ASSIGN(auto first, RegisterAll(*cache_, source_));
  const double bytes = WeightBytes();
  ASSERT_OK_AND_ASSIGN(auto other, Client::Connect(daemon_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto cache, other->OpenCache(source_.shape));
  ProjectionFacts facts = source_.facts;
  facts.theta = 500000;
  EXPECT_CODE(cache->OpenProjections(facts), kFailedPrecondition);
  // Equal weights are kept once; others are refused while somebody has these.
  ASSERT_OK_AND_ASSIGN(auto second, RegisterAll(*cache, source_));
  EXPECT_EQ(WeightBytes(), bytes);
  Registration changed(source_, 0);
  changed.k[5] *= 1.0001f;
  EXPECT_TRUE(NamesField(second->SetLayer(changed.wire), kBefore, "weights of layer 0"));
  // They outlive the client that brought them, not the last one.
  client_.reset();
  cache_.reset();
  first.reset();
  EXPECT_EQ(WeightBytes(), bytes);
  second.reset();
  ASSERT_OK_AND_ASSIGN(second, cache->OpenProjections(source_.facts));
  EXPECT_OK(second->SetLayer(changed.wire));
}

TEST_F(ProjectionsTest, MemoryIsBounded) {
  Start({"--recompute-bytes", "400KiB"});  // three quarters: buffers, and one layer or two
  ASSERT_OK_AND_ASSIGN(auto projections, cache_->OpenProjections(source_.facts));
  CacheOptions larger = source_.shape;
  larger.hidden_size = 1024;
  ASSERT_OK_AND_ASSIGN(auto large, client_->OpenCache(larger));
  const absl::Status refused = large->OpenProjections(source_.facts).status();
  const std::string field = "--recompute-bytes of this tenant";
  EXPECT_TRUE(NamesField(refused, absl::StatusCode::kResourceExhausted, field)) << refused;
  CacheOptions deep = source_.shape;
  deep.layers = 20;
  ProjectedSource source = source_;
  source.shape = deep;
  projections.reset();
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(deep));
  ASSERT_OK_AND_ASSIGN(projections, cache->OpenProjections(source.facts));
  int layer = 0;
  absl::Status status;
  while (layer < 20 && (status = projections->SetLayer(Registration(source, layer).wire)).ok()) ++layer;
  EXPECT_GT(layer, 0);
  EXPECT_TRUE(NamesField(status, absl::StatusCode::kResourceExhausted, field)) << status;
  ASSERT_OK_AND_ASSIGN(const client::RecomputeDescription now, client_->Recompute());
  EXPECT_LE(now.weight_bytes, now.weight_bytes_max / 4 * 3);
  EXPECT_EQ(now.weight_bytes_max, uint64_t{400} << 10);
}

TEST_F(ProjectionsTest, ActivationsAreCheckedAsKeysAre) {
  Start();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
  ProjectedSource::Rows rows = source_.Tokens(0, 0, 3);
  const client::StepEntry entry{made.sequence->id(), 0, 3};
  client::StepBatch batch;
  batch.entries = {&entry, 1};
  batch.k = InlineView(rows.k);
  batch.v = InlineView(rows.v);
  batch.x = client::TensorView::Inline(rows.x.data(), rows.x.size() * 2 - 2);
  EXPECT_TRUE(NamesField(cache_->Step(batch).status(), kBad, "x.inline"));
  batch.x = InlineView(rows.x);
  rows.x[64 + 7] = 0x7c00;
  EXPECT_TRUE(NamesField(cache_->Step(batch).status(), kBad, "entries[0].x[token 1][value 7]"));
  rows.x[64 + 7] = 0;
  client::StepBatch alone = batch;
  alone.k = alone.v = {};
  EXPECT_TRUE(NamesField(cache_->Step(alone).status(), kBad, "x"));
  EXPECT_OK(cache_->Step(batch));
  ASSERT_OK_AND_ASSIGN(const client::CacheDescription now, cache_->Refresh());
  EXPECT_EQ(now.resident_activation_bytes, 64u * 64 * 2);
  EXPECT_EQ(Metric(*daemon_, "kvmanager_page_bytes", {"codec=\"activation\""}), 64.0 * 64 * 2);
  CacheOptions without = source_.shape;
  without.hidden_size = 0;
  ASSERT_OK_AND_ASSIGN(auto plain, client_->OpenCache(without));
  ASSERT_OK_AND_ASSIGN(CreatedSequence other, plain->CreateSequence());
  const client::StepEntry there{other.sequence->id(), 0, 3};
  batch.entries = {&there, 1};
  EXPECT_TRUE(NamesField(plain->Step(batch).status(), kBad, "x"));
}

// Two daemons and a link that is slower than any processor here projects.
class ReceiverTest : public ::testing::Test {
 protected:
  void Start(const std::string& codec = "raw", int lag_pages = 0) {
    source_.shape = ProjectedCache(codec, lag_pages);
    DaemonOptions options;
    options.more_flags = {"--threads", "2", "--peer-local-copy", "off", "--peer-rate-bytes", "256KiB"};
    ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start(options));
    options.more_flags = {"--threads", "2"};
    ASSERT_OK_AND_ASSIGN(receiver_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(here_, Client::Connect(sender_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(there_, Client::Connect(receiver_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cache_, here_->OpenCache(source_.shape));
    ASSERT_OK_AND_ASSIGN(other_, there_->OpenCache(source_.shape));
  }
  // Registers, and lets the receiver see the link once, by another sequence.
  void Prepare() {
    ASSERT_OK_AND_ASSIGN(projections_, RegisterAll(*other_, source_));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(99, kTokens));
    ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
    ASSERT_OK(other_->Claim(sent.ticket));
    ASSERT_OK_AND_ASSIGN(const client::RecomputeDescription known, there_->Recompute());
    ASSERT_EQ(known.links.size(), 1u);
    ASSERT_GT(known.links[0].bytes.samples, 0u);
    EXPECT_EQ(Recomputed(), 0);
    EXPECT_EQ(Metric(*receiver_, "kvmanager_recompute_plans_total", {"not_measured"}), 2);
  }
  absl::StatusOr<CreatedSequence> Loaded(uint64_t seed, int tokens) {
    ProjectedSource source = source_;
    source.seed = seed;
    KV_ASSIGN_OR_RETURN(CreatedSequence made, cache_->CreateSequence());
    KV_RETURN_IF_ERROR(LoadProjected(*cache_, made.sequence->id(), source, 0, tokens));
    return made;
  }
  // Of the sender's sequence and of the one that was claimed, to the same queries at the newest token.
  struct Answers {
    std::vector<float> stayed, went;
  };
  absl::StatusOr<Answers> AskBoth(const client::Sequence& here, const client::Sequence& there) {
    const Source queries{7, Kind::kNormal, source_.shape};
    Answers answers;
    KV_ASSIGN_OR_RETURN(answers.stayed, Ask(*cache_, here.id(), queries, kTokens - 1));
    KV_ASSIGN_OR_RETURN(answers.went, Ask(*other_, there.id(), queries, kTokens - 1));
    return answers;
  }
  double Recomputed() { return Metric(*receiver_, "kvmanager_recompute_tokens_total", {"how=\"recomputed\""}); }
  static bool Empty(Client& client) {
    return Eventually([&] {
      if (!client.Purge(Client::kAllCaches).ok()) return false;
      const auto status = client.Status();
      return status.ok() && status->pools[0].used_bytes == 0;
    });
  }

  static constexpr int kTokens = 64 * 6 + 5;
  ProjectedSource source_;
  std::unique_ptr<DaemonProcess> sender_, receiver_;
  std::unique_ptr<Client> here_, there_;
  std::unique_ptr<client::Cache> cache_, other_;
  std::unique_ptr<Projections> projections_;
};

TEST_F(ReceiverTest, RecomputesWhereTheLinkIsSlow) {
  Start();
  Prepare();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, kTokens));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), "blob"));
  const double recomputed = Recomputed();
  EXPECT_GE(recomputed, 64 * 2);
  EXPECT_EQ(recomputed + Metric(*receiver_, "kvmanager_recompute_tokens_total", {"how=\"copied\""}), 2 * 2 * 64.0 * 6);
  EXPECT_GT(Metric(*receiver_, "kvmanager_recompute_seconds_count"), 0);
  // K and V of a page are 16 KiB, X 8 KiB; the open page and the newest token's block go as they are.
  EXPECT_EQ(sent.bytes_sent, 7 * 2 * 16384 - uint64_t(recomputed / 64) * 8192);

  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other_->Claim(sent.ticket));
  EXPECT_EQ(claimed.tokens, uint64_t(kTokens));
  ASSERT_OK_AND_ASSIGN(const Answers answers, AskBoth(*made.sequence, *claimed.sequence));
  const std::vector<double> expected(answers.stayed.begin(), answers.stayed.end());
  EXPECT_LT(RelativeError(answers.went, expected), 1e-3);
  // It goes on there, and its activations can be sent on.
  ASSERT_OK(LoadProjected(*other_, claimed.sequence->id(), source_, kTokens, 100));
  ASSERT_OK_AND_ASSIGN(const client::CacheDescription described, other_->Refresh());
  EXPECT_GE(described.resident_activation_bytes, uint64_t(recomputed / 64) * 8192);
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome back, claimed.sequence->HandOff(sender_->peer(), ""));
  EXPECT_OK(cache_->Claim(back.ticket));
  claimed.sequence.reset();
  made.sequence.reset();
  EXPECT_TRUE(Empty(*there_));
  EXPECT_TRUE(Empty(*here_));
}

// Encoded pages take less of the link than activations.
TEST_F(ReceiverTest, CopiesWhatIsSmallerEncoded) {
  Start("hack:k_bits=3,v_bits=2");
  Prepare();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, kTokens));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
  EXPECT_EQ(Recomputed(), 0);
  EXPECT_EQ(Metric(*receiver_, "kvmanager_recompute_plans_total", {"all_copy"}), 2);
  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other_->Claim(sent.ticket));
  ASSERT_OK_AND_ASSIGN(const Answers answers, AskBoth(*made.sequence, *claimed.sequence));
  EXPECT_EQ(answers.stayed, answers.went);
}

TEST_F(ReceiverTest, CopiesWithoutWeights) {
  Start();
  Prepare();
  projections_.reset();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, kTokens));
  // The capability's end travels on another connection than the pages.
  ASSERT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_recompute_weight_bytes") == 0; }));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
  EXPECT_EQ(Recomputed(), 0);
  EXPECT_EQ(Metric(*receiver_, "kvmanager_recompute_plans_total", {"no_weights"}), 2);
  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other_->Claim(sent.ticket));
  ASSERT_OK_AND_ASSIGN(const Answers answers, AskBoth(*made.sequence, *claimed.sequence));
  EXPECT_EQ(answers.stayed, answers.went);
}

// Weights stay for a hand-off that was promised to use them, whoever goes meanwhile.
TEST_F(ReceiverTest, TheClientOfTheWeightsMayGo) {
  Start();
  Prepare();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, 64 * 40));
  const double before = Metric(*receiver_, "kvmanager_transport_bytes_total", {"received"});
  auto pending = made.sequence->HandOffAsync(receiver_->peer(), "", 60000);
  ASSERT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_transport_bytes_total", {"received"}) > before; }));
  projections_.reset();
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, pending.Wait());
  EXPECT_GT(Recomputed(), 0);
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_recompute_weight_bytes") == 0; }));
  EXPECT_OK(other_->Claim(sent.ticket));
}

TEST_F(ReceiverTest, ASenderThatDiesLeavesNothing) {
  Start();
  Prepare();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, 64 * 40));
  const double before = Metric(*receiver_, "kvmanager_transport_bytes_total", {"received"});
  auto pending = made.sequence->HandOffAsync(receiver_->peer(), "", 60000);
  ASSERT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_transport_bytes_total", {"received"}) > before; }));
  sender_->Kill();
  EXPECT_CODE(pending.Wait(), kUnavailable);
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_tickets") == 0; }));
  EXPECT_OK(there_->Ping());
  EXPECT_OK(projections_->SetLayer(Registration(source_, 0).wire));
}

TEST_F(ReceiverTest, AReceiverThatDiesIsTold) {
  Start();
  Prepare();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, Loaded(1, 64 * 40));
  auto pending = made.sequence->HandOffAsync(receiver_->peer(), "", 60000);
  ASSERT_TRUE(Eventually([&] { return Recomputed() > 0; }));
  receiver_->Kill();
  EXPECT_CODE(pending.Wait(), kUnavailable);
  made.sequence.reset();
  EXPECT_TRUE(Empty(*here_));
}

}  // namespace
}  // namespace kvmanager::testing
