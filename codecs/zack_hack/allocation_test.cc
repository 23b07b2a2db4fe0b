#include "codecs/zack_hack/allocation.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "gtest/gtest.h"

namespace kvmanager::zack_hack {
namespace {

/// The loop of reference.py's channel_bits.
std::vector<uint8_t> Plain(const std::vector<double>& e, int64_t bits, const LossTable& loss) {
  std::vector<uint8_t> b(e.size(), 0);
  for (int64_t i = 0; i < bits; ++i) {
    int best = -1;
    double most = 0;
    for (size_t g = 0; g < e.size(); ++g) {
      if (b[g] == kWidthMax) continue;
      const double gain = e[g] * (loss[b[g]] - loss[b[g] + 1]);
      if (best < 0 || gain > most) best = int(g), most = gain;
    }
    if (best < 0) break;
    ++b[best];
  }
  return b;
}

SegmentEnergies RandomEnergies(int layers, int heads, int segments, uint32_t seed) {
  std::mt19937 random(seed);
  std::exponential_distribution<double> draw(1);
  SegmentEnergies e;
  e.layers = layers, e.kv_heads = heads, e.segments = segments;
  for (int i = 0; i < layers * heads * 2; ++i) {
    for (int s = 0; s < segments; ++s) e.energy.push_back(draw(random) * std::exp(-s));
    e.sensitivity.push_back(std::exp(3 * draw(random)));
  }
  return e;
}

int64_t Total(const LayerWidths& widths, int side) {
  int64_t total = 0;
  for (const auto& layer : widths) {
    for (const auto& head : layer) total += std::accumulate(head[side].begin(), head[side].end(), int64_t{0});
  }
  return total;
}

TEST(AllocationTest, IsTheReferencesGreedyLoop) {
  std::mt19937 random(1);
  for (int n : {1, 2, 8, 16, 100}) {
    std::vector<double> e(n);
    for (double& x : e) x = std::uniform_int_distribution<int>(0, 5)(random);  // many ties
    for (int64_t bits : {0, 1, 3, n, 2 * n, 4 * n - 1, 4 * n, 5 * n}) {
      for (const LossTable& loss : {kRoughLoss, kMeasuredLoss}) {
        EXPECT_EQ(AllocateBits(e, bits, loss), Plain(e, bits, loss)) << n << " " << bits;
      }
    }
  }
}

TEST(AllocationTest, DominantSegmentsOfKAreWide) {
  // The first segment holds what 4 bits do not resolve; V has as much there and stays at 4.
  SegmentEnergies e;
  e.layers = 2, e.kv_heads = 1, e.segments = 4;
  for (int i = 0; i < 4; ++i) e.energy.insert(e.energy.end(), {1000, 1, 1, 1});
  e.sensitivity.assign(4, 1);
  for (const int64_t bits : {24, 40}) {
    const LayerWidths widths = AllocateAcrossModel(e, bits);
    EXPECT_EQ(Total(widths, 0) + Total(widths, 1), bits);
    for (const auto& layer : widths) {
      EXPECT_EQ(layer[0][0][0], kWideWidth);
      EXPECT_EQ(layer[0][1][0], kWidthMax);
      for (int s = 1; s < 4; ++s) EXPECT_LE(layer[0][0][s], kWidthMax);
    }
  }
  // Three bits left are too few for the step to 8: others get them, and what nobody can take is left.
  const WideSegments first = {{true, false}, {0, 0}, 100};
  EXPECT_EQ(AllocateBits({1000, 1}, 7, kMeasuredLoss, first), (std::vector<uint8_t>{4, 3}));
  EXPECT_EQ(AllocateBits({1000, 1}, 9, kMeasuredLoss, first), (std::vector<uint8_t>{8, 1}));
  EXPECT_EQ(AllocateBits({1000}, 7, kMeasuredLoss, {{true}, {0}, 100}), (std::vector<uint8_t>{4}));
  // A record that is full takes no more, whatever is left.
  EXPECT_EQ(AllocateBits({1000, 1000, 1}, 20, kMeasuredLoss, {{true, true, true}, {0, 0, 1}, 12}),
            (std::vector<uint8_t>{8, 4, 8}));
}

TEST(AllocationTest, RecordsOfHeadsStayInBounds) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    const SegmentEnergies e = RandomEnergies(3, 2, 4, seed);
    for (int64_t bits : {50, 120, 180}) {
      const LayerWidths widths = AllocateAcrossModel(e, bits);
      for (const auto& layer : widths) {
        for (const auto& head : layer) {
          int sum = 0;
          for (const auto& side : head) sum += std::accumulate(side.begin(), side.end(), 0);
          EXPECT_LE(sum, 2 * 4 * kWidthMax);
          for (const uint8_t width : head[1]) EXPECT_LE(width, kWidthMax);
        }
      }
    }
  }
}

TEST(AllocationTest, FallingEnergiesGiveFallingWidths) {
  const std::vector<uint8_t> widths = AllocateBits({100, 30, 10, 5, 2, 1, 0.5, 0.1}, 16, kRoughLoss);
  EXPECT_EQ(std::accumulate(widths.begin(), widths.end(), 0), 16);
  EXPECT_TRUE(std::is_sorted(widths.rbegin(), widths.rend()));
  EXPECT_EQ(widths[0], 4);
  EXPECT_EQ(widths[7], 0);
}

TEST(AllocationTest, BudgetsAreSpentToTheBit) {
  const SegmentEnergies e = RandomEnergies(3, 2, 8, 2);
  const LayerWidths per_head = AllocatePerHead(e, {12, 5});
  for (const auto& layer : per_head) {
    for (const auto& head : layer) {
      EXPECT_EQ(std::accumulate(head[0].begin(), head[0].end(), 0), 12);
      EXPECT_EQ(std::accumulate(head[1].begin(), head[1].end(), 0), 5);
    }
  }
  const LayerWidths per_side = AllocatePerSide(e, {71, 33});
  EXPECT_EQ(Total(per_side, 0), 71);
  EXPECT_EQ(Total(per_side, 1), 33);
  for (int64_t bits : {0, 1, 100, 3 * 2 * 2 * 8 * 4}) {
    const LayerWidths model = AllocateAcrossModel(e, bits);
    EXPECT_EQ(Total(model, 0) + Total(model, 1), bits);
  }
}

TEST(AllocationTest, SensitiveLayersGetMore) {
  SegmentEnergies e = RandomEnergies(2, 1, 8, 3);
  std::copy_n(e.energy.begin(), 16, e.energy.begin() + 16);
  e.sensitivity = {1, 1, 1000, 1000};
  const LayerWidths widths = AllocateAcrossModel(e, 40);
  int64_t first = 0, second = 0;
  for (int side = 0; side < 2; ++side) {
    for (int s = 0; s < 8; ++s) first += widths[0][0][side][s], second += widths[1][0][side][s];
  }
  EXPECT_GT(second, 2 * first);
}

// Rows of codecs.md at head_dim 128.
TEST(AllocationTest, SplitsOfReference) {
  for (const auto& [bits, k] : {std::pair{24, 16}, {20, 12}, {16, 10}, {12, 8}, {40, 24}, {64, 32}, {0, 0}}) {
    EXPECT_EQ(BitsOfK(bits, 8), k) << bits;
  }
  for (int segments : {1, 2, 8, 16}) {
    int64_t before = 0;
    for (int64_t bits = 0; bits <= 8 * segments; ++bits) {
      const int64_t k = BitsOfK(bits, segments);
      EXPECT_GE(k, before);
      EXPECT_LE(k, 4 * segments);
      EXPECT_LE(bits - k, 4 * segments);
      EXPECT_LE(k, bits);
      before = k;
    }
  }
}

}  // namespace
}  // namespace kvmanager::zack_hack
