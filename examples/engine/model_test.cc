#include "examples/engine/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "examples/engine/fake_client.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/tiny_model.h"

namespace kvmanager::engine {
namespace {

using ::testing::HasSubstr;

// ---- the same model in plain loops over the file's values, in double
// ------------------------------------------------------
class PlainModel {
 public:
  PlainModel(const ModelConfig& config, const std::vector<FileTensor>& tensors) : c_(config) {
    for (const FileTensor& t : tensors) {
      std::vector<double>& values = weights_[t.name];
      for (size_t i = 0; i < t.bytes.size() / 2; ++i) values.push_back(LoadElement(t.bytes.data(), DType::kFloat16, i));
    }
  }

  /// Logits [tokens][vocab]. K and V are rounded to float16, as the cache holds them.
  std::vector<std::vector<double>> Run(const std::vector<uint32_t>& tokens) {
    const int n = int(tokens.size()), d = c_.head_dim;
    std::vector<std::vector<double>> h(n);
    const auto& embeddings = weights_.at("model.embed_tokens.weight");
    for (int t = 0; t < n; ++t)
      h[t].assign(&embeddings[tokens[t] * c_.hidden_size], &embeddings[(tokens[t] + 1) * c_.hidden_size]);
    for (int layer = 0; layer < c_.layers; ++layer) {
      const std::string p = absl::StrCat("model.layers.", layer, ".");
      std::vector<std::vector<double>> q(n), k(n), v(n);
      for (int t = 0; t < n; ++t) {
        const auto x = Norm(h[t], p + "input_layernorm.weight");
        q[t] = Rope(Linear(x, p + "self_attn.q_proj.weight"), t);
        k[t] = Half(Rope(Linear(x, p + "self_attn.k_proj.weight"), t));
        v[t] = Half(Linear(x, p + "self_attn.v_proj.weight"));
      }
      for (int t = 0; t < n; ++t) {
        std::vector<double> mixed(c_.query_heads * d, 0.0);
        for (int head = 0; head < c_.query_heads; ++head) {
          const int kv = head / (c_.query_heads / c_.kv_heads);
          std::vector<double> weight;
          double sum = 0;
          for (int s = 0; s <= t; ++s) {
            double dot = 0;
            for (int i = 0; i < d; ++i) dot += q[t][head * d + i] * k[s][kv * d + i];
            weight.push_back(std::exp(dot / std::sqrt(double(d))));
            sum += weight.back();
          }
          for (int s = 0; s <= t; ++s) {
            for (int i = 0; i < d; ++i) mixed[head * d + i] += weight[s] / sum * v[s][kv * d + i];
          }
        }
        AddTo(&h[t], Linear(mixed, p + "self_attn.o_proj.weight"));
        const auto x = Norm(h[t], p + "post_attention_layernorm.weight");
        auto gate = Linear(x, p + "mlp.gate_proj.weight");
        const auto up = Linear(x, p + "mlp.up_proj.weight");
        for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
        AddTo(&h[t], Linear(gate, p + "mlp.down_proj.weight"));
      }
    }
    for (auto& row : h)
      row = Linear(Norm(row, "model.norm.weight"),
                   c_.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
    return h;
  }

 private:
  std::vector<double> Linear(const std::vector<double>& x, const std::string& name) {
    const std::vector<double>& w = weights_.at(name);
    std::vector<double> y(w.size() / x.size(), 0.0);
    for (size_t o = 0; o < y.size(); ++o) {
      for (size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
    }
    return y;
  }
  std::vector<double> Norm(const std::vector<double>& x, const std::string& name) {
    const std::vector<double>& w = weights_.at(name);
    double square = 0;
    for (double value : x) square += value * value / double(x.size());
    std::vector<double> y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] / std::sqrt(square + c_.rms_norm_eps) * w[i];
    return y;
  }
  std::vector<double> Rope(const std::vector<double>& x, int position) {
    std::vector<double> y(x.size());
    const int d = c_.head_dim, half = d / 2;
    for (size_t at = 0; at < x.size(); ++at) {
      const int channel = int(at % d);
      const double angle = position * std::pow(c_.rope_theta, -2.0 * (channel % half) / d);
      const double other = channel < half ? -x[at + half] : x[at - half];
      y[at] = x[at] * std::cos(angle) + other * std::sin(angle);
    }
    return y;
  }
  std::vector<double> Half(std::vector<double> x) {
    for (double& value : x) value = HalfToFloat(FloatToHalf(float(value)));
    return x;
  }
  void AddTo(std::vector<double>* x, const std::vector<double>& y) {
    for (size_t i = 0; i < x->size(); ++i) (*x)[i] += y[i];
  }

  const ModelConfig c_;
  std::map<std::string, std::vector<double>> weights_;
};

/// Logits of all tokens, run in `chunks` (the last repeats) on `threads` threads.
std::vector<float> RunChunks(const Model& model, const std::vector<uint32_t>& tokens, const std::vector<int>& chunks,
                             int threads) {
  FakeHost host;
  const auto client = host.Connect();
  auto engine = KvEngine::Open(client.get(), model, {});
  EXPECT_TRUE(engine.ok()) << engine.status();
  auto created = (*engine)->CreateSequence({});
  Runner runner(&model, engine->get(), threads);
  std::vector<float> all, logits;
  size_t position = 0;
  for (size_t i = 0; position < tokens.size(); ++i) {
    const int count = std::min<int>(chunks[std::min(i, chunks.size() - 1)], int(tokens.size() - position));
    const KvEntry entry{created->sequence->id(), position, count};
    const absl::Status done =
        runner.Step({&entry, 1}, absl::MakeConstSpan(tokens).subspan(position, count), Runner::Logits::kAll, &logits);
    EXPECT_EQ(done, absl::OkStatus());
    all.insert(all.end(), logits.begin(), logits.end());
    position += count;
  }
  return all;
}

// float32 sums of a few hundred terms around 1, through two layers.
constexpr double kTolerance = 2e-2;

void ExpectEqualsPlain(const ModelConfig& config, const std::vector<int>& chunks, int threads) {
  const std::vector<uint32_t> tokens = RandomTokens(97, 3);
  const auto expected = PlainModel(config, RandomTensors(config, 11)).Run(tokens);
  const auto model = TinyModel(config, 11);
  ASSERT_TRUE(model.ok()) << model.status();
  const std::vector<float> logits = RunChunks(**model, tokens, chunks, threads);
  ASSERT_EQ(logits.size(), tokens.size() * config.vocab_size);
  double error = 0, size = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double e = expected[i / config.vocab_size][i % config.vocab_size];
    error = std::max(error, std::abs(logits[i] - e));
    size = std::max(size, std::abs(e));
  }
  EXPECT_LT(error, kTolerance);
  EXPECT_GT(size, 100 * kTolerance);  // the tolerance tells something
}

TEST(Model, WholeChunkEqualsPlainLoops) { ExpectEqualsPlain(TinyConfig(), {97}, 1); }
TEST(Model, TokenByTokenEqualsPlainLoops) { ExpectEqualsPlain(TinyConfig(), {1}, 1); }
TEST(Model, UnevenChunksOnThreadsEqualPlainLoops) { ExpectEqualsPlain(TinyConfig(), {5, 64, 1, 7}, 3); }

TEST(Model, OneHeadPerGroupAndTiedEmbeddings) {
  ModelConfig config = TinyConfig();
  config.kv_heads = config.query_heads;
  config.tie_word_embeddings = true;
  ExpectEqualsPlain(config, {40}, 2);
}

TEST(Model, BatchedSequencesDoNotMix) {
  const auto model = TinyModel(TinyConfig(), 11);
  ASSERT_TRUE(model.ok());
  const std::vector<uint32_t> a = RandomTokens(20, 1), b = RandomTokens(33, 2);
  const std::vector<float> alone_a = RunChunks(**model, a, {64}, 1), alone_b = RunChunks(**model, b, {64}, 1);
  FakeHost host;
  const auto client = host.Connect();
  auto engine = KvEngine::Open(client.get(), **model, {});
  auto first = (*engine)->CreateSequence({}), second = (*engine)->CreateSequence({});
  Runner runner(model->get(), engine->get(), 2);
  const std::vector<KvEntry> entries = {{second->sequence->id(), 0, 33}, {first->sequence->id(), 0, 20}};
  std::vector<uint32_t> tokens = b;
  tokens.insert(tokens.end(), a.begin(), a.end());
  std::vector<float> last;
  ASSERT_EQ(runner.Step(entries, tokens, Runner::Logits::kLast, &last), absl::OkStatus());
  ASSERT_EQ(last.size(), 512);
  for (int i = 0; i < 256; ++i) {
    EXPECT_NEAR(last[i], alone_b[32 * 256 + i], kTolerance);
    EXPECT_NEAR(last[256 + i], alone_a[19 * 256 + i], kTolerance);
  }
}

TEST(Model, StepRefusesWhatDoesNotFit) {
  const auto model = TinyModel(TinyConfig(), 11);
  FakeHost host;
  const auto client = host.Connect();
  KvEngineOptions options;
  options.rows_max = 4;
  auto engine = KvEngine::Open(client.get(), **model, options);
  auto created = (*engine)->CreateSequence({});
  Runner runner(model->get(), engine->get(), 1);
  std::vector<float> logits;
  const auto step = [&](int rows, std::vector<uint32_t> tokens) {
    const KvEntry entry{created->sequence->id(), 0, rows};
    return std::string(runner.Step({&entry, 1}, tokens, Runner::Logits::kAll, &logits).message());
  };
  EXPECT_THAT(step(5, {1, 2, 3, 4, 5}), HasSubstr("rows of a step is 5"));
  EXPECT_THAT(step(0, {}), HasSubstr("tokens of an entry is 0"));
  EXPECT_THAT(step(2, {1}), HasSubstr("token ids of a step is 1"));
  EXPECT_THAT(step(1, {256}), HasSubstr("token id is 256"));
  EXPECT_EQ(host.steps, 0);
}

TEST(Model, WeightsAreChecked) {
  const auto create = [](absl::FunctionRef<void(TensorMap*)> change) {
    const std::string file = SafetensorsFile(RandomTensors(TinyConfig(), 11));
    TensorMap tensors;
    EXPECT_TRUE(ParseSafetensors(Bytes(file), "f", &tensors).ok());
    change(&tensors);
    return Model::Create(TinyConfig(), tensors);
  };
  const auto good = create([](TensorMap*) {});
  ASSERT_TRUE(good.ok());
  EXPECT_EQ((*good)->digest().size(), 64);
  const std::string missing(
      create([](TensorMap* t) { t->erase("model.layers.1.mlp.up_proj.weight"); }).status().message());
  EXPECT_THAT(missing, HasSubstr("tensor model.layers.1.mlp.up_proj.weight is absent"));
  const std::string shape(
      create([](TensorMap* t) { std::swap(t->at("lm_head.weight").shape[0], t->at("lm_head.weight").shape[1]); })
          .status()
          .message());
  EXPECT_THAT(shape, HasSubstr("tensor lm_head.weight: shape is [48, 256], must be [256, 48]"));
  const std::string dtype(create([](TensorMap* t) { t->at("model.norm.weight").dtype = "I16"; }).status().message());
  EXPECT_THAT(dtype, HasSubstr("tensor model.norm.weight: dtype is I16"));
  static const std::string nan(2 * 48, '\xff');
  const std::string value(
      create([](TensorMap* t) { t->at("model.norm.weight").bytes = Bytes(nan); }).status().message());
  EXPECT_THAT(value, HasSubstr("tensor model.norm.weight: value 0 is"));

  static std::string changed(2 * 48, '\0');
  const auto other = create([](TensorMap* t) { t->at("model.norm.weight").bytes = Bytes(changed); });
  ASSERT_TRUE(other.ok());
  EXPECT_NE((*other)->digest(), (*good)->digest());
}

TEST(ModelConfig, ReadsBothPlacesOfTheta) {
  const std::string common =
      R"("hidden_size":256,"intermediate_size":768,"num_hidden_layers":6,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":128,)"
      R"("vocab_size":256,"rms_norm_eps":1e-05)";
  const auto nested =
      ParseModelConfig("{" + common + R"(,"rope_parameters":{"rope_theta":500000.0,"rope_type":"default"}})");
  ASSERT_TRUE(nested.ok()) << nested.status();
  EXPECT_EQ(nested->rope_theta, 500000);
  EXPECT_EQ(nested->head_dim, 128);
  EXPECT_FLOAT_EQ(nested->rms_norm_eps, 1e-5f);
  const auto flat = ParseModelConfig("{" + common + R"(,"rope_theta":1000,"tie_word_embeddings":true})");
  ASSERT_TRUE(flat.ok());
  EXPECT_EQ(flat->rope_theta, 1000);
  EXPECT_TRUE(flat->tie_word_embeddings);
}

TEST(ModelConfig, NamesEveryBadField) {
  const std::map<std::string, std::string> good = {
      {"hidden_size", "256"},       {"intermediate_size", "768"}, {"num_hidden_layers", "6"},
      {"num_attention_heads", "8"}, {"num_key_value_heads", "2"}, {"head_dim", "128"},
      {"vocab_size", "256"},        {"rms_norm_eps", "1e-05"},    {"rope_theta", "10000"}};
  const auto parse = [&](const std::string& field, const std::string& value) {
    std::map<std::string, std::string> fields = good;
    fields[field] = value;
    std::vector<std::string> parts;
    for (const auto& [name, v] : fields) parts.push_back("\"" + name + "\":" + v);
    return ParseModelConfig("{" + absl::StrJoin(parts, ",") + "}");
  };
  ASSERT_TRUE(parse("hidden_act", "\"silu\"").ok());
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"hidden_size", "0"},
      {"hidden_size", "-1"},
      {"hidden_size", "1e9"},
      {"hidden_size", "\"256\""},
      {"num_hidden_layers", "99999"},
      {"num_attention_heads", "7"},
      {"num_key_value_heads", "0"},
      {"head_dim", "100"},
      {"head_dim", "512"},
      {"vocab_size", "18446744073709551615"},
      {"rms_norm_eps", "0"},
      {"rms_norm_eps", "null"},
      {"rope_theta", "-5"},
      {"rope_scaling", "{\"factor\":8}"},
      {"hidden_act", "\"gelu\""},
      {"attention_bias", "true"},
      {"model_type", "\"gpt2\""},
      {"tie_word_embeddings", "3"},
  };
  for (const auto& [field, value] : bad) {
    const auto parsed = parse(field, value);
    ASSERT_FALSE(parsed.ok()) << field << " " << value;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(field)) << value;
  }
  EXPECT_FALSE(ParseModelConfig("").ok());
  EXPECT_FALSE(ParseModelConfig("[]").ok());
  EXPECT_FALSE(ParseModelConfig("{\"hidden_act\":" + std::string(100000, '[') + std::string(100000, ']') + "}").ok());
  EXPECT_FALSE(ParseModelConfig(R"({"rope_parameters":{"rope_type":"yarn"}})").ok());
}

}  // namespace
}  // namespace kvmanager::engine
