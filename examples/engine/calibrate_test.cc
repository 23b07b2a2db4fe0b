#include "examples/engine/calibrate.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "codecs/builtin.h"
#include "codecs/registry.h"
#include "examples/engine/calibrate_command.h"
#include "examples/engine/local_backend.h"
#include "examples/engine/program.h"
#include "examples/engine/tiny_files.h"
#include "examples/engine/tiny_model.h"
#include "gtest/gtest.h"

namespace kvmanager::engine {
namespace {

namespace fs = std::filesystem;

/// Heads wide enough to have more than one rank.
ModelConfig Config() {
  ModelConfig config = TinyConfig();
  config.head_dim = 32;
  return config;
}

/// A tiny model and a text in files of their own.
class CalibrateTest : public ::testing::Test {
 protected:
  CalibrateTest() : directory_(fs::path(::testing::TempDir()) / "calibrate"), config_(Config()) {
    fs::remove_all(directory_);
    WriteTinyModel(config_, 5, directory_ / "tiny");
    WriteRandomText(1200, 6, directory_ / "text");
    arguments_.model = (directory_ / "tiny").string();
    arguments_.text = (directory_ / "text").string();
    arguments_.out = (directory_ / "new.safetensors").string();
    arguments_.codecs = {"zack+hack", "million:m=8,bits=4", "zack+million:m=8,bits=4"};
    arguments_.windows = 3;
    arguments_.window = 256;
    arguments_.quiet = true;
  }
  ~CalibrateTest() override { fs::remove_all(directory_); }

  std::string Refusal() {
    const absl::Status status = RunCalibrate(arguments_);
    EXPECT_FALSE(status.ok());
    EXPECT_FALSE(fs::exists(arguments_.out));
    return std::string(status.message());
  }

  const fs::path directory_;
  const ModelConfig config_;
  CalibrateArguments arguments_;
};

TEST_F(CalibrateTest, AnArtifactServesItsCodecs) {
  arguments_.json = (directory_ / "report.json").string();
  const absl::Status status = RunCalibrate(arguments_);
  ASSERT_TRUE(status.ok()) << status;
  const auto calibration = Calibration::Load(arguments_.out);
  ASSERT_TRUE(calibration.ok()) << calibration.status();
  const auto model = Model::Load(arguments_.model);
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ((*calibration)->model(), CalibrationModelOf(**model));
  for (const char* key :
       {"zack.mode", "zack_hack.mode", "zack_hack.allocation", "zack_hack.sensitivity", "text.sha256", "codecs"}) {
    EXPECT_TRUE((*calibration)->metadata().count(key)) << key;
  }
  const auto sensitivity = (*calibration)->Floats("zack_hack.balanced.sensitivity", {2, 2, 2}, "");
  ASSERT_TRUE(sensitivity.ok());
  EXPECT_NE((*sensitivity)[0], 1.0f);  // measured
  const nlohmann::json report = nlohmann::json::parse(*ReadFile(arguments_.json));
  EXPECT_EQ(report["digest"], (*calibration)->digest());
  EXPECT_EQ(report["tokens"], 768);
  EXPECT_GE(report["choices"].size(), 6u);

  // Every codec is made from it, and measured.
  CodecRegistry registry;
  RegisterBuiltinCodecs(registry);
  const auto files = MakeCalibrationFiles();
  registry.SetCalibrations(files.get());
  const std::string text = *ReadFile(arguments_.text);
  EvaluateOptions options;
  options.window = 300;
  options.windows = 1;
  for (const char* spec :
       {"zack:rate=0,", "zack+hack:k_bits=2,v_bits=2,", "million:m=8,bits=4,", "zack+million:m=8,bits=4,mode=joint,"}) {
    const auto codec = registry.Create(absl::StrCat(spec, "calibration=", arguments_.out), LocalContext(**model));
    ASSERT_TRUE(codec.ok()) << codec.status();
    EXPECT_EQ((*codec)->info().calibration_digest, (*calibration)->digest());
    const auto done = EvaluateLocal(**model, **codec, Bytes(text), options, 0, [](int64_t, int64_t) {});
    ASSERT_TRUE(done.ok()) << done.status();
    EXPECT_GT(done->loss.bpb, 0);
  }
}

TEST_F(CalibrateTest, ThreadsChangeNothing) {
  arguments_.codecs = {"zack", "million:m=4,bits=4"};
  arguments_.choice_windows = 0;
  arguments_.threads = 1;
  ASSERT_TRUE(RunCalibrate(arguments_).ok());
  const std::string one = *ReadFile(arguments_.out);
  arguments_.threads = 3;
  ASSERT_TRUE(RunCalibrate(arguments_).ok());
  const auto parsed = Calibration::Parse(*ReadFile(arguments_.out), "new");
  ASSERT_TRUE(parsed.ok());
  const auto before = Calibration::Parse(one, "before");
  ASSERT_TRUE(before.ok());
  // The model's products are split by rows over threads, and BLAS may round blocks of other sizes otherwise.
  const auto a = (*before)->Floats("zack.joint.qk.weights", {2, 2, 32}, "");
  const auto b = (*parsed)->Floats("zack.joint.qk.weights", {2, 2, 32}, "");
  ASSERT_TRUE(a.ok() && b.ok());
  for (size_t i = 0; i < a->size(); ++i) EXPECT_NEAR((*a)[i], (*b)[i], 1e-3 * (*a)[0]);
}

TEST_F(CalibrateTest, WhatCannotWorkIsRefusedFirst) {
  const auto refused = [&](const std::string& wanted, auto change) {
    const CalibrateArguments before = arguments_;
    change(arguments_);
    const std::string message = Refusal();
    EXPECT_TRUE(absl::StrContains(message, wanted)) << message;
    arguments_ = before;
  };
  refused("--windows 4", [](CalibrateArguments& a) { a.windows = 5; });
  refused("at least 2560", [](CalibrateArguments& a) { a.windows = 10; });
  refused("window", [](CalibrateArguments& a) { a.window = 63; });
  refused("zack+million", [](CalibrateArguments& a) { a.codecs = {"hack"}; });
  refused("at least 16384", [](CalibrateArguments& a) { a.codecs = {"million:m=8,bits=12"}; });
  refused("divisor of head_dim 32", [](CalibrateArguments& a) { a.codecs = {"million:m=3"}; });
  refused("/none", [&](CalibrateArguments& a) { a.model = (directory_ / "none").string(); });
  refused("/none", [&](CalibrateArguments& a) { a.text = (directory_ / "none").string(); });
  refused("no directory", [&](CalibrateArguments& a) { a.out = (directory_ / "none/new.safetensors").string(); });
  refused("for --json", [&](CalibrateArguments& a) { a.json = (directory_ / "none/report.json").string(); });
  refused(".safetensors", [&](CalibrateArguments& a) { a.out = (directory_ / "new").string(); });
  refused("--capture", [](CalibrateArguments& a) { a.model = a.text = ""; });
  refused("none", [&](CalibrateArguments& a) {
    a.model = a.text = "";
    a.capture = (directory_ / "none.safetensors").string();
  });
}

}  // namespace
}  // namespace kvmanager::engine
