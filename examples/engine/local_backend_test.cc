#include "examples/engine/local_backend.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "codecs/builtin.h"
#include "codecs/registry.h"
#include "examples/engine/tiny_model.h"
#include "gtest/gtest.h"

namespace kvmanager::engine {
namespace {

class LocalBackendTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto model = TinyModel(TinyConfig(), 7);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    RegisterBuiltinCodecs(registry_);
  }

  std::unique_ptr<Codec> MakeCodec(const std::string& spec, int page_tokens = 64) {
    auto codec = registry_.Create(spec, LocalContext(*model_, page_tokens));
    EXPECT_TRUE(codec.ok()) << codec.status();
    return *std::move(codec);
  }

  /// Logits of the last token of `tokens`, in chunks of `chunk`.
  std::vector<float> LastLogits(const Codec& codec, int lag_pages, int threads, absl::Span<const uint32_t> tokens,
                                int chunk, LocalCounts* counts = nullptr) {
    auto backend = LocalBackend::Create(model_.get(), &codec, {lag_pages, 640, threads});
    EXPECT_TRUE(backend.ok()) << backend.status();
    Runner runner(model_.get(), backend->get(), 1);
    const uint64_t sequence = (*backend)->CreateSequence();
    std::vector<float> logits;
    for (size_t at = 0; at < tokens.size(); at += chunk) {
      const int count = int(std::min<size_t>(chunk, tokens.size() - at));
      const KvEntry entry{sequence, at, count};
      const absl::Status status =
          runner.Step(absl::MakeConstSpan(&entry, 1), tokens.subspan(at, count), Runner::Logits::kLast, &logits);
      EXPECT_TRUE(status.ok()) << status;
    }
    if (counts != nullptr) *counts = (*backend)->counts();
    return logits;
  }

  std::unique_ptr<Model> model_;
  CodecRegistry registry_;
};

double Difference(absl::Span<const float> a, absl::Span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::fabs(double(a[i]) - b[i]));
  return worst;
}

TEST_F(LocalBackendTest, WhatAQueryReadsDependsOnLagAlone) {
  const std::vector<uint32_t> tokens = RandomTokens(600, 3);
  // A matrix product rounds otherwise for other chunks, by which values at an edge get another code: with fine codes
  // that changes less than reading one more page raw does.
  const auto codec = MakeCodec("hack:k_bits=4,v_bits=4");
  constexpr double kAnotherCode = 1e-2;
  LocalCounts whole;
  const std::vector<float> reference = LastLogits(*codec, 2, 1, tokens, 600, &whole);
  EXPECT_GT(Difference(LastLogits(*codec, 3, 1, tokens, 600), reference), kAnotherCode);
  const PairCounts expected = ExpectedPairs(600, 64, 2, true);
  EXPECT_EQ(whole.pairs, (PairCounts{expected.encoded * 2, expected.raw * 2}));
  EXPECT_EQ(whole.encoded_pages, 2u * (600 / 64));
  for (int chunk : {7, 64, 150}) {
    for (int threads : {1, 3}) {
      LocalCounts counts;
      EXPECT_LT(Difference(LastLogits(*codec, 2, threads, tokens, chunk, &counts), reference), kAnotherCode) << chunk;
      EXPECT_EQ(counts.pairs, whole.pairs) << chunk;
    }
  }
  EXPECT_GT(Difference(LastLogits(*codec, 0, 1, tokens, 64), reference), 3e-2);
}

TEST_F(LocalBackendTest, ALongLagIsRaw) {
  const std::vector<uint32_t> tokens = RandomTokens(400, 4);
  const std::vector<float> raw = LastLogits(*MakeCodec("raw"), 2, 1, tokens, 64);
  EXPECT_LT(Difference(LastLogits(*MakeCodec("hack:k_bits=2,v_bits=2"), 7, 1, tokens, 64), raw), 1e-4);
  EXPECT_LT(Difference(LastLogits(*MakeCodec("hack:k_bits=8,v_bits=8"), 0, 1, tokens, 64), raw), 0.2);
}

TEST_F(LocalBackendTest, ObserverSeesEveryStep) {
  const auto codec = MakeCodec("raw");
  auto backend = LocalBackend::Create(model_.get(), codec.get(), {2, 256, 1});
  ASSERT_TRUE(backend.ok());
  int calls = 0, rows = 0;
  (*backend)->set_observer([&](int layer, absl::Span<const KvEntry> entries, const StepBuffers& buffers) {
    EXPECT_EQ(layer, calls++ % 2);
    for (const KvEntry& entry : entries) rows += entry.tokens;
    EXPECT_NE(buffers.q[0], 0);
  });
  Runner runner(model_.get(), backend->get(), 1);
  const KvEntry entries[] = {{(*backend)->CreateSequence(), 0, 20}, {(*backend)->CreateSequence(), 0, 5}};
  std::vector<float> logits;
  ASSERT_TRUE(runner.Step(entries, RandomTokens(25, 1), Runner::Logits::kNone, &logits).ok());
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(rows, 50);
}

TEST_F(LocalBackendTest, EvaluationCountsWhatItRead) {
  const std::string text = [] {
    std::string bytes;
    for (uint32_t token : RandomTokens(1000, 9)) bytes.push_back(char(token));
    return bytes;
  }();
  const auto bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  EvaluateOptions options;
  options.window = 300;
  options.windows = 3;
  options.stride = 340;
  options.threads = 2;
  int64_t last = 0;
  const auto raw = EvaluateLocal(*model_, *MakeCodec("raw"), bytes, options, 2, [&](int64_t done, int64_t total) {
    EXPECT_LE(done, total);
    EXPECT_GT(done, last);
    last = done;
  });
  ASSERT_TRUE(raw.ok()) << raw.status();
  EXPECT_EQ(raw->counts.pairs, raw->expected_pairs);
  EXPECT_EQ(raw->bytes_per_token_head, 64);
  EXPECT_GT(raw->loss.bpb, 7);
  const auto coarse =
      EvaluateLocal(*model_, *MakeCodec("hack:k_bits=1,v_bits=1"), bytes, options, 0, [](int64_t, int64_t) {});
  ASSERT_TRUE(coarse.ok()) << coarse.status();
  EXPECT_EQ(coarse->counts.pairs, coarse->expected_pairs);
  EXPECT_NE(coarse->loss.bpb, raw->loss.bpb);
  options.windows = 4;
  EXPECT_FALSE(EvaluateLocal(*model_, *MakeCodec("raw"), bytes, options, 2, [](int64_t, int64_t) {}).ok());
}

TEST_F(LocalBackendTest, CodecsThatReadAPartAreRefused) {
  const auto codec = MakeCodec("pq");
  ASSERT_NE(codec->NewIndex({}), nullptr);
  const std::vector<uint8_t> text(400);
  EvaluateOptions options;
  options.window = 300;
  options.windows = 1;
  const absl::Status status =
      EvaluateLocal(*model_, *codec, text, options, 2, [](int64_t, int64_t) { FAIL() << "it was measured"; }).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_NE(status.message().find("evaluate"), absl::string_view::npos) << status;
}

TEST_F(LocalBackendTest, WrongStepsAreRefused) {
  const auto codec = MakeCodec("raw");
  EXPECT_FALSE(LocalBackend::Create(model_.get(), codec.get(), {-1, 16, 1}).ok());
  EXPECT_FALSE(LocalBackend::Create(model_.get(), codec.get(), {2, 0, 1}).ok());
  EXPECT_FALSE(LocalBackend::Create(model_.get(), codec.get(), {2, 16, 0}).ok());
  auto backend = LocalBackend::Create(model_.get(), codec.get(), {2, 16, 1});
  ASSERT_TRUE(backend.ok());
  LocalBackend& local = **backend;
  const uint64_t sequence = local.CreateSequence();
  const auto refused = [&](int layer, std::vector<KvEntry> entries) {
    return !local.AppendAndAttend(layer, entries).ok();
  };
  EXPECT_TRUE(refused(2, {{sequence, 0, 1}}));
  EXPECT_TRUE(refused(0, {{sequence + 1, 0, 1}}));
  EXPECT_TRUE(refused(0, {{sequence, 1, 1}}));
  EXPECT_TRUE(refused(0, {{sequence, 0, 17}}));
  EXPECT_TRUE(refused(0, {{sequence, 0, 0}}));
  EXPECT_TRUE(refused(0, {{sequence, 0, 1}, {sequence, 1, 1}}));
  local.buffers().k[3] = 0x7c00;
  EXPECT_TRUE(refused(0, {{sequence, 0, 1}}));
  local.buffers().k[3] = 0;
  EXPECT_FALSE(refused(0, {{sequence, 0, 1}}));
  local.DropSequence(sequence);
  EXPECT_TRUE(refused(0, {{sequence, 1, 1}}));
}

}  // namespace
}  // namespace kvmanager::engine
