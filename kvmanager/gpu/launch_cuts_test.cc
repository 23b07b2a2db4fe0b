#include "kvmanager/gpu/launch_cuts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvmanager {
namespace {

/// 32 query and 8 KV heads of 128; hack K2V2.
AttentionShape Shape() {
  return {.kv_heads = 8,
          .query_heads = 32,
          .head_dim = 128,
          .lag_pages = 1,
          .multiprocessors = 132,
          .encoded_cost = 7208,
          .has_long_kernels = true};
}

std::vector<AttentionWork> Decode(int sequences, uint64_t context) {
  return std::vector<AttentionWork>(size_t(sequences), AttentionWork{context - 1, 1, 0});
}

bool IsWhole(const LaunchCut& cut, const std::vector<AttentionWork>& entries) {
  return cut == LaunchCut{entries.size(), entries.back().tokens};
}

/// The step's launches, which are checked to be all of it.
std::vector<std::vector<AttentionWork>> Launches(const AttentionRates& rates, std::vector<AttentionWork> entries,
                                                 ReadForm pages) {
  std::vector<std::vector<AttentionWork>> launches;
  while (!entries.empty()) {
    const LaunchCut cut = FirstLaunch(rates, entries, pages);
    if (cut.entries < 1 || cut.entries > entries.size() || cut.tokens_of_last < 1 ||
        cut.tokens_of_last > entries[cut.entries - 1].tokens) {
      ADD_FAILURE() << cut.entries << " entries, " << cut.tokens_of_last << " tokens";
      return launches;
    }
    std::vector<AttentionWork> launch(entries.begin(), entries.begin() + ptrdiff_t(cut.entries));
    AttentionWork& last = launch.back();
    AttentionWork rest = last;
    const int exact = last.tokens - last.sparse_queries;
    last.tokens = cut.tokens_of_last;
    last.sparse_queries = std::max(0, last.tokens - exact);
    rest.position += uint64_t(last.tokens);
    rest.tokens -= last.tokens;
    rest.sparse_queries -= last.sparse_queries;
    entries.erase(entries.begin(), entries.begin() + ptrdiff_t(cut.entries));
    if (rest.tokens > 0) entries.insert(entries.begin(), rest);
    launches.push_back(std::move(launch));
  }
  return launches;
}

// Measured times, of docs/benchmarks: estimates are not below them, and not far above.
TEST(LaunchCutsTest, EstimatesAreNotBelowWhatWasMeasured) {
  const AttentionRates k2v2 = RatesOf(Shape());
  AttentionShape shape = Shape();
  shape.identity = true;
  const AttentionRates raw = RatesOf(shape);
  const auto us = [](const AttentionRates& rates, const std::vector<AttentionWork>& entries) {
    return AttentionNs(rates, entries, ReadForm::kEncoded) / 1000;
  };
  EXPECT_NEAR(us(raw, Decode(16, 32768)), 501.6, 40);
  EXPECT_NEAR(us(raw, Decode(64, 8192)), 510.6, 40);
  EXPECT_NEAR(us(k2v2, Decode(16, 32768)), 109, 12);
  EXPECT_NEAR(us(k2v2, Decode(64, 8192)), 126.6, 20);
  // The slowest codec's, whatever the codec.
  EXPECT_NEAR(us(k2v2, {{32768, 2048, 0}}), 7769, 400);
  EXPECT_NEAR(us(raw, {{32768, 2048, 0}}), 7769, 400);
}

TEST(LaunchCutsTest, OrdinaryStepsAreOneLaunch) {
  const AttentionRates k2v2 = RatesOf(Shape());
  AttentionShape shape = Shape();
  shape.identity = true;
  const AttentionRates raw = RatesOf(shape);
  for (const auto& [sequences, context] : {std::pair{1, uint64_t{131072}}, {16, 32768}, {64, 8192}, {256, 2048}}) {
    for (const AttentionRates& rates : {k2v2, raw}) {
      EXPECT_TRUE(
          IsWhole(FirstLaunch(rates, Decode(sequences, context), ReadForm::kEncoded), Decode(sequences, context)))
          << sequences << " x " << context;
    }
  }
  const std::vector<AttentionWork> prompt = {{0, 2048, 0}};
  EXPECT_TRUE(IsWhole(FirstLaunch(k2v2, prompt, ReadForm::kEncoded), prompt));
}

TEST(LaunchCutsTest, LongEntriesAreCutIntoWholeTiles) {
  const AttentionRates rates = RatesOf(Shape());
  const auto launches = Launches(rates, {{32768, 2048 + 7, 0}}, ReadForm::kEncoded);
  ASSERT_GT(launches.size(), 4u);
  int tokens = 0;
  for (const auto& launch : launches) {
    ASSERT_EQ(launch.size(), 1u);
    EXPECT_GE(launch[0].tokens, 64);  // none is left to kernels for few tokens
    if (&launch != &launches.back()) EXPECT_EQ(launch[0].tokens % 64, 0);
    EXPECT_EQ(launch[0].position, 32768u + uint64_t(tokens));
    EXPECT_LE(AttentionNs(rates, launch, ReadForm::kEncoded), kLaunchNs);
    tokens += launch[0].tokens;
  }
  EXPECT_EQ(tokens, 2048 + 7);
  // Over a context of which 64 tokens take too long, kernels for few tokens take turns.
  const auto few = Launches(rates, {{1 << 20, 64, 0}}, ReadForm::kEncoded);
  EXPECT_GT(few.size(), 1u);
  for (const auto& launch : few) EXPECT_LE(AttentionNs(rates, launch, ReadForm::kEncoded), kLaunchNs);
}

TEST(LaunchCutsTest, PagesThatStayedRawTakeLonger) {
  const AttentionRates rates = RatesOf(Shape());
  const std::vector<AttentionWork> step = Decode(64, 32768);
  EXPECT_TRUE(IsWhole(FirstLaunch(rates, step, ReadForm::kEncoded), step));
  const LaunchCut raw = FirstLaunch(rates, step, ReadForm::kRaw);
  EXPECT_LT(raw.entries, 64u);
  EXPECT_GT(raw.entries, 32u);
}

TEST(LaunchCutsTest, WhatReadsManyRawPagesIsCutAgain) {
  const AttentionRates rates = RatesOf(Shape());
  const std::vector<AttentionWork> step = Decode(64, 32768);
  const uint64_t pairs = 64 * 32768;
  EXPECT_FALSE(TakesTooLong(rates, step, pairs - 64 * 192, 64 * 192));  // those of the lag
  EXPECT_FALSE(TakesTooLong(rates, step, pairs * 3 / 4, pairs / 4));
  EXPECT_TRUE(TakesTooLong(rates, step, 0, pairs));
  EXPECT_FALSE(TakesTooLong(rates, Decode(1, 8 << 20), 0, 8 << 20));
  // Nothing that was cut for raw pages is.
  const LaunchCut raw = FirstLaunch(rates, step, ReadForm::kRaw);
  EXPECT_FALSE(TakesTooLong(rates, absl::MakeConstSpan(step).first(raw.entries), 0, raw.entries * 32768));
  AttentionShape shape = Shape();
  shape.identity = true;
  EXPECT_FALSE(TakesTooLong(RatesOf(shape), step, 0, pairs));
}

TEST(LaunchCutsTest, AQueryTokenIsNeverCut) {
  AttentionShape shape = Shape();
  shape.identity = true;
  shape.kv_heads = shape.query_heads = 128;
  const AttentionRates rates = RatesOf(shape);
  const std::vector<AttentionWork> step = Decode(2, 4 << 20);
  EXPECT_GT(AttentionNs(rates, step[0], ReadForm::kRaw), kLaunchNs);
  EXPECT_EQ(FirstLaunch(rates, step, ReadForm::kRaw), (LaunchCut{1, 1}));
}

// Any step: its launches are all of it in its order, and none is estimated above the bound, unless it is one token.
TEST(LaunchCutsTest, EveryLaunchIsBounded) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 300; ++round) {
    AttentionShape shape;
    shape.kv_heads = 1 << below(6);
    shape.query_heads = shape.kv_heads << below(5);
    shape.head_dim = below(2) == 0 ? 64 : 128;
    shape.multiprocessors = below(2) == 0 ? 132 : 78;
    shape.identity = below(3) == 0;
    shape.encoded_cost = double(2000 + below(150000));
    shape.has_long_kernels = below(3) > 0;
    const AttentionRates rates = RatesOf(shape);
    std::vector<AttentionWork> entries;
    int tokens = 0;
    for (uint64_t n = 1 + below(20); n > 0; --n) {
      AttentionWork work = {below(uint64_t{1} << below(21)), int(1 + below(uint64_t{1} << below(11))), 0};
      if (below(4) == 0) work.sparse_queries = int(below(uint64_t(work.tokens) + 1));
      tokens += work.tokens;
      entries.push_back(work);
    }
    const ReadForm pages = below(2) == 0 ? ReadForm::kEncoded : ReadForm::kRaw;
    for (const auto& launch : Launches(rates, entries, pages)) {
      for (const AttentionWork& work : launch) tokens -= work.tokens;
      if (launch.size() == 1 && launch[0].tokens == 1) continue;
      EXPECT_LE(AttentionNs(rates, launch, pages), kLaunchNs * (1 + 1e-9));
    }
    EXPECT_EQ(tokens, 0);
  }
}

TEST(LaunchCutsTest, PagesOfAnEncodersLaunch) {
  EXPECT_EQ(EncodeLaunchPages(256 << 10), 16u);
  EXPECT_EQ(EncodeLaunchPages(4 << 20), 1u);
  EXPECT_EQ(EncodeLaunchPages(32 << 20), 1u);
  EXPECT_EQ(EncodeLaunchPages(3 << 20), 1u);
  EXPECT_EQ(EncodeLaunchPages(4096), 1024u);
}

}  // namespace
}  // namespace kvmanager
