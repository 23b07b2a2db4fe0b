#include "examples/engine/tune_command.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "examples/engine/calibrate_command.h"
#include "examples/engine/program.h"
#include "examples/engine/tiny_files.h"
#include "gtest/gtest.h"

namespace kvmanager::engine {
namespace {

namespace fs = std::filesystem;

/// Enough layers for policies, and heads whose codecs do not take all of the grid's bytes.
ModelConfig Config() {
  ModelConfig config = TinyConfig();
  config.layers = 6;
  config.head_dim = 32;
  return config;
}

class TuneCommandTest : public ::testing::Test {
 protected:
  TuneCommandTest()
      : directory_(fs::path(::testing::TempDir()) / ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(directory_);
    WriteTinyModel(Config(), 5, directory_ / "tiny");
    WriteRandomText(1200, 6, Path("text"));
    arguments_.model = Path("tiny");
    arguments_.text = Path("text");
    arguments_.calibration = Path("tiny.safetensors");
    arguments_.json = Path("table.json");
    arguments_.svg = Path("plot.svg");
    arguments_.windows = 1;
    arguments_.window = 260;
    arguments_.max_loss = "100%";
    arguments_.quiet = true;
  }
  ~TuneCommandTest() override { fs::remove_all(directory_); }

  std::string Path(const std::string& name) const { return (directory_ / name).string(); }

  void Calibrate() {
    CalibrateArguments arguments;
    arguments.model = arguments_.model;
    arguments.text = arguments_.text;
    arguments.out = arguments_.calibration;
    arguments.codecs = {"zack+hack"};
    arguments.windows = 3;
    arguments.window = 256;
    arguments.choice_windows = 0;
    arguments.quiet = true;
    const absl::Status status = RunCalibrate(arguments);
    ASSERT_TRUE(status.ok()) << status;
  }

  const fs::path directory_;
  TuneArguments arguments_;
};

TEST_F(TuneCommandTest, MeasuresWhatTheModelTakesAndSaysWhatNot) {
  Calibrate();
  // The second has the fewest bytes of all, hence is refined.
  arguments_.codecs = {"hack:k_bits=8,v_bits=8", "zack+hack:bytes=12,calibration=" + arguments_.calibration};
  const absl::Status status = RunTune(arguments_);
  ASSERT_TRUE(status.ok()) << status;
  const nlohmann::json table = nlohmann::json::parse(*ReadFile(arguments_.json));
  std::set<std::string> points, dropped;
  bool policy = false;
  for (const auto& point : table["points"]) {
    points.insert(point["codec"].get<std::string>());
    policy |= absl::StrContains(point["codec"].get<std::string>(), ";");
  }
  for (const auto& left_out : table["dropped"]) dropped.insert(left_out["codec"].get<std::string>());
  EXPECT_EQ(points.count("hack:k_bits=8,v_bits=8"), 1u);
  EXPECT_TRUE(policy);
  const std::string wide = absl::StrCat("zack+hack:bytes=88,allocation=head,calibration=", arguments_.calibration);
  EXPECT_EQ(dropped.count(wide), 1u);
  EXPECT_EQ(points.count(wide), 0u);
  EXPECT_FALSE(table["best"].is_null());
  EXPECT_TRUE(absl::StrContains(*ReadFile(arguments_.svg), "</svg>"));
}

TEST_F(TuneCommandTest, WhatCannotWorkIsRefusedFirst) {
  ASSERT_TRUE(WriteFile(arguments_.json, "old").ok());
  ASSERT_TRUE(WriteFile(arguments_.svg, "old").ok());
  const auto refused = [&](const std::string& wanted, auto change) {
    const TuneArguments before = arguments_;
    change(arguments_);
    const absl::Status status = RunTune(arguments_);
    EXPECT_TRUE(absl::StrContains(status.message(), wanted)) << wanted << " is not in: " << status;
    arguments_ = before;
    EXPECT_EQ(*ReadFile(arguments_.json), "old") << wanted;
    EXPECT_EQ(*ReadFile(arguments_.svg), "old") << wanted;
  };
  refused("65536 (16 windows of 4096) to train an artifact", [](TuneArguments&) {});
  refused("\"hac\"", [](TuneArguments& a) { a.codecs = {"hac"}; });
  refused("evaluate", [](TuneArguments& a) { a.codecs = {"pq"}; });
  refused("none", [&](TuneArguments& a) { a.codecs = {"zack+hack:calibration=" + Path("none")}; });
  refused("--window is 192", [](TuneArguments& a) { a.window = 192; });
  refused("--window is 63", [](TuneArguments& a) { a.window = 63, a.lag_pages = 0; });
  refused("for --json", [&](TuneArguments& a) { a.json = Path("none/table.json"); });
  refused("for --svg", [&](TuneArguments& a) { a.svg = Path("none/plot.svg"); });
  EXPECT_FALSE(fs::exists(arguments_.calibration));
  refused("for --calibration", [&](TuneArguments& a) {
    WriteRandomText(1 << 16, 7, Path("long"));
    a.text = Path("long");
    a.calibration = Path("none/c.safetensors");
  });

  Calibrate();
  refused("this one is for tiny, 6 layers", [&](TuneArguments& a) {
    WriteTinyModel(Config(), 8, directory_ / "other/tiny");
    a.model = Path("other/tiny");
  });
  refused("codec parameter bytes",
          [&](TuneArguments& a) { a.codecs = {absl::StrCat("zack+hack:bytes=2,calibration=", a.calibration)}; });
  refused("--max-loss", [](TuneArguments& a) { a.max_loss = "much"; });
}

}  // namespace
}  // namespace kvmanager::engine
