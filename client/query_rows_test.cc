#include "client/query_rows.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace kvmanager::client {
namespace {

// A step of all layers; returns those whose rows were taken.
std::vector<int> Step(QueryRows& rows, int layers, uint64_t tokens, uint64_t epoch,
                      std::vector<int>* places = nullptr) {
  std::vector<int> taken;
  rows.BeginStep(tokens);
  for (int layer = 0; layer < layers; ++layer) {
    if (!rows.IsDue(layer)) continue;
    const int place = rows.Take();
    if (places != nullptr) places->push_back(place);
    taken.push_back(layer);
  }
  rows.EndStep(epoch);
  return taken;
}

TEST(QueryRows, DecodeStepsTakeOneRowInFourOfOneLayerAfterTheOther) {
  constexpr int kLayers = 3;
  for (const uint64_t tokens : {1, 16, 64}) {
    QueryRows rows(kLayers);
    int taken = 0;
    for (uint64_t step = 0; step < 48; ++step) {
      const std::vector<int> layers = Step(rows, kLayers, tokens, step + 1);
      ASSERT_LE(layers.size(), 1u);
      for (const int layer : layers) EXPECT_EQ(layer, taken++ % kLayers);
      rows.Arrived(step + 1);
    }
    EXPECT_EQ(taken, 1 + 48 / 4);
  }
}

TEST(QueryRows, APromptTakesMoreAndNeverMoreThanThereArePlaces) {
  QueryRows rows(32);
  EXPECT_EQ(Step(rows, 32, 512, 1), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(Step(rows, 32, 100000, 2), (std::vector<int>{3, 4, 5, 6, 7})) << "three are under way";
  EXPECT_EQ(Step(rows, 32, 100000, 3), std::vector<int>{});
  EXPECT_EQ(rows.Arrived(0).size(), 0u);
  const auto first = rows.Arrived(1);
  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[2].layer, 2);
  EXPECT_EQ(Step(rows, 32, 1, 4), (std::vector<int>{8, 9, 10}));
  EXPECT_EQ(rows.Arrived(100).size(), 8u);
}

TEST(QueryRows, NothingArrivesBeforeItsStepEnds) {
  QueryRows rows(1);
  rows.BeginStep(1);
  ASSERT_TRUE(rows.IsDue(0));
  rows.Take();
  EXPECT_FALSE(rows.IsDue(0));
  EXPECT_TRUE(rows.Arrived(UINT64_MAX).empty());
  rows.EndStep(7);
  EXPECT_TRUE(rows.Arrived(6).empty());
  EXPECT_EQ(rows.Arrived(7).size(), 1u);
}

TEST(QueryRows, PlacesAreOneRowsAtATime) {
  std::mt19937 random(1);
  QueryRows rows(5);
  std::set<int> used;
  uint64_t released = 0, sent = 0;
  for (uint64_t epoch = 1; epoch < 3000; ++epoch) {
    std::vector<int> places;
    Step(rows, 5, 1 + random() % 2000, epoch, &places);
    for (const int place : places) {
      ASSERT_TRUE(place >= 0 && place < QueryRows::kPlaces);
      ASSERT_TRUE(used.insert(place).second);
    }
    released += random() % (epoch - released + 1);
    for (const QueryRows::Row& row : rows.Arrived(released)) {
      ASSERT_EQ(used.erase(row.place), 1u);
      ++sent;
    }
  }
  EXPECT_GT(sent, 3000u);
}

}  // namespace
}  // namespace kvmanager::client
