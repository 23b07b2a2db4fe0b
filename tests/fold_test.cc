// An engine that folds a codec's way back into its output projection computes what one that does not fold computes.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "codecs/calibrate/synthetic.h"
#include "examples/engine/kv_engine.h"
#include "examples/engine/tiny_model.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::Client;
using engine::KvEngine;
using engine::KvEngineOptions;
using engine::Runner;

// Of logits: pages in fp16 of another space, and sums in another order. At rate 0 nothing else may differ; at others,
// what raw pages add loses what the space does not have, which without folding it keeps.
constexpr double kTolerance = 3e-2;

class FoldTest : public ::testing::Test {
 protected:
  void SetUp() override {
    engine::ModelConfig config = engine::TinyConfig();
    config.head_dim = 32;
    ASSERT_OK_AND_ASSIGN(model_, engine::TinyModel(config, 5));
    const CalibrationModel made_for = {config.name,    "", config.layers, config.kv_heads, config.query_heads,
                                       config.head_dim};
    const auto artifact = SyntheticCalibration(made_for, 3, {});
    std::ofstream(absl::StrCat(directory_.path(), "/tiny.safetensors"), std::ios::binary)
        << SerializeCalibration(artifact->model(), artifact->tensors(), artifact->metadata());
    DaemonOptions options;
    options.more_flags = {"--threads", "2", "--calibration-dir", directory_.path()};
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  }
  void TearDown() override { client_.reset(); }

  /// Logits of every token of a context, prefilled in chunks that leave pages of every form behind.
  std::vector<float> Logits(const std::string& codec, bool* folds) {
    KvEngineOptions options;
    options.codec = codec;
    options.lag_pages = 1;
    options.rows_max = 64;
    std::vector<float> all;
    absl::StatusOr<std::unique_ptr<KvEngine>> kv = KvEngine::Open(client_.get(), *model_, options);
    EXPECT_OK(kv.status());
    if (!kv.ok()) return all;
    *folds = false;
    for (int layer = 0; layer < model_->config().layers; ++layer) *folds |= !(*kv)->OutputWeights(layer).empty();
    absl::StatusOr<client::CreatedSequence> created = (*kv)->CreateSequence({});
    EXPECT_OK(created.status());
    Runner runner(model_.get(), kv->get(), 1);
    const std::vector<uint32_t> tokens = engine::RandomTokens(64 * 5 + 20, 6);
    for (size_t at = 0; at < tokens.size(); at += 50) {
      const auto chunk = absl::MakeConstSpan(tokens).subspan(at, 50);
      const engine::KvEntry entry{created->sequence->id(), at, int(chunk.size())};
      std::vector<float> logits;
      EXPECT_OK(runner.Step({&entry, 1}, chunk, Runner::Logits::kAll, &logits));
      all.insert(all.end(), logits.begin(), logits.end());
    }
    EXPECT_GT((*kv)->counts().encoded_pairs, 0u);
    return all;
  }

  TempDir directory_;
  std::unique_ptr<engine::Model> model_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(FoldTest, FoldedAndExpandedGiveTheSameLogits) {
  for (const std::string mode : {"joint", "balanced"}) {
    for (const std::string rest : {"", ";0=hack:k_bits=8,v_bits=8"}) {
      SCOPED_TRACE(mode + rest);
      const std::string spec = absl::StrCat("zack:mode=", mode, ",rate=0,calibration=tiny,fold=");
      bool plain_folds = true, folded_folds = false;
      const std::vector<float> plain = Logits(absl::StrCat(spec, 0, rest), &plain_folds);
      const std::vector<float> folded = Logits(absl::StrCat(spec, 1, rest), &folded_folds);
      EXPECT_FALSE(plain_folds);
      EXPECT_TRUE(folded_folds);
      ASSERT_EQ(plain.size(), folded.size());
      double largest = 0;
      for (size_t i = 0; i < plain.size(); ++i) largest = std::max(largest, std::abs(double(plain[i]) - folded[i]));
      EXPECT_LT(largest, kTolerance);
      EXPECT_FALSE(plain.empty());
    }
  }
}

}  // namespace
}  // namespace kvmanager::testing
