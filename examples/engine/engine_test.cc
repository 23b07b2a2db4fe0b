#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "examples/engine/evaluation.h"
#include "examples/engine/fake_client.h"
#include "examples/engine/generation.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/tiny_model.h"

namespace kvmanager::engine {
namespace {

using ::testing::HasSubstr;

constexpr double kTolerance = 2e-2;  // of logits; see model_test

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto model = TinyModel(TinyConfig(), 5);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    client_ = host_.Connect();
  }
  std::unique_ptr<KvEngine> Open(const KvEngineOptions& options = {}) {
    auto engine = KvEngine::Open(client_.get(), *model_, options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  /// The last logits of a prompt prefilled from the hit on.
  std::vector<float> PrefillAll(KvEngine* engine, absl::Span<const uint32_t> tokens, int chunk,
                                std::unique_ptr<client::Sequence>* sequence) {
    auto created = engine->CreateSequence(tokens);
    EXPECT_TRUE(created.ok()) << created.status();
    *sequence = std::move(created->sequence);
    Runner runner(model_.get(), engine, 2);
    std::vector<float> logits;
    EXPECT_EQ(Prefill(
                  runner, (*sequence)->id(), tokens, created->match.hit_blocks * 64, chunk, [](uint64_t) {}, &logits),
              absl::OkStatus());
    return logits;
  }
  static void ExpectNear(const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], kTolerance) << i;
  }

  FakeHost host_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(EngineTest, ChunksDoNotChangeTheAnswer) {
  const auto engine = Open();
  EXPECT_TRUE(engine->uses_arena());
  const std::vector<uint32_t> tokens = RandomTokens(200, 1);
  std::unique_ptr<client::Sequence> sequence;
  const std::vector<float> whole = PrefillAll(engine.get(), tokens, 512, &sequence);
  for (int chunk : {1, 7, 63, 64, 65, 128}) ExpectNear(PrefillAll(engine.get(), tokens, chunk, &sequence), whole);
  EXPECT_EQ(engine->counts().computed, 7 * tokens.size());
  EXPECT_EQ(engine->counts().hit, 0);
}

TEST_F(EngineTest, InlineWhereThereIsNoArena) {
  const std::vector<uint32_t> tokens = RandomTokens(70, 2);
  std::unique_ptr<client::Sequence> sequence;
  const std::vector<float> mapped = PrefillAll(Open().get(), tokens, 32, &sequence);
  sequence.reset();
  host_.has_arenas = false;
  const auto engine = Open();
  EXPECT_FALSE(engine->uses_arena());
  EXPECT_EQ(PrefillAll(engine.get(), tokens, 32, &sequence), mapped);
  EXPECT_GT(host_.inline_steps, 0);
  KvEngineOptions large;
  large.rows_max = 1 << 16;
  const auto refused = KvEngine::Open(client_.get(), *model_, large);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("rows of a step is 65536"));
}

TEST_F(EngineTest, PublishedBlocksAreNotComputedAgain) {
  std::vector<uint32_t> tokens = RandomTokens(64 * 3 + 10, 3);
  std::unique_ptr<client::Sequence> sequence, again;
  const auto first = Open();
  const std::vector<float> logits = PrefillAll(first.get(), tokens, 100, &sequence);
  const auto published = first->Publish(*sequence, tokens);
  ASSERT_TRUE(published.ok());
  EXPECT_EQ(published->published, 3);

  const auto second = Open();
  second->set_prompt_tokens(tokens.size());
  ExpectNear(PrefillAll(second.get(), tokens, 100, &again), logits);
  EXPECT_EQ(second->counts().hit, 64 * 3);
  EXPECT_EQ(second->counts().computed, 10);
  EXPECT_EQ(second->counts().prompt_computed, 10);

  const auto exact = Open();  // a prompt of whole blocks leaves one to compute, for its logits
  again.reset();
  PrefillAll(exact.get(), absl::MakeConstSpan(tokens).first(128), 100, &again);
  EXPECT_EQ(exact->counts().hit, 64);
  EXPECT_EQ(exact->counts().computed, 64);

  tokens[70] ^= 1;
  const auto other = Open();
  again.reset();
  PrefillAll(other.get(), tokens, 100, &again);
  EXPECT_EQ(other->counts().hit, 64);
}

TEST_F(EngineTest, DecodeGoesOnElsewhereWithoutThePrompt) {
  const std::vector<uint32_t> tokens = RandomTokens(150, 4);
  SamplingState here{0.8, 42};
  const auto engine = Open();
  std::unique_ptr<client::Sequence> sequence;
  const std::vector<float> logits = PrefillAll(engine.get(), tokens, 64, &sequence);
  const uint32_t first = Sample(logits, &here);

  FakeHost remote;
  host_.peers["remote:1"] = &remote;
  const auto sent = sequence->HandOff("remote:1", EncodeBlob({tokens.size(), first, here}));
  ASSERT_TRUE(sent.ok());

  std::vector<uint32_t> local;
  Runner runner(model_.get(), engine.get(), 1);
  ASSERT_EQ(Decode(
                runner, sequence->id(), tokens.size(), first, 30, &here, [](uint32_t) {}, &local),
            absl::OkStatus());

  const auto remote_client = remote.Connect();
  auto remote_engine = KvEngine::Open(remote_client.get(), *model_, {});
  ASSERT_TRUE(remote_engine.ok());
  auto claimed = (*remote_engine)->cache().Claim(sent->ticket);
  ASSERT_TRUE(claimed.ok());
  auto blob = DecodeBlob(claimed->blob, 256);
  ASSERT_TRUE(blob.ok()) << blob.status();
  EXPECT_EQ(blob->prompt_tokens, tokens.size());
  (*remote_engine)->set_prompt_tokens(blob->prompt_tokens);
  std::vector<uint32_t> there;
  Runner remote_runner(model_.get(), remote_engine->get(), 1);
  ASSERT_EQ(Decode(
                remote_runner, claimed->sequence->id(), blob->prompt_tokens, blob->first_token, 30, &blob->sampling,
                [](uint32_t) {}, &there),
            absl::OkStatus());
  EXPECT_EQ(there, local);
  EXPECT_EQ(there.size(), 30);
  EXPECT_EQ((*remote_engine)->counts().computed, 29);
  EXPECT_EQ((*remote_engine)->counts().prompt_computed, 0);
}

TEST(Sampling, GreedyAndDistribution) {
  const std::vector<float> logits = {0, std::log(3.0f), -1000};
  SamplingState greedy{0, 1};
  EXPECT_EQ(Sample(logits, &greedy), 1);
  SamplingState state{1, 9}, equal{1, 9};
  std::vector<int> drawn(3);
  for (int i = 0; i < 4000; ++i) {
    const uint32_t token = Sample(logits, &state);
    ++drawn[token];
    EXPECT_EQ(token, Sample(logits, &equal));
  }
  EXPECT_NEAR(drawn[1] / 4000.0, 0.75, 0.03);
  EXPECT_EQ(drawn[2], 0);
}

TEST(HandOffBlob, SurvivesAndRefuses) {
  const auto blob = DecodeBlob(EncodeBlob({6000, 17, {0.7, UINT64_MAX - 5}}), 256);
  ASSERT_TRUE(blob.ok());
  EXPECT_EQ(blob->prompt_tokens, 6000);
  EXPECT_EQ(blob->first_token, 17);
  EXPECT_EQ(blob->sampling.temperature, 0.7);
  EXPECT_EQ(blob->sampling.random_state, UINT64_MAX - 5);
  EXPECT_FALSE(DecodeBlob("", 256).ok());
  EXPECT_FALSE(DecodeBlob("[]", 256).ok());
  EXPECT_FALSE(DecodeBlob(std::string(5000, ' '), 256).ok());
  EXPECT_THAT(std::string(DecodeBlob(EncodeBlob({1, 256, {}}), 256).status().message()),
              HasSubstr("first_token is 256"));
  EXPECT_THAT(std::string(DecodeBlob(EncodeBlob({1, 1, {101, 0}}), 256).status().message()),
              HasSubstr("temperature is 101"));
  std::string text = EncodeBlob({1, 1, {}});
  for (size_t i = 0; i < text.size(); ++i) {
    for (char c : {'\0', '-', '9', '{'}) {
      std::string bad = text;
      bad[i] = c;
      const auto decoded = DecodeBlob(bad, 256);
      if (decoded.ok()) {
        EXPECT_LT(decoded->first_token, 256);
      }
    }
  }
}

TEST(ExpectedPairs, EqualsCountingEveryPair) {
  for (uint64_t tokens : {1u, 63u, 64u, 65u, 200u, 640u, 1000u}) {
    for (int lag : {0, 1, 2, 5}) {
      PairCounts pairs;
      for (uint64_t q = 0; q < tokens; ++q) {
        for (uint64_t t = 0; t <= q; ++t) ++(t / 64 + lag < q / 64 ? pairs.encoded : pairs.raw);
      }
      EXPECT_EQ(ExpectedPairs(tokens, 64, lag, true), pairs) << tokens << " " << lag;
      EXPECT_EQ(ExpectedPairs(tokens, 64, lag, false), (PairCounts{0, tokens * (tokens + 1) / 2}));
      PairCounts with_sinks;
      for (uint64_t q = 0; q < tokens; ++q) {
        for (uint64_t t = 0; t <= q; ++t) ++(t / 64 + lag < q / 64 && t >= 128 ? with_sinks.encoded : with_sinks.raw);
      }
      EXPECT_EQ(ExpectedPairs(tokens, 64, lag, true, 128), with_sinks) << tokens << " " << lag;
    }
  }
}

TEST(SinkTokens, AreTheLastClauses) {
  EXPECT_EQ(SinkTokens("hack:k_bits=3;0..1=raw;sinks=128"), 128u);
  EXPECT_EQ(SinkTokens("hack:k_bits=3"), 0u);
  EXPECT_EQ(SinkTokens("pq:m=4,sinks=32"), 0u);
}

std::vector<uint8_t> RandomText(size_t n) {
  std::vector<uint8_t> text;
  for (uint32_t token : RandomTokens(n, 8)) text.push_back(uint8_t(token));
  return text;
}

TEST_F(EngineTest, EvaluateEqualsOneWindowAtATime) {
  const std::vector<uint8_t> text = RandomText(1000);
  EvaluateOptions options;
  options.window = 150;
  options.stride = 60;
  options.windows = 11;  // more than one batch
  options.threads = 2;
  KvEngineOptions engine_options;
  engine_options.codec = "hack;sinks=0";  // a window has one page that is read encoded
  engine_options.lag_pages = 1;
  engine_options.rows_max = EvaluateRowsMax(options, 64);
  int64_t last = 0, total = 0;
  const auto result =
      Evaluate(*model_, Open(engine_options).get(), text, options, nullptr, [&](int64_t done, int64_t all) {
        EXPECT_GT(done, last);
        last = done;
        total = all;
      });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(last, total);
  EXPECT_EQ(result->pairs, result->expected_pairs);
  EXPECT_GT(result->pairs.encoded, 0);
  const client::CacheDescription cache = Open(engine_options)->cache().description();
  EXPECT_EQ(result->bytes_per_token_head, cache.payload_page_bytes / (64.0 * 2));
  // Two full pages encoded; of three pages, the newest full one and the open one raw. Per KV head.
  EXPECT_NEAR(result->resident_bytes_per_token_head, (2 * cache.encoded_page_bytes + 2 * cache.raw_page_bytes) / 300.0,
              1e-9);
  EXPECT_EQ(host_.infos, 8u);  // one look at each sequence of a batch told that it had settled

  double bpb = 0, second = 0;
  const auto engine = Open();
  Runner runner(model_.get(), engine.get(), 1);
  for (int w = 0; w < options.windows; ++w) {
    auto created = engine->CreateSequence({});
    const std::vector<uint32_t> tokens(&text[w * options.stride], &text[w * options.stride + options.window]);
    const KvEntry entry{created->sequence->id(), 0, options.window};
    std::vector<float> logits;
    ASSERT_EQ(runner.Step({&entry, 1}, tokens, Runner::Logits::kAll, &logits), absl::OkStatus());
    for (int i = 0; i < options.window; ++i) {
      double sum = 0;
      for (int t = 0; t < 256; ++t) sum += std::exp(double(logits[i * 256 + t]));
      const double bits = std::log2(sum / std::exp(double(logits[i * 256 + text[w * options.stride + i + 1]])));
      bpb += bits / (options.windows * options.window);
      if (i >= options.window / 2) second += bits / (options.windows * (options.window / 2));
    }
  }
  EXPECT_NEAR(result->bpb, bpb, 1e-3);
  EXPECT_NEAR(result->bpb_second_half, second, 1e-3);
  EXPECT_GT(std::abs(bpb - second), 2e-3);  // the halves differ, so that mixing them up would show
  EXPECT_TRUE(host_.sequences.size() == 1 || host_.sequences.empty());
}

TEST_F(EngineTest, EvaluateKnowsWhatLayersAndSinksTake) {
  const std::vector<uint8_t> text = RandomText(700);
  EvaluateOptions options;
  options.window = 340;
  options.stride = 340;
  options.windows = 2;
  KvEngineOptions engine_options;
  engine_options.lag_pages = 1;
  engine_options.rows_max = EvaluateRowsMax(options, 64);
  for (const char* codec :
       {"raw", "hack", "hack:k_bits=2,v_bits=2;0..0=hack:k_bits=8,v_bits=8;sinks=0", "hack:k_bits=2,v_bits=2;sinks=100",
        "hack:k_bits=2,v_bits=2;1..1=raw;sinks=64", "hack:k_bits=2,v_bits=2;sinks=1024"}) {
    engine_options.codec = codec;
    host_.infos = 0;
    const auto result = Evaluate(*model_, Open(engine_options).get(), text, options, nullptr, [](int64_t, int64_t) {});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->pairs, result->expected_pairs) << codec;
    EXPECT_EQ(host_.infos, 2u) << codec;
    EXPECT_GT(result->resident_bytes_per_token_head, 0) << codec;
  }
}

TEST_F(EngineTest, EvaluateTellsAMiscountAndShortText) {
  EvaluateOptions options;
  options.window = 100;
  options.stride = 100;
  options.windows = 2;
  KvEngineOptions engine_options;
  engine_options.rows_max = EvaluateRowsMax(options, 64);
  const std::vector<uint8_t> text = RandomText(201);
  const auto nothing = [](int64_t, int64_t) {};
  host_.pair_error = 1;
  const auto miscounted = Evaluate(*model_, Open(engine_options).get(), text, options, nullptr, nothing);
  ASSERT_TRUE(miscounted.ok());
  EXPECT_NE(miscounted->pairs, miscounted->expected_pairs);
  const auto shorter =
      Evaluate(*model_, Open(engine_options).get(), absl::MakeConstSpan(text).first(200), options, nullptr, nothing);
  EXPECT_THAT(std::string(shorter.status().message()), HasSubstr("text bytes is 200, must be at least 201"));
  options.window = 1;
  EXPECT_THAT(
      std::string(Evaluate(*model_, Open(engine_options).get(), text, options, nullptr, nothing).status().message()),
      HasSubstr("window is 1"));
}

}  // namespace
}  // namespace kvmanager::engine
