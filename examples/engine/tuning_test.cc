#include "examples/engine/tuning.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

using ::testing::HasSubstr;

TEST(ParseLoss, TakesSharesAndPercentages) {
  EXPECT_DOUBLE_EQ(*ParseLoss("0.5%"), 0.005);
  EXPECT_DOUBLE_EQ(*ParseLoss("0.01"), 0.01);
  EXPECT_DOUBLE_EQ(*ParseLoss("0"), 0);
  for (const char* bad : {"", "%", "nan", "-1%", "101%", "1.1", "half"}) {
    const absl::Status status = ParseLoss(bad).status();
    EXPECT_EQ(DetailOf(status).field, "--max-loss") << bad;
    EXPECT_EQ(DetailOf(status).value, bad);
  }
}

TuneOptions Calibrated() {
  TuneOptions options;
  options.layers = 8;
  options.calibration = "c";
  options.million = {"m=64,bits=8"};
  options.has_zack = options.has_zack_hack = true;
  return options;
}

/// A world in which loss falls with bytes, and allocation=model is better than its bytes say.
RatePoint Law(const std::string& codec) {
  RatePoint point;
  double bytes = 100;
  if (const size_t at = codec.find("bytes="); at != std::string::npos) bytes = std::atof(codec.c_str() + at + 6);
  if (codec == "raw") bytes = 512;
  const bool model = codec.find("allocation=model") != std::string::npos;
  const bool by_layer = codec.find(';') != std::string::npos;
  point.bytes_per_token_head = bytes;
  point.bpb = codec == "raw" ? 1 : 1 + std::exp2(-(bytes + (model ? 4 : 0)) / 8.0) - (by_layer ? 1e-5 : 0);
  return point;
}

/// They measure by the law, and expect that nothing is dropped.
TuneHooks Hooks() {
  TuneHooks hooks;
  hooks.measure = Law;
  hooks.progress = [](int, int, const std::string&) {};
  hooks.dropped = [](const std::string& codec, const absl::Status& why) { ADD_FAILURE() << codec << ": " << why; };
  return hooks;
}

/// The least of a policy's bytes=.
double LeastBytes(const std::string& codec) {
  double least = INFINITY;
  for (size_t at = codec.find("bytes="); at != std::string::npos; at = codec.find("bytes=", at + 1)) {
    least = std::min(least, std::atof(codec.c_str() + at + 6));
  }
  return least;
}

TEST(Tune, FindsTheSmallestUnderTheBound) {
  TuneOptions options = Calibrated();
  std::map<std::string, int> measured;
  int last_done = -1;
  TuneHooks hooks = Hooks();
  hooks.measure = [&](const std::string& codec) {
    ++measured[codec];
    return Law(codec);
  };
  hooks.progress = [&](int done, int total, const std::string&) {
    EXPECT_GT(done, last_done);
    EXPECT_LT(done, total);
    last_done = done;
  };
  const auto result = Tune(options, hooks);
  ASSERT_TRUE(result.ok());
  for (const auto& [codec, times] : measured) EXPECT_EQ(times, 1) << codec;
  ASSERT_GE(result->best, 0);
  const RatePoint& best = result->points[result->best];
  EXPECT_LE(best.loss, options.max_loss);
  for (const RatePoint& p : result->points) {
    EXPECT_NEAR(p.loss, std::exp2(p.bpb - 1) - 1, 1e-12);
    if (p.loss <= options.max_loss) {
      EXPECT_GE(p.bytes_per_token_head, best.bytes_per_token_head);
    }
  }
  EXPECT_THAT(TuneTable(*result, options.max_loss), HasSubstr("--codec '" + best.codec + "'"));
  EXPECT_THAT(TuneTable(*result, options.max_loss), HasSubstr("> " + best.codec));
  const std::string svg = TuneSvg(*result, options.max_loss, "a < b");
  EXPECT_THAT(svg, HasSubstr("a &lt; b"));
  EXPECT_TRUE(absl::EndsWith(svg, "</svg>\n"));
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Tune, SaysSoWhenNothingIsGoodEnough) {
  TuneOptions options = Calibrated();
  options.max_loss = 0;
  const auto result = Tune(options, Hooks());
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->best, -1);
  EXPECT_THAT(TuneTable(*result, 0), HasSubstr("No policy loses at most"));
}

TEST(Tune, WithoutAnArtifactTriesWhatNeedsNone) {
  TuneOptions options;
  options.layers = 8;
  options.more_codecs = {"other:x=1"};
  for (const std::string& codec : TuneGrid(options)) {
    EXPECT_TRUE(absl::StartsWith(codec, "hack:") || codec == "other:x=1") << codec;
  }
}

TEST(Tune, WhatCannotBeMeasuredIsDropped) {
  TuneOptions options = Calibrated();
  options.layers = 6;
  options.max_loss = 1;  // so that the smallest point is refined
  TuneHooks hooks = Hooks();
  std::map<std::string, std::string> dropped;
  hooks.measure = [](const std::string& codec) -> absl::StatusOr<RatePoint> {
    if (LeastBytes(codec) < 16) return InvalidField("codec parameter bytes", LeastBytes(codec), "16..136.125");
    if (codec.find("bytes=40") != std::string::npos) return absl::UnavailableError("not now");
    return Law(codec);
  };
  hooks.dropped = [&](const std::string& codec, const absl::Status& why) {
    dropped[codec] = std::string(why.message());
  };
  auto result = Tune(options, hooks);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(dropped.count("zack+hack:bytes=40,allocation=head,calibration=c"), 1u);
  bool policy = false;
  for (const auto& [codec, why] : dropped) policy |= codec.find(';') != std::string::npos;
  EXPECT_TRUE(policy);
  EXPECT_GT(result->points.size(), 20u);
  for (const RatePoint& point : result->points) EXPECT_EQ(dropped.count(point.codec), 0u) << point.codec;

  hooks.measure = [](const std::string& codec) -> absl::StatusOr<RatePoint> {
    if (codec != "raw") return absl::UnavailableError("never");
    return Law(codec);
  };
  EXPECT_EQ(Tune(options, hooks).status().message(), "never");
  hooks.measure = [](const std::string&) { return absl::UnavailableError("not even raw"); };
  EXPECT_EQ(Tune(options, hooks).status().message(), "not even raw");
}

TEST(Tune, EveryCandidateIsCheckedBeforeOneIsMeasured) {
  TuneOptions options = Calibrated();
  options.more_codecs = {"other:x=1"};
  TuneHooks hooks = Hooks();
  bool measuring = false;
  std::map<std::string, int> checked, dropped;
  hooks.check = [&](const std::string& codec) {
    EXPECT_TRUE(!measuring || codec.find(';') != std::string::npos) << codec;
    ++checked[codec];
    return codec.find("bytes=88") == std::string::npos ? absl::OkStatus() : InvalidField("bytes", 88, "at most 72.125");
  };
  hooks.measure = [&](const std::string& codec) {
    measuring = true;
    EXPECT_TRUE(codec == "raw" || checked.count(codec) == 1) << codec;
    return Law(codec);
  };
  hooks.dropped = [&](const std::string& codec, const absl::Status&) { ++dropped[codec]; };
  const auto result = Tune(options, hooks);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(dropped.size(), 2u);
  for (const std::string& codec : TuneGrid(options)) EXPECT_GE(checked[codec], 1) << codec;

  measuring = false;
  hooks.check = [](const std::string& codec) {
    return codec == "other:x=1" ? absl::InvalidArgumentError("no codec other") : absl::OkStatus();
  };
  EXPECT_EQ(Tune(options, hooks).status().message(), "no codec other");
  EXPECT_FALSE(measuring);
}

TEST(FinerEnds, KeepTheBytesOfAllLayers) {
  RatePoint point;
  point.codec = "zack+hack:bytes=48,allocation=model,calibration=c";
  const auto policies = FinerEnds(point, Calibrated(), nullptr);
  ASSERT_FALSE(policies.empty());
  EXPECT_EQ(policies[0],
            "zack+hack:bytes=46,allocation=model,calibration=c;0..0=zack+hack:bytes=64,allocation=model,calibration=c");
  point.codec = "hack:k_bits=2";
  EXPECT_TRUE(FinerEnds(point, Calibrated(), nullptr).empty());
}

TEST(FinerEnds, TakeNoMoreThanTheOthersHave) {
  TuneOptions options = Calibrated();
  options.layers = 6;
  RatePoint point;
  point.codec = "zack+hack:bytes=20,allocation=head,calibration=c";
  const auto check = [](const std::string& codec) {
    const double bytes = LeastBytes(codec);
    return bytes < 10 ? InvalidField("codec parameter bytes", bytes, "10..138") : absl::OkStatus();
  };
  EXPECT_EQ(FinerEnds(point, options, nullptr).size(), 6u);
  const auto policies = FinerEnds(point, options, check);
  EXPECT_EQ(policies.size(), 5u);  // both ends 32 finer would leave 4 to the others
  for (const std::string& policy : policies) EXPECT_GE(LeastBytes(policy), 10) << policy;
  point.codec = "zack+hack:bytes=9,allocation=head,calibration=c";
  for (const std::string& policy : FinerEnds(point, options, nullptr)) EXPECT_GE(LeastBytes(policy), 1) << policy;
}

TEST(OnFrontier, IsWhatNothingBeats) {
  std::vector<RatePoint> points(4);
  const double bytes[] = {40, 40, 50, 60}, loss[] = {0.02, 0.01, 0.01, 0.001};
  for (int i = 0; i < 4; ++i) points[i].bytes_per_token_head = bytes[i], points[i].loss = loss[i];
  EXPECT_FALSE(OnFrontier(points, 0));
  EXPECT_TRUE(OnFrontier(points, 1));
  EXPECT_FALSE(OnFrontier(points, 2));
  EXPECT_TRUE(OnFrontier(points, 3));
}

}  // namespace
}  // namespace kvmanager::engine
