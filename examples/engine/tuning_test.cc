#include "examples/engine/tuning.h"

#include <cmath>
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

TEST(Tune, FindsTheSmallestUnderTheBound) {
  TuneOptions options = Calibrated();
  std::map<std::string, int> measured;
  int last_done = -1;
  const auto result = Tune(
      options,
      [&](const std::string& codec) {
        ++measured[codec];
        return Law(codec);
      },
      [&](int done, int total, const std::string&) {
        EXPECT_GT(done, last_done);
        EXPECT_LT(done, total);
        last_done = done;
      });
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
  const auto result = Tune(
      options, [&](const std::string& codec) { return Law(codec); }, [](int, int, auto&) {});
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

TEST(Tune, AnErrorOfMeasuringEndsIt) {
  const auto result = Tune(
      Calibrated(),
      [&](const std::string& codec) -> absl::StatusOr<RatePoint> {
        if (codec.find("bytes=40") != std::string::npos) return absl::NotFoundError("no such artifact");
        return Law(codec);
      },
      [](int, int, auto&) {});
  EXPECT_EQ(result.status().message(), "no such artifact");
}

TEST(FinerEnds, KeepTheBytesOfAllLayers) {
  RatePoint point;
  point.codec = "zack+hack:bytes=48,allocation=model,calibration=c";
  const auto policies = FinerEnds(point, Calibrated());
  ASSERT_FALSE(policies.empty());
  EXPECT_EQ(policies[0],
            "zack+hack:bytes=46,allocation=model,calibration=c;0..0=zack+hack:bytes=64,allocation=model,calibration=c");
  point.codec = "hack:k_bits=2";
  EXPECT_TRUE(FinerEnds(point, Calibrated()).empty());
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
