#include "codecs/calibrate/plan.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "codecs/calibrate/random.h"
#include "codecs/calibrate/rank_table.h"
#include "codecs/calibrate/synthetic.h"
#include "gtest/gtest.h"

namespace kvmanager::calibrate {
namespace {

TEST(CalibrationPlanTest, CodecsSayWhatIsTrained) {
  const auto plan = CalibrationPlan::Make({"million:k_m=64,k_bits=8,v_m=32,v_bits=12", "zack+million:m=16,bits=4",
                                           "million:m=8,bits=5,scope=model,calibration=x"},
                                          128);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(plan->zack);
  EXPECT_FALSE(plan->zack_hack);
  EXPECT_EQ(plan->million[0], (std::set<PqShape>{{64, 8}}));
  EXPECT_EQ(plan->million[1], (std::set<PqShape>{{32, 12}}));
  EXPECT_EQ(plan->million_model[1], (std::set<PqShape>{{8, 5}}));
  EXPECT_EQ(plan->zack_million[0], (std::set<PqShape>{{16, 4}}));
  EXPECT_EQ(CodebookName("million", Side::kV, {32, 12}), "million.v.m32.b12");
  EXPECT_EQ(ZackName("zack", ZackMode::kJoint, "qk.left"), "zack.joint.qk.left");
}

TEST(CalibrationPlanTest, SubspacesByDefaultAreTheCodecs) {
  for (const auto& [d, m] : {std::pair(16, 8), {32, 16}, {64, 32}, {96, 48}, {128, 64}, {256, 128}}) {
    for (const std::string spec : {"million", "million:bits=8", "zack+million:bits=8"}) {
      const auto plan = CalibrationPlan::Make({spec}, d);
      ASSERT_TRUE(plan.ok()) << plan.status();
      for (int side = 0; side < 2; ++side) {
        EXPECT_EQ(spec[0] == 'z' ? plan->zack_million[side] : plan->million[side], (std::set<PqShape>{{m, 8}}));
      }
    }
  }
}

TEST(CalibrationPlanTest, ParametersOfCodecsAreKnown) {
  for (const char* spec :
       {"zack", "zack:mode=joint,rate=0.3,fold=1,calibration=x", "default", "default:calibration=x",
        "zack+hack:mode=joint,k_bits=2,v_bits=1,allocation=head,fold=0,v_norm=0", "zack+hack:bytes=40",
        "zack+million:mode=joint,fold=1,k_m=16,k_bits=4,v_m=16,v_bits=4,scope=head"}) {
    EXPECT_TRUE(CalibrationPlan::Make({spec}, 128).ok()) << spec;
  }
  for (const auto& [spec, key, allowed] : {std::tuple("zack:foo=1", "foo", "mode, rate, fold"),
                                           {"zack:bytes=40", "bytes", "mode, rate, fold"},
                                           {"zack+hack:nonsense=1", "nonsense", "bytes, allocation"},
                                           {"zack+hack:rate=0.5", "rate", "bytes, allocation"},
                                           {"zack+million:m=16,bits=4,foo=1", "foo", "mode, fold, m, bits"},
                                           {"zack+million:scope=model", "scope", "head"},
                                           {"default:x=y", "x", "name the codec"}}) {
    const auto plan = CalibrationPlan::Make({spec}, 128);
    ASSERT_FALSE(plan.ok()) << spec;
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(absl::StrContains(plan.status().message(), key)) << plan.status();
    EXPECT_TRUE(absl::StrContains(plan.status().message(), allowed)) << plan.status();
  }
}

TEST(CalibrationPlanTest, WrongSpecsAreNamed) {
  const auto message = [](const std::string& spec) {
    const auto plan = CalibrationPlan::Make({spec}, 128);
    EXPECT_FALSE(plan.ok()) << spec;
    return std::string(plan.status().message());
  };
  EXPECT_TRUE(absl::StrContains(message("hack"), "zack+million"));
  EXPECT_TRUE(absl::StrContains(message("million:m=48"), "divisor of head_dim 128"));
  EXPECT_TRUE(absl::StrContains(message("million:bits=13"), "4..12"));
  EXPECT_TRUE(absl::StrContains(message("million:k_bits=3"), "4..12"));
  EXPECT_TRUE(absl::StrContains(message("million:v_m=0"), "1..128"));
  EXPECT_TRUE(absl::StrContains(message("million:m= 64"), "1..128"));
  EXPECT_TRUE(absl::StrContains(message("million:m=+64"), "1..128"));
  EXPECT_TRUE(absl::StrContains(message("million:mm=64"), "mm"));
  EXPECT_TRUE(absl::StrContains(message("million:scope=layer"), "head or model"));
  EXPECT_FALSE(CalibrationPlan::Make({}, 128).ok());
}

TEST(RankTableTest, RankIsTheSmallestThatRemovesLittleEnough) {
  Random random(1);
  for (int trial = 0; trial < 50; ++trial) {
    const int d = 16 * int(1 + random.Below(8));
    std::vector<float> weights(d);
    for (float& w : weights) w = float(std::exp(4 * random.Normal()));
    std::sort(weights.rbegin(), weights.rend());
    const bool squared = trial % 2 == 1;
    const double removed = std::pow(10.0, -4 * random.Uniform());
    const int rank = RankFor(weights, squared, removed);
    const auto tail = [&](int from) {
      double all = 0, rest = 0;
      for (int i = 0; i < d; ++i) {
        const double e = squared ? double(weights[i]) * weights[i] : weights[i];
        all += e;
        if (i >= from) rest += e;
      }
      return rest / all;
    };
    EXPECT_EQ(rank % 16, 0);
    EXPECT_LE(tail(rank), removed * (1 + 1e-9));
    if (rank > 16) {
      EXPECT_GT(tail(rank - 16), removed * (1 - 1e-9));
    }
  }
}

TEST(RankTableTest, TablesAreMonotoneAndExact) {
  Random random(2);
  for (int d : {16, 64, 128}) {
    for (int heads : {1, 7, 200}) {
      std::vector<float> weights;
      for (int h = 0; h < heads; ++h) {
        const double reach = d * (0.05 + random.Uniform());
        for (int c = 0; c < d; ++c) weights.push_back(float(std::exp(-c / reach)));
      }
      const RankTable table = MakeRankTable(weights, d, true);
      ASSERT_GE(table.rates.size(), 1u);
      ASSERT_LE(table.rates.size(), size_t(kRankStepsMax));
      ASSERT_EQ(table.ranks.size(), table.rates.size() * heads);
      EXPECT_EQ(table.rates.front(), 0);
      EXPECT_FLOAT_EQ(table.rates.back(), 1 - 16.0f / d);
      for (size_t step = 0; step < table.rates.size(); ++step) {
        int64_t kept = 0;
        for (int h = 0; h < heads; ++h) {
          const int rank = table.ranks[step * heads + h];
          kept += rank;
          EXPECT_EQ(rank % 16, 0);
          EXPECT_GE(rank, 16);
          EXPECT_LE(rank, d);
          if (step > 0) {
            EXPECT_LE(rank, table.ranks[(step - 1) * heads + h]);
          }
        }
        EXPECT_FLOAT_EQ(table.rates[step], float(1 - double(kept) / (double(heads) * d)));
        if (step > 0) {
          EXPECT_GT(table.rates[step], table.rates[step - 1]);
        }
      }
    }
  }
}

TEST(RankTableTest, WeightsOfZeroKeepTheLeastRank) {
  const std::vector<float> weights(64, 0.0f);
  EXPECT_EQ(RankFor(weights, true, 0.0), 16);
  const RankTable table = MakeRankTable(weights, 64, false);
  EXPECT_EQ(table.ranks, (std::vector<int32_t>{16}));
}

TEST(SyntheticTest, IsValidDeterministicAndOfTheShapesAsked) {
  const CalibrationModel model{"synthetic", "", 2, 3, 6, 32};
  const auto one =
      SyntheticCalibration(model, 5, {"million:k_m=16,k_bits=8,v_m=8,v_bits=4", "zack+million:m=16,bits=6"});
  const auto two =
      SyntheticCalibration(model, 5, {"million:k_m=16,k_bits=8,v_m=8,v_bits=4", "zack+million:m=16,bits=6"});
  EXPECT_EQ(one->digest(), two->digest());
  EXPECT_NE(
      one->digest(),
      SyntheticCalibration(model, 6, {"million:k_m=16,k_bits=8,v_m=8,v_bits=4", "zack+million:m=16,bits=6"})->digest());
  EXPECT_EQ(one->model(), model);
  EXPECT_TRUE(one->Halves("million.v.m8.b4", {2, 3, 8, 16, 4}, "").ok());
  EXPECT_TRUE(one->Halves("zack_million.balanced.k.m16.b6", {2, 3, 16, 64, 2}, "").ok());
  for (const char* mode : {"joint", "balanced"}) {
    for (const char* pair : {"qk", "vw"}) {
      const std::string name = std::string("zack.") + mode + "." + pair;
      const auto left = one->Floats(name + ".left", {2, 3, 32, 32}, "");
      const auto right = one->Floats(name + ".right", {2, 3, 32, 32}, "");
      ASSERT_TRUE(left.ok() && right.ok());
      for (int at = 0; at < 6; ++at) {  // left right^T = 1
        for (int i = 0; i < 32; ++i) {
          for (int j = 0; j < 32; ++j) {
            double sum = 0;
            for (int c = 0; c < 32; ++c)
              sum += double((*left)[(at * 32 + i) * 32 + c]) * (*right)[(at * 32 + j) * 32 + c];
            EXPECT_NEAR(sum, i == j, 1e-5);
          }
        }
      }
    }
    const std::string stack = std::string("zack_hack.") + mode;
    const auto energy = one->Floats(stack + ".energy", {2, 3, 2, 32}, "");
    ASSERT_TRUE(energy.ok());
    for (int row = 0; row < 12; ++row) {
      EXPECT_TRUE(std::is_sorted(energy->begin() + row * 32, energy->begin() + row * 32 + 32, std::greater<float>()));
    }
    EXPECT_TRUE(one->Integers(stack + ".order", {2, 3, 2, 32}, 0, 31, "").ok());
    EXPECT_TRUE(one->Floats(stack + ".sensitivity", {2, 3, 2}, "").ok());
  }
}

}  // namespace
}  // namespace kvmanager::calibrate
