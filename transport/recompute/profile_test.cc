#include "transport/recompute/profile.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace kvmanager::recompute {
namespace {

constexpr ProjectionShape kShape{4096, 1024};

TEST(Profile, KnowsNothingAtFirst) {
  ManualClock clock;
  Profile profile(&clock);
  profile.RecordCopy(0, 5);
  profile.RecordCopy(1 << 20, 0);
  profile.RecordCopy(-1, -1);
  profile.RecordProjection(kShape, -1, 5);
  profile.RecordProjection(kShape, 0.0 / 0.0, 5);
  EXPECT_FALSE(profile.LinkBytesPerSecond().has_value());
  EXPECT_FALSE(profile.LinkLatencyNs().has_value());
  EXPECT_FALSE(profile.FlopsPerSecond(kShape).has_value());
}

TEST(Profile, LatencyIsTakenOffCopies) {
  ManualClock clock;
  Profile profile(&clock);
  profile.RecordCopy(64, 10'000);
  profile.RecordCopy(1'000'000, 110'000);  // 10 us, and 100 us for the bytes
  ASSERT_TRUE(profile.LinkBytesPerSecond().has_value());
  EXPECT_DOUBLE_EQ(profile.LinkBytesPerSecond()->value, 1e10);
  EXPECT_DOUBLE_EQ(profile.LinkLatencyNs()->value, 10'000);
  profile.RecordCopy(64, 10'000'000);  // an outlier of the latency: never all of a copy
  profile.RecordCopy(64, 10'000'000);
  EXPECT_DOUBLE_EQ(profile.LinkBytesPerSecond()->value, 1e6 * 1e9 / 11'000);
}

TEST(Profile, OutliersDoNotMoveIt) {
  ManualClock clock;
  Profile profile(&clock);
  for (int i = 0; i < Profile::kWindow; ++i) {
    clock.AdvanceNs(1000);
    const bool outlier = i % 5 == 1 || i % 5 == 3;
    profile.RecordProjection(kShape, 1e9, outlier ? (i % 2 == 0 ? 1 : 1'000'000'000) : 10'000 + i % 3);
  }
  const auto estimate = profile.FlopsPerSecond(kShape);
  ASSERT_TRUE(estimate.has_value());
  EXPECT_EQ(estimate->samples, Profile::kWindow);
  EXPECT_FALSE(estimate->stale);
  EXPECT_NEAR(estimate->value, 1e14, 3e10);
}

TEST(Profile, FollowsAChangeWithinHalfAWindow) {
  ManualClock clock;
  Profile profile(&clock);
  for (int i = 0; i < 100; ++i) profile.RecordCopy(1'000'000, 1'000'000);
  EXPECT_DOUBLE_EQ(profile.LinkBytesPerSecond()->value, 1e9);
  for (int i = 0; i < Profile::kWindow / 2; ++i) profile.RecordCopy(1'000'000, 4'000'000);
  EXPECT_DOUBLE_EQ(profile.LinkBytesPerSecond()->value, 1e9);
  profile.RecordCopy(1'000'000, 4'000'000);
  EXPECT_DOUBLE_EQ(profile.LinkBytesPerSecond()->value, 2.5e8);
}

TEST(Profile, OldSamplesGiveWayToYoungOnesAndAreStaleAlone) {
  ManualClock clock;
  Profile profile(&clock, /*age_ns_max=*/1000);
  for (int i = 0; i < 20; ++i) profile.RecordCopy(1'000'000, 1'000'000);
  clock.AdvanceNs(1001);
  auto estimate = profile.LinkBytesPerSecond();
  EXPECT_TRUE(estimate->stale);
  EXPECT_EQ(estimate->samples, 20);
  EXPECT_DOUBLE_EQ(estimate->value, 1e9);
  profile.RecordCopy(1'000'000, 2'000'000);
  estimate = profile.LinkBytesPerSecond();
  EXPECT_FALSE(estimate->stale);
  EXPECT_EQ(estimate->samples, 1);
  EXPECT_DOUBLE_EQ(estimate->value, 5e8);
}

TEST(Profile, ShapesAreApartAndBounded) {
  ManualClock clock;
  Profile profile(&clock);
  for (int i = 0; i < Profile::kShapesMax; ++i) profile.RecordProjection({i + 1, 128}, 1e6 * (i + 1), 1000);
  profile.RecordProjection({1, 128}, 1e6, 1000);  // {2, 128} is now the one of longest ago
  profile.RecordProjection({99, 128}, 5e6, 1000);
  EXPECT_DOUBLE_EQ(profile.FlopsPerSecond({1, 128})->value, 1e12);
  EXPECT_FALSE(profile.FlopsPerSecond({2, 128}).has_value());
  EXPECT_DOUBLE_EQ(profile.FlopsPerSecond({3, 128})->value, 3e12);
  EXPECT_DOUBLE_EQ(profile.FlopsPerSecond({99, 128})->value, 5e12);
  EXPECT_FALSE(profile.FlopsPerSecond({1, 129}).has_value());
}

TEST(Profile, GivesAPlannerItsRates) {
  ManualClock clock;
  Profile profile(&clock);
  EXPECT_EQ(RatesOf(profile, kShape).status().code(), absl::StatusCode::kFailedPrecondition);
  profile.RecordCopy(1'000'000, 1'000'000);
  EXPECT_EQ(RatesOf(profile, kShape).status().code(), absl::StatusCode::kFailedPrecondition);
  profile.RecordProjection(kShape, 1e30, 1);  // more than a planner takes
  const auto rates = RatesOf(profile, kShape);
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_EQ(rates->link_bytes_per_second, 1'000'000'000);
  EXPECT_EQ(rates->link_latency_ns, 0);
  EXPECT_EQ(rates->compute_flops_per_second, MachineRates::kFlopsPerSecondMax);
}

TEST(Profile, AnyThreadRecordsAndReads) {
  SteadyClock clock;
  Profile profile(&clock);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        profile.RecordCopy(1 << 20, 1 << 20);
        profile.RecordProjection(kShape, 1e9, 1000);
        ASSERT_DOUBLE_EQ(profile.LinkBytesPerSecond()->value, 1e9);
        ASSERT_DOUBLE_EQ(profile.FlopsPerSecond(kShape)->value, 1e15);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kvmanager::recompute
