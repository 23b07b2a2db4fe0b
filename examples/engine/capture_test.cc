#include "codecs/calibrate/capture.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/builtin.h"
#include "codecs/registry.h"
#include "examples/engine/calibrate_command.h"
#include "examples/engine/capture_command.h"
#include "examples/engine/capture_model.h"
#include "examples/engine/local_backend.h"
#include "examples/engine/program.h"
#include "examples/engine/tiny_files.h"
#include "examples/engine/tiny_model.h"
#include "examples/engine/windows.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::engine {
namespace {

namespace fs = std::filesystem;
using calibrate::Capture;

constexpr int kD = 32;

ModelConfig Config() {
  ModelConfig config = TinyConfig();
  config.head_dim = kD;
  return config;
}

/// What a backend's buffers held: rows of kD by layer, part, head, window and position.
using Key = std::tuple<int, Capture::Part, int, int, uint64_t>;
using Seen = std::map<Key, std::vector<float>>;

Seen WhatTheBackendSees(const Model& model, const std::string& text, int windows, int window) {
  Seen seen;
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  const auto raw = registry.Create("raw", LocalContext(model));
  EvaluateOptions options;
  options.windows = windows;
  options.window = window;
  options.stride = window;
  LocalBackendOptions backend_options;
  backend_options.rows_max = EvaluateRowsMax(options, 64);
  const auto backend = LocalBackend::Create(&model, raw->get(), backend_options);
  std::map<uint64_t, int> numbers;  // of windows, by sequence
  (*backend)->set_observer([&](int layer, absl::Span<const KvEntry> entries, const StepBuffers& buffers) {
    const ModelConfig& c = model.config();
    size_t row = 0;
    for (const KvEntry& entry : entries) {
      const int number = numbers.try_emplace(entry.sequence, int(numbers.size())).first->second;
      for (int t = 0; t < entry.tokens; ++t, ++row) {
        const auto halves = [&](const uint16_t* from, int head) {
          std::vector<float> values(kD);
          for (int i = 0; i < kD; ++i) values[i] = HalfToFloat(from[(row * c.kv_heads + head) * kD + i]);
          return values;
        };
        for (int head = 0; head < c.query_heads; ++head) {
          const float* const q = buffers.q + (row * c.query_heads + head) * kD;
          seen[{layer, Capture::Part::kQ, head, number, entry.position + t}] = {q, q + kD};
        }
        for (int head = 0; head < c.kv_heads; ++head) {
          seen[{layer, Capture::Part::kK, head, number, entry.position + t}] = halves(buffers.k, head);
          seen[{layer, Capture::Part::kV, head, number, entry.position + t}] = halves(buffers.v, head);
        }
      }
    }
  });
  const auto store = MakeLocalWindows(backend->get());
  EXPECT_TRUE(VisitWindows(model, store.get(), Bytes(text), options, 64, nullptr, [](int64_t, int64_t) {}).ok());
  EXPECT_EQ(numbers.size(), size_t(windows));
  return seen;
}

class CaptureTest : public ::testing::Test {
 protected:
  CaptureTest() : directory_(fs::path(::testing::TempDir()) / "capture_test") {
    fs::remove_all(directory_);
    WriteTinyModel(Config(), 5, directory_ / "tiny");
    WriteRandomText(1200, 6, directory_ / "text");
    arguments_.model = (directory_ / "tiny").string();
    arguments_.text = (directory_ / "text").string();
    arguments_.out = (directory_ / "new.safetensors").string();
    arguments_.tokens = 640;
    arguments_.threads = 1;
    arguments_.quiet = true;
  }
  ~CaptureTest() override { fs::remove_all(directory_); }

  /// Captures, and compares every row with what a backend sees over the same windows.
  void ExpectWhatTheBackendSees(int windows, int window, uint64_t tokens) {
    const absl::Status status = RunCapture(arguments_);
    ASSERT_TRUE(status.ok()) << status;
    const auto capture = Capture::Open(arguments_.out);
    ASSERT_TRUE(capture.ok()) << capture.status();
    const auto model = Model::Load(arguments_.model);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*capture)->model(), (CalibrationModel{"tiny", (*model)->digest(), 2, 2, 6, kD}));
    EXPECT_EQ((*capture)->tokens(), tokens);
    EXPECT_EQ((*Safetensors::Open(arguments_.out))->metadata().at("windows"), absl::StrCat(window));
    const Seen seen = WhatTheBackendSees(**model, *ReadFile(arguments_.text), windows, window);
    ASSERT_EQ(seen.size(), 2 * (6 + 2 + 2) * tokens);
    std::vector<float> row(kD);
    for (const auto& [key, values] : seen) {
      const auto& [layer, part, head, number, position] = key;
      (*capture)->CopyRows(layer, part, head, uint64_t(number) * window + position, 1, row.data(), kD);
      for (int i = 0; i < kD; ++i) {
        const float wanted = arguments_.dtype == "f16" ? HalfToFloat(FloatToHalf(values[i])) : values[i];
        ASSERT_EQ(row[i], wanted) << layer << " " << int(part) << " " << head << " " << number << " " << position;
      }
    }
  }

  const fs::path directory_;
  CaptureArguments arguments_;
};

TEST_F(CaptureTest, IsWhatTheBackendSawInOneContext) {
  arguments_.tokens = 200;  // not whole pages
  arguments_.dtype = "f32";
  ExpectWhatTheBackendSees(1, 200, 200);
  EXPECT_FALSE((*Capture::Open(arguments_.out))->has_output_projection());
}

TEST_F(CaptureTest, IsWhatTheBackendSawInMoreWindowsThanABatchHas) {
  static_assert(EvaluateOptions::kBatchWindows < 10);
  arguments_.window = 64;
  ExpectWhatTheBackendSees(10, 64, 640);
}

TEST_F(CaptureTest, WindowsOfSeveralPagesFollowOneAnother) {
  arguments_.window = 128;
  arguments_.dtype = "f32";
  ExpectWhatTheBackendSees(5, 128, 640);
}

TEST_F(CaptureTest, TrainsAnArtifact) {
  arguments_.output_projection = true;
  arguments_.dtype = "f32";
  ASSERT_TRUE(RunCapture(arguments_).ok());
  const auto capture = Capture::Open(arguments_.out);
  ASSERT_TRUE(capture.ok()) << capture.status();
  const auto model = Model::Load(arguments_.model);
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_EQ((*capture)->OutputProjection(layer), (*model)->layers()[layer].o);
  }
  // The same windows from the model and from the capture; the order of sums alone differs.
  CalibrateArguments calibrate;
  calibrate.codecs = {"zack"};
  calibrate.windows = 1;
  calibrate.window = 640;
  calibrate.choice_windows = 0;
  calibrate.threads = 1;
  calibrate.quiet = true;
  CalibrateArguments from_model = calibrate, from_capture = calibrate;
  from_model.model = arguments_.model;
  from_model.text = arguments_.text;
  from_model.out = (directory_ / "model.safetensors").string();
  from_capture.capture = arguments_.out;
  from_capture.out = (directory_ / "capture.safetensors").string();
  for (const CalibrateArguments& a : {from_model, from_capture}) {
    const absl::Status status = RunCalibrate(a);
    ASSERT_TRUE(status.ok()) << status;
  }
  const auto one = Calibration::Load(from_model.out), other = Calibration::Load(from_capture.out);
  ASSERT_TRUE(one.ok() && other.ok());
  EXPECT_EQ((*one)->model(), (*other)->model());
  for (const char* side : {"zack.balanced.qk.weights", "zack.balanced.vw.weights"}) {
    const auto a = (*one)->Floats(side, {2, 2, kD}, ""), b = (*other)->Floats(side, {2, 2, kD}, "");
    ASSERT_TRUE(a.ok() && b.ok());
    for (size_t i = 0; i < a->size(); ++i) EXPECT_NEAR((*a)[i], (*b)[i], 1e-4 * (*a)[0]) << side << " " << i;
  }
}

TEST_F(CaptureTest, QueriesBeyondHalfPrecisionAreNamed) {
  std::vector<FileTensor> tensors = RandomTensors(Config(), 5);
  for (FileTensor& tensor : tensors) {
    if (tensor.name != "model.layers.1.self_attn.q_proj.weight") continue;
    for (size_t i = 0; i < tensor.bytes.size() / 2; ++i) {
      StoreElement(tensor.bytes.data(), DType::kFloat16, i, i % 2 == 0 ? 30000.0f : -20000.0f);
    }
  }
  std::ofstream(directory_ / "tiny/model.safetensors", std::ios::binary) << SafetensorsFile(tensors);
  const absl::Status status = RunCapture(arguments_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  for (const char* wanted : {"layers.1.q", "--dtype f32"}) {
    EXPECT_TRUE(absl::StrContains(status.message(), wanted)) << status;
  }
  EXPECT_FALSE(fs::exists(arguments_.out));
  arguments_.dtype = "f32";
  EXPECT_TRUE(RunCapture(arguments_).ok());
}

TEST_F(CaptureTest, WhatCannotWorkIsRefused) {
  const auto refused = [&](const std::string& wanted, auto change) {
    CaptureArguments arguments = arguments_;
    change(arguments);
    const absl::Status status = RunCapture(arguments);
    EXPECT_FALSE(status.ok()) << wanted;
    EXPECT_TRUE(absl::StrContains(status.message(), wanted)) << status;
    EXPECT_FALSE(fs::exists(arguments.out) && fs::is_regular_file(arguments.out));
  };
  refused("tokens is 63", [](CaptureArguments& a) { a.tokens = 63; });
  refused("tokens is -1", [](CaptureArguments& a) { a.tokens = -1; });
  refused("a multiple of them", [](CaptureArguments& a) { a.window = 128, a.tokens = 300; });
  refused("a multiple of 64", [](CaptureArguments& a) { a.window = 100; });
  refused("window is 0", [](CaptureArguments& a) { a.window = 0; });
  refused("at least 1201", [](CaptureArguments& a) { a.tokens = 1201; });
  refused("f16 or f32", [](CaptureArguments& a) { a.dtype = "bf16"; });
  refused("/none", [&](CaptureArguments& a) { a.model = (directory_ / "none").string(); });
  refused("/none", [&](CaptureArguments& a) { a.text = (directory_ / "none").string(); });
  refused("no directory", [&](CaptureArguments& a) { a.out = (directory_ / "none/new.safetensors").string(); });
  refused(".safetensors", [&](CaptureArguments& a) { a.out = (directory_ / "new").string(); });
  refused("empty", [](CaptureArguments& a) { a.out = ""; });
}

TEST(CheckCaptureTest, TheSizeIsBounded) {
  ModelConfig config = Config();
  config.layers = 80;
  config.query_heads = 64;
  config.kv_heads = 8;
  config.head_dim = 128;
  const std::string text(8192, 'x');
  CaptureOptions options;
  options.tokens = 2048;  // 80 layers of 80 heads of 128 halves: 1.6 MB a token
  EXPECT_TRUE(CheckCapture(config, Bytes(text), options).ok());
  options.tokens = 4096;
  const absl::Status status = CheckCapture(config, Bytes(text), options);
  EXPECT_TRUE(absl::StrContains(status.message(), "bytes of the capture is 6710886400")) << status;
  options.tokens = 2048;
  options.dtype = DType::kFloat32;
  EXPECT_FALSE(CheckCapture(config, Bytes(text), options).ok());
  options.dtype = DType::kFloat16;
  options.output_projection = true;
  config.hidden_size = 8192;
  EXPECT_FALSE(CheckCapture(config, Bytes(text), options).ok());
}

}  // namespace
}  // namespace kvmanager::engine
