// Random loads against what must hold of each: the blocks that count are those before the first that is gone, unmapped
// or corrupt.
#include "client/block_load.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace kvmanager::client {
namespace {

struct World {
  uint32_t there = 0;  // blocks of the load, behind which comes `reason`
  Miss reason = Miss::kNotFound;
  std::optional<uint32_t> corrupt;                                          // block
  std::optional<uint32_t> map_fails, copy_fails, gpu_fails, release_fails;  // calls, by number
  double slow = 0.5;                                                        // how likely a copy is not done yet
};

class FakeWork final : public BlockLoadWork {
 public:
  FakeWork(const BlockLoad::Options& options, const World& world, uint32_t seed)
      : options_(options), world_(world), random_(seed) {}
  ~FakeWork() override { EXPECT_EQ(leases, 0); }

  Pending<absl::StatusOr<MappedBlocks>> Map(uint32_t at, uint32_t count) override {
    EXPECT_EQ(at, asked_);
    EXPECT_TRUE(maps_ == 0 || copies_ > 0) << "the first call is answered alone";
    EXPECT_GE(count, 1u);
    EXPECT_LE(count, options_.call_blocks);
    asked_ += count;
    sizes.push_back(count);
    absl::StatusOr<MappedBlocks> result = absl::UnavailableError("the daemon has gone");
    if (maps_++ != world_.map_fails) {
      result.emplace();
      result->blocks = std::min(count, world_.there - std::min(world_.there, at));
      result->reason = result->blocks < count ? world_.reason : Miss::kNone;
      result->bytes = at;  // what the tests know it by
      if (result->blocks > 0) result->lease = std::make_unique<Lease>(this);
    }
    return Soon<absl::StatusOr<MappedBlocks>>(std::move(result));
  }
  absl::Status Copy(const MappedBlocks& mapped, uint32_t at, uint32_t place) override {
    EXPECT_EQ(at, mapped.bytes);
    EXPECT_LT(place, options_.calls);
    EXPECT_TRUE(places_.insert(place).second) << "place " << place << " is in use";
    EXPECT_GT(mapped.blocks, 0u);
    ++under_way;  // also where it fails in the middle
    static_cast<Lease*>(mapped.lease.get())->copied = &copied_done_[copies_];
    if (copies_++ == world_.copy_fails) return absl::ResourceExhaustedError("no memory");
    return absl::OkStatus();
  }
  absl::StatusOr<bool> Copied() override {
    EXPECT_GT(under_way, 0u);
    if (gpu_failed_ |= copied_ == world_.gpu_fails; gpu_failed_) return absl::UnavailableError("the GPU has failed");
    if (std::bernoulli_distribution(world_.slow)(random_)) return false;
    copied_done_[copied_++] = true;
    --under_way;
    return true;
  }
  std::optional<uint32_t> Corrupt(const MappedBlocks& mapped, uint32_t place) const override {
    EXPECT_EQ(places_.count(place), 1u);
    places_.erase(place);
    const uint64_t at = mapped.bytes;
    if (!world_.corrupt.has_value() || *world_.corrupt < at || *world_.corrupt >= at + mapped.blocks)
      return std::nullopt;
    return static_cast<uint32_t>(*world_.corrupt - at);
  }
  void Rest() override {}
  void Drain() override {
    under_way = 0;
    for (auto& [number, done] : copied_done_) done = true;
  }

  std::vector<uint32_t> sizes;
  uint32_t under_way = 0, told_corrupt = 0;
  bool release_failed = false;
  int leases = 0;

 private:
  template <typename T>
  static Pending<T> Soon(T value) {
    struct Call final : Pending<T>::State {
      explicit Call(T value) : value_(std::move(value)) {}
      bool ready() override { return true; }
      T Wait() override { return std::move(value_); }
      T value_;
    };
    return Pending<T>(std::make_unique<Call>(std::move(value)));
  }
  struct Lease final : BlocksLease {
    explicit Lease(FakeWork* of) : of_(*of) { ++of_.leases; }
    ~Lease() override {
      --of_.leases;
      EXPECT_TRUE(copied == nullptr || *copied) << "given back while it is read";
    }
    Pending<absl::Status> ReleaseAsync(std::optional<uint32_t> corrupt) override {
      EXPECT_TRUE(copied != nullptr && *copied) << "given back while it is read";
      of_.told_corrupt += corrupt.has_value();
      of_.release_failed |= of_.releases_ == of_.world_.release_fails;
      return Soon<absl::Status>(of_.releases_++ == of_.world_.release_fails ? absl::UnavailableError("not held")
                                                                            : absl::OkStatus());
    }
    const bool* copied = nullptr;  // of what it holds
    FakeWork& of_;
  };

  const BlockLoad::Options options_;
  const World world_;
  std::mt19937 random_;
  mutable std::set<uint32_t> places_;
  bool gpu_failed_ = false;
  std::map<uint32_t, bool> copied_done_;  // by copy
  uint32_t asked_ = 0, maps_ = 0, copies_ = 0, copied_ = 0, releases_ = 0;
};

TEST(BlockLoadTest, RandomLoads) {
  std::mt19937 random(1);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  int failed = 0, corrupt = 0, short_ = 0, whole = 0;
  for (int round = 0; round < 20000; ++round) {
    SCOPED_TRACE(round);
    BlockLoad::Options options;
    options.count = 1 + below(60);
    options.calls = 1 + below(4);
    options.call_blocks = 1 + below(16);
    options.first_blocks = 1 + below(20);
    World world;
    world.slow = 0.2 * below(5);
    world.there = below(3) == 0 ? below(options.count) : options.count;
    world.reason = below(2) == 0 ? Miss::kNotFound : Miss::kNone;  // kNone: the next may not be mapped
    if (below(4) == 0) world.corrupt = below(options.count);
    if (below(12) == 0) world.map_fails = below(5);
    if (below(12) == 0) world.copy_fails = below(5);
    if (below(12) == 0) world.gpu_fails = below(5);
    if (below(12) == 0) world.release_fails = below(5);
    FakeWork work(options, world, random());
    BlockLoad load(options, &work);
    const absl::Status status = load.Run();
    EXPECT_EQ(work.leases, 0);
    EXPECT_EQ(work.under_way, 0u);
    if (work.release_failed) {
      EXPECT_FALSE(status.ok()) << "what was not held counts";
    }
    if (!status.ok()) {
      ++failed;
      EXPECT_TRUE(world.map_fails || world.copy_fails || world.gpu_fails || world.release_fails);
      continue;
    }
    const bool found = world.corrupt.has_value() && *world.corrupt < world.there;
    EXPECT_EQ(load.blocks(), found ? *world.corrupt : world.there);
    EXPECT_EQ(work.told_corrupt, found ? 1u : 0u);
    EXPECT_EQ(load.reason(), found ? Miss::kChecksum : world.there < options.count ? world.reason : Miss::kNone);
    corrupt += found;
    short_ += !found && world.there < options.count;
    whole += load.blocks() == options.count;
    if (HasFailure()) return;
  }
  EXPECT_GT(failed, 500);
  EXPECT_GT(corrupt, 500);
  EXPECT_GT(short_, 500);
  EXPECT_GT(whole, 5000);
}

TEST(BlockLoadTest, CallsGrow) {
  const BlockLoad::Options options{.count = 300, .calls = 4, .first_blocks = 16, .call_blocks = 100};
  FakeWork work(options, {.there = 300}, 1);
  BlockLoad load(options, &work);
  ASSERT_TRUE(load.Run().ok());
  EXPECT_EQ(work.sizes, (std::vector<uint32_t>{16, 32, 64, 100, 88}));
}

}  // namespace
}  // namespace kvmanager::client
