#include "transport/recompute/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

__extension__ typedef __int128 Int;

// The formulas once more, from raw numbers, with a compiler's integers.
Int BruteTime(const MachineRates& r, const ReloadShape& s, Schedule schedule, int64_t l) {
  const Int fs = Int{1'000'000'000'000'000};
  const Int width = Int{s.kv_heads} * s.head_dim;
  const Int x_bytes = s.x_token_bytes > 0 ? s.x_token_bytes : 2 * s.hidden;
  const Int kv_bytes = s.kv_token_bytes > 0 ? Int{s.kv_token_bytes} : 4 * width;
  const auto rounded = [](Int a, Int b) { return (2 * a + b) / (2 * b); };
  const Int x = rounded(s.batch * x_bytes * fs, r.link_bytes_per_second);
  const Int kv = rounded(s.batch * kv_bytes * fs, r.link_bytes_per_second);
  const Int flop = rounded(s.batch * 4 * s.hidden * width * fs, r.compute_flops_per_second);
  const Int link_lag = Int{r.link_latency_ns} * 1000000, compute_lag = Int{r.compute_latency_ns} * 1000000;
  const Int rest = s.tokens - l;
  const Int copy = rest > 0 ? link_lag + kv * rest : 0;
  if (l == 0) return copy;
  const Int move = link_lag + x * l, compute = compute_lag + flop * l;
  if (schedule == Schedule::kRow) return std::max(compute, copy);
  if (schedule == Schedule::kColumn) return move + std::max(compute, copy);
  const Int chunk = std::min(s.chunk_tokens, l);
  return std::max({move + copy, link_lag + x * chunk + compute, move + compute_lag + flop * chunk});
}

absl::int128 Wide(Int v) { return absl::MakeInt128(int64_t(v >> 64), uint64_t(v)); }

// Log-uniform: small and large alike.
int64_t Draw(std::mt19937_64& random, int64_t min, int64_t max) {
  const double at = std::uniform_real_distribution<double>(std::log(double(min)), std::log(double(max) + 1))(random);
  return std::clamp(int64_t(std::exp(at)), min, max);
}

TEST(Plan, EqualsBruteForceOverEverySplit) {
  std::mt19937_64 random(6);
  const auto coin = [&](int one_in) { return random() % one_in == 0; };
  int64_t copies = 0, recomputes = 0, between = 0;
  for (int input = 0; input < 10000; ++input) {
    MachineRates r{.link_bytes_per_second = Draw(random, 1, MachineRates::kLinkBytesPerSecondMax),
                   .link_latency_ns = coin(3) ? 0 : Draw(random, 1, 1000000),
                   .compute_flops_per_second = Draw(random, 1, MachineRates::kFlopsPerSecondMax),
                   .compute_latency_ns = coin(3) ? 0 : Draw(random, 1, 1000000)};
    const int64_t kv_heads = Draw(random, 1, 128), group = int64_t{1} << random() % 4;
    ReloadShape s{.tokens = coin(4) ? Draw(random, 1, 4) : Draw(random, 1, 700),
                  .batch = Draw(random, 1, 256),
                  .hidden = Draw(random, 1, coin(8) ? ReloadShape::kHiddenMax : 16384),
                  .kv_heads = kv_heads,
                  .query_heads = kv_heads * group,
                  .head_dim = Draw(random, 1, 256)};
    if (coin(2)) {  // as models are, on machines whose link and arithmetic are near each other
      s.hidden = s.query_heads * s.head_dim;
      r.link_bytes_per_second = Draw(random, 10'000'000, 100'000'000'000);
      r.compute_flops_per_second = std::clamp<int64_t>(
          int64_t(double(r.link_bytes_per_second) * double(s.hidden) * std::exp2(double(random() % 60) / 10 - 3)), 1,
          MachineRates::kFlopsPerSecondMax);
    }
    if (coin(2)) s.kv_token_bytes = Draw(random, 1, ReloadShape::kTokenBytesMax);
    if (coin(3)) s.x_token_bytes = Draw(random, 1, ReloadShape::kTokenBytesMax);
    if (coin(4)) s.x_tokens = int64_t(random() % (s.tokens + 1));
    s.chunk_tokens = coin(5) ? Draw(random, 1, ReloadShape::kTokensMax) : Draw(random, 1, 256);
    s.split_multiple = coin(2) ? 1 : Draw(random, 1, 900);
    if (coin(20)) {  // extremes
      r.link_bytes_per_second = coin(2) ? 1 : MachineRates::kLinkBytesPerSecondMax;
      r.compute_flops_per_second = coin(2) ? 1 : MachineRates::kFlopsPerSecondMax;
      s.batch = ReloadShape::kBatchMax;
      s.hidden = ReloadShape::kHiddenMax;
    }
    const auto costs = MakeCosts(r, s);
    ASSERT_TRUE(costs.ok()) << costs.status();
    const int64_t split_max = s.x_tokens < 0 ? s.tokens : s.x_tokens;
    for (const Schedule schedule : kSchedules) {
      int64_t best = 0;
      Int best_time = BruteTime(r, s, schedule, 0);
      for (int64_t l = 1; l <= split_max; ++l) {
        if (l % s.split_multiple != 0 && l != s.tokens) continue;
        const Int time = BruteTime(r, s, schedule, l);
        if (time < best_time) best = l, best_time = time;
      }
      const SplitPlan plan = PlanSplit(*costs, schedule);
      ASSERT_EQ(plan.split_tokens, best) << "input " << input << ", " << ScheduleName(schedule);
      ASSERT_EQ(plan.time, Wide(best_time)) << "input " << input << ", " << ScheduleName(schedule);
      ASSERT_EQ(plan.all_copy, Wide(BruteTime(r, s, schedule, 0)));
      ASSERT_EQ(plan.recompute_most, Wide(BruteTime(r, s, schedule, split_max)));
      ++(best == 0 ? copies : best == s.tokens ? recomputes : between);
    }
  }
  // The draw reaches every kind of answer.
  EXPECT_GT(copies, 3000);
  EXPECT_GT(recomputes, 3000);
  EXPECT_GT(between, 3000);
}

TEST(Plan, LargestInputsDoNotOverflow) {
  const MachineRates slow{.link_bytes_per_second = 1,
                          .link_latency_ns = MachineRates::kLatencyNsMax,
                          .compute_flops_per_second = 1,
                          .compute_latency_ns = MachineRates::kLatencyNsMax};
  ReloadShape s{.tokens = ReloadShape::kTokensMax,
                .batch = ReloadShape::kBatchMax,
                .hidden = ReloadShape::kHiddenMax,
                .kv_heads = 512,
                .query_heads = 65536,
                .head_dim = 256,
                .kv_token_bytes = ReloadShape::kTokenBytesMax,
                .x_token_bytes = ReloadShape::kTokenBytesMax};
  const auto costs = MakeCosts(slow, s);
  ASSERT_TRUE(costs.ok()) << costs.status();
  for (const Schedule schedule : kSchedules) {
    double last = 0;
    for (const int64_t l : {int64_t{0}, int64_t{1}, s.tokens / 2, s.tokens - 1, s.tokens}) {
      const TimeFs time = ReloadTime(*costs, schedule, l);
      EXPECT_GT(time, 0);
      last = Seconds(time);
    }
    const double flop = 4.0 * s.hidden * s.kv_heads * s.head_dim * s.batch * s.tokens;
    EXPECT_GE(last, flop);
    EXPECT_LE(last, 1.001 * flop + 1e19);
  }
}

// Chunks through a link and a processor, one event after another.
Int Simulated(const ReloadCosts& c, int64_t split) {
  const auto wide = [](absl::int128 v) { return Int(absl::Int128High64(v)) << 64 | absl::Int128Low64(v); };
  Int link = wide(c.link_latency_fs), processor = 0;
  for (int64_t begin = 0; begin < split; begin += c.chunk_tokens) {
    const int64_t n = std::min(c.chunk_tokens, split - begin);
    link += wide(c.x_fs) * n;
    processor = std::max(processor, link) + wide(c.compute_fs) * n + (begin == 0 ? wide(c.compute_latency_fs) : 0);
  }
  if (split < c.tokens) link += wide(c.link_latency_fs) + wide(c.kv_fs) * (c.tokens - split);
  return std::max(link, processor);
}

TEST(Plan, SharedLinkIsTheTimeOfAPipelineOfChunks) {
  std::mt19937_64 random(7);
  for (int input = 0; input < 3000; ++input) {
    ReloadCosts c{.tokens = Draw(random, 1, 500), .split_max = 0, .split_multiple = 1};
    c.chunk_tokens = Draw(random, 1, 100);
    c.x_fs = Draw(random, 1, 1000000);
    c.kv_fs = Draw(random, 1, 1000000);
    c.compute_fs = Draw(random, 1, 1000000);
    c.link_latency_fs = Draw(random, 1, 100000);
    const int64_t split = 1 + int64_t(random() % c.tokens);
    const absl::int128 simulated = Wide(Simulated(c, split)), modelled = ReloadTime(c, Schedule::kSharedLink, split);
    if (split % c.chunk_tokens == 0 || split < c.chunk_tokens) {
      EXPECT_EQ(modelled, simulated) << input;
    } else {
      EXPECT_GE(modelled, simulated) << input;
      EXPECT_LE(modelled, simulated + c.chunk_tokens * std::max(c.x_fs, c.compute_fs)) << input;
    }
  }
}

// One layer, b = 32, an H200's 55 GB/s and 700 TFLOP/s.
constexpr MachineRates kH200{.link_bytes_per_second = 55'000'000'000, .compute_flops_per_second = 700'000'000'000'000};

ReloadShape Layer(int64_t hidden, int64_t group) {
  const int64_t heads = hidden / 128;
  return {
      .tokens = 4096, .batch = 32, .hidden = hidden, .kv_heads = heads / group, .query_heads = heads, .head_dim = 128};
}

TEST(Plan, NumbersOfAnH200) {
  const auto small = MakeCosts(kH200, Layer(4096, 1));
  ASSERT_TRUE(small.ok());
  EXPECT_NEAR(Seconds(small->x_fs) * 1e6, 4.8, 0.05);
  EXPECT_NEAR(Seconds(small->kv_fs) * 1e6, 9.5, 0.05);
  EXPECT_NEAR(Seconds(small->compute_fs) * 1e6, 3.1, 0.05);
  const SplitPlan all = PlanSplit(*small);
  EXPECT_GE(all.split_tokens, 4096 - 64);  // the last chunk's projection hides behind a few tokens' K and V
  ReloadShape pages = Layer(4096, 1);
  pages.split_multiple = 64;
  EXPECT_EQ(PlanSplit(*MakeCosts(kH200, pages)).split_tokens, 4096);
  EXPECT_NEAR(Seconds(all.time) / Seconds(all.all_copy), 0.50, 0.01);
  const auto large = MakeCosts(kH200, Layer(8192, 1));
  ASSERT_TRUE(large.ok());
  const SplitPlan part = PlanSplit(*large);
  EXPECT_NEAR(double(part.split_tokens) / 4096, 0.87, 0.01);
  EXPECT_NEAR(Seconds(part.time) / Seconds(part.all_copy), 0.563, 0.01);
  EXPECT_NEAR(Seconds(part.recompute_most) / Seconds(part.all_copy), 0.644, 0.01);
}

TEST(Plan, GroupsOfEightCopyOnFastLinks) {
  for (const int64_t hidden : {1024, 4096, 8192, 16384}) {
    for (const int64_t gigabytes : {1, 10, 55, 400}) {
      MachineRates rates = kH200;
      rates.link_bytes_per_second = gigabytes * 1'000'000'000;
      const auto costs = MakeCosts(rates, Layer(hidden, 8));
      ASSERT_TRUE(costs.ok());
      EXPECT_EQ(PlanSplit(*costs).split_tokens, 0);
      EXPECT_EQ(PlanSplit(*costs, Schedule::kColumn).split_tokens, 0);
    }
  }
}

TEST(Plan, CodecsShiftTheAnswer) {
  ReloadShape s = Layer(8192, 1);
  s.kv_token_bytes = 88 * s.kv_heads;  // hack's default: X is four times as large
  EXPECT_EQ(PlanSplit(*MakeCosts(kH200, s)).split_tokens, 0);
  s = Layer(4096, 4);  // X is twice K and V
  EXPECT_EQ(PlanSplit(*MakeCosts(kH200, s)).split_tokens, 0);
  s.x_token_bytes = s.hidden / 4;  // X quartered once more: now it is half
  EXPECT_GT(PlanSplit(*MakeCosts(kH200, s)).split_tokens, 0);
}

TEST(Plan, NeverSlowerThanEitherWay) {
  for (const int64_t tokens : {1, 2, 63, 64, 65, 1000, 4096}) {
    for (const int64_t multiple : {1, 64}) {
      ReloadShape s = Layer(8192, 1);
      s.tokens = tokens;
      s.split_multiple = multiple;
      const auto costs = MakeCosts(kH200, s);
      ASSERT_TRUE(costs.ok());
      for (const Schedule schedule : kSchedules) {
        const SplitPlan plan = PlanSplit(*costs, schedule);
        EXPECT_LE(plan.time, plan.all_copy);
        EXPECT_LE(plan.time, plan.recompute_most);
        EXPECT_TRUE(plan.split_tokens % multiple == 0 || plan.split_tokens == tokens);
      }
    }
  }
}

TEST(Plan, HostileInputsAreNamed) {
  const auto field = [](MachineRates r, ReloadShape s) { return DetailOf(MakeCosts(r, s).status()).field; };
  const ReloadShape good = Layer(4096, 1);
  EXPECT_TRUE(MakeCosts(kH200, good).ok());
  for (const int64_t bad : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    MachineRates r = kH200;
    r.link_bytes_per_second = bad;
    EXPECT_EQ(field(r, good), "link_bytes_per_second");
    r = kH200;
    r.compute_flops_per_second = bad;
    EXPECT_EQ(field(r, good), "compute_flops_per_second");
    ReloadShape s = good;
    s.tokens = bad;
    EXPECT_EQ(field(kH200, s), "tokens");
    s = good;
    s.batch = bad;
    EXPECT_EQ(field(kH200, s), "batch");
    s = good;
    s.hidden = bad;
    EXPECT_EQ(field(kH200, s), "hidden");
    s = good;
    s.kv_heads = bad;
    EXPECT_EQ(field(kH200, s), "kv_heads");
    s = good;
    s.head_dim = bad;
    EXPECT_EQ(field(kH200, s), "head_dim");
    s = good;
    s.chunk_tokens = bad;
    EXPECT_EQ(field(kH200, s), "chunk_tokens");
    s = good;
    s.split_multiple = bad;
    EXPECT_EQ(field(kH200, s), "split_multiple");
  }
  ReloadShape s = good;
  s.query_heads = s.kv_heads + 1;
  EXPECT_EQ(field(kH200, s), "query_heads");
  s = good;
  s.query_heads = s.kv_heads = s.head_dim = 65536;
  EXPECT_EQ(field(kH200, s), "kv_heads * head_dim");
  s = good;
  s.kv_token_bytes = -5;
  EXPECT_EQ(field(kH200, s), "kv_token_bytes");
  EXPECT_EQ(DetailOf(MakeCosts(kH200, s).status()).value, "-5");
  s = good;
  s.x_tokens = s.tokens + 1;
  EXPECT_EQ(field(kH200, s), "x_tokens");
}

}  // namespace
}  // namespace kvmanager::recompute
