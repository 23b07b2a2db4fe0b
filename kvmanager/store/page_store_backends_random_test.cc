// Thousands of random operations, each made in host memory and on a simulated GPU, against one model (backends_walk.h).
// KVMANAGER_WALK_SEED=N walks seed N alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "kvmanager/store/backends_walk.h"

namespace kvmanager::backends_walk {
namespace {

constexpr int kSteps = 6000;  // short walks do not come everywhere
#ifdef KVMANAGER_SANITIZED
constexpr uint64_t kSeeds = 3;
#else
constexpr uint64_t kSeeds = 6;
#endif

void Walk(uint64_t seed, BackendsWalk::Counts* sum) {
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  BackendsWalk walk(seed);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(::testing::Message() << "step " << step);
    walk.Step();
    if (::testing::Test::HasFailure()) return;
  }
  walk.Finish();
  if (::testing::Test::HasFailure()) return;
  const BackendsWalk::Counts& counts = walk.counts;
  const auto n = [](uint64_t count) { return static_cast<unsigned long long>(count); };
  std::printf(
      "seed %llu: %llu statuses (%llu refused, %llu without room, %llu in one memory), %llu matches, %llu hits, "
      "%llu publishes, %llu shared, %llu purged, %llu deaths\n",
      n(seed), n(counts.statuses), n(counts.refused), n(counts.no_room), n(counts.room_differs), n(counts.matches),
      n(counts.hits), n(counts.publishes), n(counts.shared), n(counts.purged), n(counts.deaths));
  std::printf(
      "seed %llu: %llu reads (%llu refused) of %llu raw, %llu encoded pages, %llu declined on the GPU; %llu "
      "loads, %llu sent, %llu received, %llu named, %llu activations, %llu recomputed\n",
      n(seed), n(counts.reads), n(counts.reads_refused), n(counts.raw), n(counts.encoded), n(counts.kernels.declined),
      n(counts.loads), n(counts.sent), n(counts.received), n(counts.named), n(counts.activations),
      n(counts.recomputed));
  sum->refused += counts.refused;
  sum->no_room += counts.no_room;
  sum->room_differs += counts.room_differs;
  sum->matches += counts.matches;
  sum->hits += counts.hits;
  sum->publishes += counts.publishes;
  sum->shared += counts.shared;
  sum->purged += counts.purged;
  sum->deaths += counts.deaths;
  sum->reads += counts.reads;
  sum->reads_refused += counts.reads_refused;
  sum->raw += counts.raw;
  sum->encoded += counts.encoded;
  sum->kernels.declined += counts.kernels.declined;
  sum->loads += counts.loads;
  sum->received += counts.received;
  sum->named += counts.named;
  sum->activations += counts.activations;
  sum->recomputed += counts.recomputed;
}

TEST(PageStoreBackendsRandom, HostMemoryAndAGpuAnswerAlike) {
  BackendsWalk::Counts sum;
  if (const char* const seed = std::getenv("KVMANAGER_WALK_SEED")) return Walk(std::strtoull(seed, nullptr, 10), &sum);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    Walk(seed, &sum);
    if (HasFailure()) return;
  }
  // The walk went where it should.
  EXPECT_GT(sum.refused, 0u);
  EXPECT_GT(sum.no_room, 0u);
  EXPECT_GT(sum.room_differs, 0u);
  EXPECT_GT(sum.matches, 0u);
  EXPECT_GT(sum.hits, 0u);
  EXPECT_GT(sum.publishes, 0u);
  EXPECT_GT(sum.shared, 0u);
  EXPECT_GT(sum.purged, 0u);
  EXPECT_GT(sum.deaths, 0u);
  EXPECT_GT(sum.reads, 300u * kSeeds);
  EXPECT_GT(sum.reads_refused, 0u);
  EXPECT_GT(sum.raw, 0u);
  EXPECT_GT(sum.encoded, 0u);
  EXPECT_GT(sum.kernels.declined, 0u);
  EXPECT_GT(sum.loads, 0u);
  EXPECT_GT(sum.received, 0u);
  EXPECT_GT(sum.named, 0u);
  EXPECT_GT(sum.activations, sum.recomputed);
  EXPECT_GT(sum.recomputed, 0u);
}

}  // namespace
}  // namespace kvmanager::backends_walk
