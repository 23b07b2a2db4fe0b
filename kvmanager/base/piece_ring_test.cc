#include "kvmanager/base/piece_ring.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>
#include <utility>

namespace kvmanager {
namespace {

TEST(PieceRingTest, APieceThatEndsAtTheEndIsFollowedByOneAtTheBeginning) {
  PieceRing ring(8);
  EXPECT_EQ(ring.Take(4), 0u);
  EXPECT_EQ(ring.Take(4), 4u);
  EXPECT_EQ(ring.Take(1), std::nullopt);
  ring.Release();
  EXPECT_EQ(ring.Take(2), 0u);
  EXPECT_EQ(ring.used(), 6u);
}

TEST(PieceRingTest, WhatDoesNotFitBeforeTheEndLeavesItOut) {
  PieceRing ring(8);
  EXPECT_EQ(ring.Take(3), 0u);
  EXPECT_EQ(ring.Take(3), 3u);
  ring.Release();
  EXPECT_EQ(ring.Take(3), 0u);  // two places at the end are left out
  EXPECT_EQ(ring.used(), 8u);
  EXPECT_EQ(ring.Take(1), std::nullopt);
  EXPECT_EQ(PieceRing(8).Take(9), std::nullopt);
}

// Pieces never overlap, and room that must be there is found.
TEST(PieceRingTest, RandomPieces) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const uint32_t places = 2 + random() % 40;
    PieceRing ring(places);
    std::deque<std::pair<uint32_t, uint32_t>> taken;
    for (int step = 0; step < 200; ++step) {
      if (random() % 3 != 0) {
        const uint32_t count = 1 + random() % (places / 2);
        const auto first = ring.Take(count);
        if (taken.empty()) ASSERT_TRUE(first.has_value());
        if (!first.has_value()) continue;
        ASSERT_LE(*first + count, places);
        for (const auto& [at, n] : taken) ASSERT_TRUE(*first + count <= at || at + n <= *first);
        taken.push_back({*first, count});
      } else if (!taken.empty()) {
        ring.Release();
        taken.pop_front();
      }
      uint32_t sum = 0;
      for (const auto& [at, n] : taken) sum += n;
      ASSERT_LE(sum, ring.used());
      ASSERT_LE(ring.used(), places);
    }
  }
}

}  // namespace
}  // namespace kvmanager
