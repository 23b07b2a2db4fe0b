// Random stores against what must hold of each: every block is encoded and written once, in order, or counted as what
// it is.
#include "client/block_store.h"

#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace kvmanager::client {
namespace {

constexpr uint64_t kBlockBytes = 100;

struct World {
  uint32_t first = 0, present = 0;      // blocks of the sequence: before the store, that the daemon has
  std::optional<uint32_t> declined;     // block of the store whose page cannot be encoded
  std::optional<uint64_t> full, fails;  // parts: for which there is no room, whose call fails
  std::optional<uint64_t> begin_fails, gpu_fails;
  double slow = 0.5;  // how likely something is not done yet
};

class FakeWork final : public BlockStoreWork {
 public:
  FakeWork(const BlockStore::Options& options, const World& world, uint32_t seed)
      : options_(options), world_(world), random_(seed) {}

  void Ask() override {
    EXPECT_EQ(begun.size(), 0u);
    ++asks;
  }
  absl::StatusOr<uint32_t> Present() override {
    EXPECT_EQ(begun.size(), options_.ahead ? 1u : 0u);
    EXPECT_EQ(++lookups, asks);
    return world_.present;
  }
  uint32_t Fits(uint32_t at, uint32_t count) const override {
    EXPECT_LE(count, options_.blocks);
    EXPECT_GE(count, 1u);
    return at == 0 && count > 1 ? count - 1 : count;  // the first block takes more
  }
  absl::Status Begin(BlockPart* part) override {
    EXPECT_LE(part->at + part->count, options_.count);
    EXPECT_TRUE(stagings_.insert(part->staging).second) << "staging " << part->staging << " is in use";
    EXPECT_TRUE(ranges_.insert(part->range).second) << "range " << part->range << " is in use";
    EXPECT_LT(part->staging, options_.stagings);
    EXPECT_LT(part->range, options_.ranges);
    if (options_.tied) {
      EXPECT_EQ(part->staging, part->range);
    }
    if (begun.size() == world_.begin_fails) return absl::ResourceExhaustedError("no memory");
    EXPECT_EQ(part->number, begun.size());
    part->bytes = part->count * kBlockBytes;
    begun.push_back(*part);
    return absl::OkStatus();
  }
  absl::StatusOr<bool> Encoded(const BlockPart& part) override {
    if (!gpu_failed_) {
      EXPECT_EQ(part.number, encoded);  // in order
    }
    if (gpu_failed_ |= part.number == world_.gpu_fails; gpu_failed_)
      return absl::UnavailableError("the GPU has failed");
    if (Chance(world_.slow)) return false;
    ++encoded;
    const bool present = part.at + part.count <= world_.present - std::min(world_.present, world_.first);
    if (!options_.tied || present) stagings_.erase(part.staging);
    if (present) ranges_.erase(part.range);
    return true;
  }
  bool Declined(const BlockPart& part) const override {
    return world_.declined.has_value() && *world_.declined >= part.at && *world_.declined < part.at + part.count;
  }
  Pending<absl::StatusOr<WriteBlocksResult>> Write(const BlockPart& part) override {
    EXPECT_GT(part.at + part.count + world_.first, world_.present);
    EXPECT_LT(part.number, encoded);
    EXPECT_FALSE(Declined(part));
    written.push_back(part);
    ++under_way;
    EXPECT_LE(under_way, options_.writes);
    absl::StatusOr<WriteBlocksResult> result = WriteBlocksResult{part.count, 0};
    if (part.number % 3 == 1) result = WriteBlocksResult{part.count - 1, 1};  // somebody else wrote it meanwhile
    if (part.number == world_.full) result = absl::ResourceExhaustedError("no room");
    if (part.number == world_.fails) result = absl::UnavailableError("gone");
    return Pending<absl::StatusOr<WriteBlocksResult>>(std::make_unique<Call>(this, part, std::move(result)));
  }
  void Rest() override { ++rests; }
  void Drain() override {
    drained = true;
    encoded = begun.size();
  }

  bool Chance(double likely) { return std::bernoulli_distribution(likely)(random_); }

  std::vector<BlockPart> begun, written;
  uint64_t encoded = 0;
  uint32_t under_way = 0, asks = 0, lookups = 0, rests = 0;
  bool drained = false;

 private:
  struct Call final : Pending<absl::StatusOr<WriteBlocksResult>>::State {
    Call(FakeWork* of, BlockPart part, absl::StatusOr<WriteBlocksResult> result)
        : of_(*of), part_(part), result_(std::move(result)) {}
    bool ready() override { return !of_.Chance(of_.world_.slow); }
    absl::StatusOr<WriteBlocksResult> Wait() override {
      --of_.under_way;
      of_.ranges_.erase(part_.range);
      if (of_.options_.tied) of_.stagings_.erase(part_.staging);
      return std::move(result_);
    }
    FakeWork& of_;
    const BlockPart part_;
    absl::StatusOr<WriteBlocksResult> result_;
  };

  const BlockStore::Options options_;
  const World world_;
  std::mt19937 random_;
  bool gpu_failed_ = false;
  std::set<uint32_t> stagings_, ranges_;
};

// What a store that was not stopped must have done.
void ExpectWhole(const BlockStore& store, const BlockStore::Options& options, const World& world, const FakeWork& work,
                 BlockStore::State state) {
  const auto& counts = store.counts();
  EXPECT_EQ(state == BlockStore::State::kDeclined, store.next() < options.count);
  EXPECT_EQ(store.read(), state == BlockStore::State::kDone ? 1u : 0u);
  EXPECT_EQ(counts.found + counts.written + counts.present + counts.full, store.next());
  EXPECT_EQ(counts.full > 0, !store.full().empty());
  uint32_t next = 0;
  for (const BlockPart& part : work.written) {
    if (part.at > next) {
      EXPECT_EQ(part.at, std::min(world.present - world.first, options.count)) << "a gap";
    }
    next = part.at + part.count;
  }
  if (counts.found == 0 || next > 0) {
    EXPECT_LE(next, store.next());
  }
}

TEST(BlockStoreTest, RandomStores) {
  std::mt19937 random(1);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  int declined = 0, failed = 0, stopped = 0, urgent_runs = 0, done = 0;
  for (int round = 0; round < 20000; ++round) {
    SCOPED_TRACE(round);
    BlockStore::Options options;
    World world;
    options.first = world.first = below(4);
    options.count = 1 + below(60);
    options.tied = below(3) == 0;
    options.stagings = 1 + below(4);
    options.ranges = options.tied ? options.stagings : options.stagings + below(4);
    options.blocks = 1 + below(16);
    options.ahead = below(2) == 0;
    options.writes = 1 + below(4);
    options.first_blocks = 1 + below(std::min(4u, options.blocks));
    world.slow = 0.2 * below(5);
    if (below(3) == 0) world.present = below(world.first + options.count + 3);
    if (below(6) == 0) world.declined = below(options.count);
    if (below(6) == 0) world.full = below(5);
    if (below(12) == 0) world.fails = below(5);
    if (below(12) == 0) world.begin_fails = below(5);
    if (below(12) == 0) world.gpu_fails = below(5);
    FakeWork work(options, world, random());
    BlockStore store(options, &work);
    BlockStoreSignals signals;
    std::optional<int> stops;
    if (below(4) == 0) stops = below(6);
    absl::StatusOr<BlockStore::State> state = BlockStore::State::kUrgent;
    for (int runs = 0; state.ok() && *state == BlockStore::State::kUrgent; ++runs) {
      ASSERT_LT(runs, 1000);
      if (stops == runs) store.Stop();
      signals.urgent = runs < 6 && below(2) == 0;
      signals.waiting = below(2);
      state = store.Run(signals);
      ++urgent_runs;
    }
    EXPECT_EQ(work.under_way, 0u);
    if (!state.ok()) {
      ++failed;
      EXPECT_TRUE(world.fails || world.begin_fails || world.gpu_fails);
      EXPECT_TRUE(work.drained);
      EXPECT_EQ(store.read(), 1u);
      continue;
    }
    EXPECT_EQ(work.encoded, work.begun.size());
    EXPECT_LE(work.lookups, 1u);
    declined += *state == BlockStore::State::kDeclined;
    done += *state == BlockStore::State::kDone;
    const auto& counts = store.counts();
    EXPECT_LE(counts.found + counts.written + counts.present + counts.full, options.count);
    EXPECT_LE(counts.written_bytes, counts.written * kBlockBytes);
    if (stops.has_value()) {
      ++stopped;
      if (*state == BlockStore::State::kDone) {
        EXPECT_EQ(store.read(), 1u);
      }
      continue;
    }
    ExpectWhole(store, options, world, work, *state);
    if (HasFailure()) return;
  }
  EXPECT_GT(declined, 500);
  EXPECT_GT(failed, 500);
  EXPECT_GT(stopped, 500);
  EXPECT_GT(done, 10000);
  EXPECT_GT(urgent_runs, 22000);
}

TEST(BlockStoreTest, SmallFirstAndLastPartsUnlessOthersWait) {
  const BlockStore::Options options{
      .count = 128, .stagings = 2, .ranges = 7, .blocks = 32, .writes = 4, .first_blocks = 4};
  for (const bool others : {false, true}) {
    FakeWork work(options, {.slow = 0.5}, 1);
    BlockStore store(options, &work);
    BlockStoreSignals signals;
    signals.waiting = others;
    ASSERT_EQ(*store.Run(signals), BlockStore::State::kDone);
    std::vector<uint32_t> counts;
    for (const BlockPart& part : work.begun) counts.push_back(part.count);
    EXPECT_EQ(counts,
              others ? std::vector<uint32_t>({31, 32, 32, 32, 1}) : std::vector<uint32_t>({3, 8, 16, 32, 32, 32, 5}));
  }
}

TEST(BlockStoreTest, NothingIsBegunOnceStopHasReturned) {
  const BlockStore::Options options{.count = 4000, .stagings = 2, .ranges = 4, .writes = 2};
  for (int round = 0; round < 20; ++round) {
    FakeWork work(options, {.slow = 0.5}, round);
    BlockStore store(options, &work);
    std::atomic<bool> running{false};
    std::thread engine([&] {
      while (!running) std::this_thread::yield();
      store.Stop();
      const size_t begun = work.begun.size();  // a race, if anything were begun from now on
      while (store.read() == 0) EXPECT_EQ(work.begun.size(), begun);
    });
    BlockStoreSignals signals;
    running = true;
    EXPECT_EQ(*store.Run(signals), BlockStore::State::kDone);
    engine.join();
    EXPECT_EQ(store.counts().written + store.counts().present, store.next());
  }
}

TEST(BlockStoreTest, WhatIsDeclinedIsLeftToTheCaller) {
  const BlockStore::Options options{
      .count = 40, .stagings = 2, .ranges = 7, .blocks = 8, .writes = 4, .first_blocks = 8};
  FakeWork work(options, {.declined = 20, .slow = 0.5}, 1);
  BlockStore store(options, &work);
  ASSERT_EQ(*store.Run(BlockStoreSignals()), BlockStore::State::kDeclined);
  EXPECT_EQ(store.next(), 15u);
  EXPECT_EQ(store.counts().written + store.counts().present, 15u);
  EXPECT_EQ(store.read(), 0u);
}

}  // namespace
}  // namespace kvmanager::client
