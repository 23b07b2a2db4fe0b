// Thousands of random operations on caches of a GPU, against a model of what every query must read (device_walk.h).
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>

#include "kvmanager/store/device_walk.h"

namespace kvmanager::device_walk {
namespace {

constexpr int kSteps = 12000;  // short walks do not come everywhere
#ifdef KVMANAGER_SANITIZED
constexpr uint64_t kFirstSeed = 3, kSeeds = 2;  // two that go everywhere together
#else
constexpr uint64_t kFirstSeed = 1, kSeeds = 6;
#endif

TEST(PageStoreDeviceRandom, KernelsReadWhatTheModelSays) {
  DeviceWalk::Counts sum;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + kSeeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    DeviceWalk walk(seed);
    for (int step = 0; step < kSteps; ++step) {
      SCOPED_TRACE(::testing::Message() << "step " << step);
      walk.Step();
      if (::testing::Test::HasFatalFailure()) return;
    }
    walk.Finish();
    if (::testing::Test::HasFatalFailure()) return;
    auto& counts = walk.counts;
    counts.demoted = walk.demoted();
    counts.fetched = walk.fetched();
    std::printf("seed %d: %d demoted, %d fetched, %d arrivals waited, %d copied out, %d back\n", int(seed),
                int(counts.demoted), int(counts.fetched), int(counts.waited_arrivals), int(counts.copied_out),
                int(counts.copied_back));
    sum.sampled += walk.sampled();
    sum.demoted += counts.demoted;
    sum.fetched += counts.fetched;
    sum.waited_arrivals += counts.waited_arrivals;
    sum.copied_out += counts.copied_out;
    sum.copied_back += counts.copied_back;
    sum.tried_again += counts.tried_again;
    std::printf("seed %d: %d sent, %d by the host, %d pages early, %d withdrawn; %d tried again\n", int(seed),
                int(counts.sent), int(counts.sent_by_host), int(counts.sent_early), int(counts.withdrawn),
                int(counts.tried_again));
    sum.sent += counts.sent;
    sum.sent_by_host += counts.sent_by_host;
    sum.sent_early += counts.sent_early;
    sum.withdrawn += counts.withdrawn;
    std::printf(
        "seed %d: %d hits, %d shared, %d copies, %d exhausted (%d awaited), %d waits, %d refused, %d deaths, %d "
        "queries "
        "of %d raw, %d encoded, %d declined pages\n",
        int(seed), int(counts.hits), int(counts.shared), int(counts.copies), int(counts.exhausted), int(counts.awaited),
        int(counts.waits), int(counts.refused), int(counts.deaths), int(counts.kernels.queries),
        int(counts.kernels.raw), int(counts.kernels.encoded), int(counts.kernels.declined));
    sum.hits += counts.hits;
    sum.shared += counts.shared;
    sum.copies += counts.copies;
    sum.exhausted += counts.exhausted;
    sum.awaited += counts.awaited;
    sum.waits += counts.waits;
    sum.deaths += counts.deaths;
    sum.kernels.encoded += counts.kernels.encoded;
    sum.kernels.declined += counts.kernels.declined;
  }
  // The walk went where it should.
  EXPECT_GT(sum.hits, 0u);
  EXPECT_GT(sum.shared, 0u);
  EXPECT_GT(sum.copies, 0u);
  EXPECT_GT(sum.exhausted, 0u);
  EXPECT_GT(sum.awaited, 0u);
  EXPECT_GT(sum.waits, 0u);
  EXPECT_GT(sum.deaths, 0u);
  EXPECT_GT(sum.kernels.encoded, 0u);
  EXPECT_GT(sum.kernels.declined, 0u);
  EXPECT_GT(sum.sampled, 200u * kSeeds);
  EXPECT_GT(sum.demoted, 0u);
  EXPECT_GT(sum.fetched, 0u);
  EXPECT_GT(sum.waited_arrivals, 0u);
  EXPECT_GT(sum.copied_out, 0u);
  EXPECT_GT(sum.copied_back, 0u);
  EXPECT_GT(sum.tried_again, 0u);
  EXPECT_GT(sum.sent, 0u);
  EXPECT_GT(sum.sent_by_host, 0u);
  EXPECT_GT(sum.sent_early, 0u);
  EXPECT_GT(sum.withdrawn, 0u);
}

}  // namespace
}  // namespace kvmanager::device_walk
