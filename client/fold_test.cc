#include "client/fold.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace kvmanager::client {
namespace {

// W_O A o' against W_O o, o = A o' by hand, each KV head with a factor of its own.
TEST(FoldOutputWeights, GivesTheSameProjection) {
  const OutputShape shape{.hidden = 5, .query_heads = 6, .kv_heads = 3, .head_dim = 16};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto draw = [&](size_t n) {
    std::vector<float> values(n);
    for (float& value : values) value = normal(random);
    return values;
  };
  const auto w = draw(5 * 6 * 16), factors = draw(3 * 16 * 16), o = draw(6 * 16);
  const auto folded = FoldOutputWeights(w, shape, factors);
  ASSERT_TRUE(folded.ok()) << folded.status();
  for (int row = 0; row < 5; ++row) {
    double expected = 0, got = 0;
    for (int head = 0; head < 6; ++head) {
      for (int i = 0; i < 16; ++i) {
        double full = 0;
        for (int j = 0; j < 16; ++j) full += double(factors[(head / 2 * 16 + i) * 16 + j]) * o[head * 16 + j];
        expected += w[(row * 6 + head) * 16 + i] * full;
        got += (*folded)[(row * 6 + head) * 16 + i] * o[head * 16 + i];
      }
    }
    EXPECT_NEAR(got, expected, 1e-3);
  }
  EXPECT_EQ(*FoldOutputWeights(w, shape, {}), w);
}

TEST(FoldOutputWeights, RefusesWhatDoesNotFit) {
  const OutputShape shape{.hidden = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 16};
  const std::vector<float> w(2 * 4 * 16), factors(2 * 16 * 16);
  ASSERT_TRUE(FoldOutputWeights(w, shape, factors).ok());
  EXPECT_FALSE(FoldOutputWeights(absl::MakeConstSpan(w).first(10), shape, factors).ok());
  EXPECT_FALSE(FoldOutputWeights(w, shape, absl::MakeConstSpan(factors).first(256)).ok());
  OutputShape bad = shape;
  bad.kv_heads = 3;
  EXPECT_EQ(FoldOutputWeights(w, bad, factors).status().message(),
            "query_heads is 4, must be a multiple of kv_heads 3");
  bad = shape;
  bad.hidden = 0;
  EXPECT_FALSE(FoldOutputWeights(w, bad, factors).ok());
  std::vector<float> infinite = factors;
  infinite[7] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(FoldOutputWeights(w, shape, infinite).status().message(), "factors[7] is inf, must be finite");
}

}  // namespace
}  // namespace kvmanager::client
