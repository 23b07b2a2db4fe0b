// Whether a tenant can tell by the time that a call takes which names another tenant has.
//
// Tenant B asks for names, prefixes and caches of A's that exist and for others that do not, in random order, and the
// two samples of times are compared by a rank-sum test (Mann and Whitney, Annals of Mathematical Statistics 18, 1947;
// normal approximation). Calls are ranked among the calls made shortly before and after alone, and the sums of all such
// strata are added (van Elteren, Bulletin of the International Statistical Institute 37, 1960): what else the machine
// does makes calls slower for a while, and this must not hide a difference. For the same reason no CPU sleeps
// meanwhile: to wake one takes a virtual machine 100 us and more. A difference counts if |z| > 4 in each of three
// tries: by chance that is once in 10^13 runs. That such a difference would be seen is tested beside it: B's own names,
// and a delay of 3 us.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/two_tenants.h"

namespace kvmanager::testing {
namespace {

/// While it lives, no CPU sleeps: one has a thread of the lowest class, which anything else takes it from at once.
class AwakeCpus {
 public:
  AwakeCpus() {
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
      threads_.emplace_back([this] {
        const sched_param none{};
        if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) return;
        while (!ends_.load(std::memory_order_relaxed)) {
        }
      });
    }
  }
  ~AwakeCpus() {
    ends_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  AwakeCpus(const AwakeCpus&) = delete;
  AwakeCpus& operator=(const AwakeCpus&) = delete;

 private:
  std::atomic<bool> ends_{false};
  std::vector<std::thread> threads_;
};

/// One call: how long it took, and whether what it asked for exists.
struct Sample {
  int64_t ns;
  bool exists;
};
using Samples = std::vector<Sample>;  // in the order of the calls

constexpr size_t kSamples = 4000;  // of each kind
constexpr size_t kWarmUp = 200;
constexpr size_t kStratum = 100;  // calls in a row, of both kinds
constexpr double kDiffers = 4;
constexpr int kTries = 3;
constexpr int64_t kDelayNs = 3000;

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Spin(int64_t ns) {
  for (const int64_t until = NowNs() + ns; NowNs() < until;) {
  }
}

/// The sum of the ranks of those that exist, less what is expected if both kinds have one distribution, and its
/// variance.
struct RankSum {
  double excess, variance;
};

RankSum RankSumOf(Samples samples) {
  std::sort(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) { return a.ns < b.ns; });
  double ranks = 0, ties = 0, existing = 0;
  for (size_t begin = 0, end; begin < samples.size(); begin = end) {
    double of_existing = 0;
    for (end = begin; end < samples.size() && samples[end].ns == samples[begin].ns; ++end) {
      of_existing += samples[end].exists ? 1 : 0;
    }
    const double equal = double(end - begin);
    ranks += of_existing * (double(begin + 1) + double(end)) / 2;
    ties += equal * (equal * equal - 1);
    existing += of_existing;
  }
  const double sum = double(samples.size()), missing = sum - existing;
  if (existing == 0 || missing == 0) return {0, 0};
  return {ranks - existing * (sum + 1) / 2, existing * missing / 12 * (sum + 1 - ties / (sum * (sum - 1)))};
}

/// How many standard deviations those that exist are slower than the others, with van Elteren's weights.
double SlowerBy(const Samples& samples) {
  double excess = 0, variance = 0;
  for (size_t begin = 0; begin < samples.size(); begin += kStratum) {
    const size_t end = std::min(begin + kStratum, samples.size());
    const RankSum stratum = RankSumOf({samples.begin() + ptrdiff_t(begin), samples.begin() + ptrdiff_t(end)});
    const double weight = 1 / double(end - begin + 1);
    excess += weight * stratum.excess;
    variance += weight * weight * stratum.variance;
  }
  return variance > 0 ? excess / std::sqrt(variance) : 0;
}

double MedianUs(const Samples& samples, bool exists) {
  std::vector<int64_t> ns;
  for (const Sample& sample : samples) {
    if (sample.exists == exists) ns.push_back(sample.ns);
  }
  std::nth_element(ns.begin(), ns.begin() + ptrdiff_t(ns.size() / 2), ns.end());
  return double(ns[ns.size() / 2]) / 1000;
}

/// The order in which `each` of both kinds are asked for.
std::vector<bool> Shuffled(size_t each, std::mt19937_64* random) {
  std::vector<bool> kinds(2 * each);
  std::fill(kinds.begin(), kinds.begin() + ptrdiff_t(each), true);
  std::shuffle(kinds.begin(), kinds.end(), *random);
  return kinds;
}

/// A call, which is given the kind and how many of it came before.
using Call = std::function<void(bool exists, size_t i)>;

Samples Measure(const Call& call, std::mt19937_64* random) {
  Samples samples;
  size_t asked[2] = {0, 0};
  for (const size_t each : {kWarmUp, kSamples}) {
    samples.clear();
    for (const bool exists : Shuffled(each, random)) {
      const size_t i = asked[exists]++;
      const int64_t begin = NowNs();
      call(exists, i);
      samples.push_back({NowNs() - begin, exists});
    }
  }
  return samples;
}

double Show(const char* what, const Samples& samples) {
  const double z = SlowerBy(samples);
  std::printf("%-34s z %+7.2f   median of existing %8.2f us, of missing %8.2f us, %zu calls\n", what, z,
              MedianUs(samples, true), MedianUs(samples, false), samples.size());
  return z;
}

/// In how many of three tries they differ; no more are made than decide it.
int Differences(const char* what, const std::function<Samples()>& measure) {
  int differences = 0;
  for (int i = 0; i < kTries; ++i) {
    if (std::abs(Show(what, measure())) <= kDiffers) break;
    ++differences;
  }
  return differences;
}

TEST(RankSum, IsThatOfTheBook) {
  // By hand: ranks 1, 2, 4 of those that exist, sum 7; expected 10.5, variance 3 * 3 * 7 / 12.
  const RankSum sum = RankSumOf({{1, true}, {3, false}, {2, true}, {5, false}, {4, true}, {6, false}});
  EXPECT_NEAR(sum.excess, -3.5, 1e-9);
  EXPECT_NEAR(sum.variance, 5.25, 1e-9);
  const RankSum ties = RankSumOf({{5, true}, {5, true}, {5, true}, {5, false}, {5, false}, {6, false}});
  EXPECT_NEAR(ties.excess, -1.5, 1e-9);
  EXPECT_NEAR(ties.variance, 0.75 * (7 - 120.0 / 30), 1e-9);
}

TEST(RankSum, ADelayIsSeenWhileTheMachineIsSlowAtTimes) {
  std::mt19937_64 random(7);
  std::exponential_distribution<double> times(1e-4);
  const auto measure = [&](int64_t delay_ns) {
    Samples samples;
    for (const bool exists : Shuffled(kSamples, &random)) {
      const int64_t slow_ns = samples.size() / 500 % 2 == 1 ? 100'000 : 0;
      samples.push_back({slow_ns + int64_t(times(random)) + (exists ? delay_ns : 0), exists});
    }
    return samples;
  };
  EXPECT_LT(std::abs(SlowerBy(measure(0))), kDiffers);
  EXPECT_GT(SlowerBy(measure(kDelayNs)), kDiffers);
}

class TenantTimingTest : public TwoTenantsTest {
 protected:
  static constexpr uint32_t kSequences = 64;
  static constexpr int kBlocks = 4;

  void SetUp() override {
    TwoTenantsTest::SetUp();
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed_));
    ASSERT_OK_AND_ASSIGN(daemon_, Start({"--threads", "1"}));
    ASSERT_OK_AND_ASSIGN(a_, Client::Connect(daemon_->listen(), {}));
    // Another user where this can be one, else another tenant of this one.
    if (getuid() == 0) {
      ASSERT_OK_AND_ASSIGN(b_, ConnectAs(kBob, daemon_->listen()));
    } else {
      ASSERT_OK_AND_ASSIGN(b_, Client::Connect(daemon_->listen(), {}));
    }
    ASSERT_OK_AND_ASSIGN(cache_a_, a_->OpenCache(Options("a")));
    ASSERT_OK_AND_ASSIGN(cache_b_, b_->OpenCache(Options("b")));
    PublishAll(*cache_a_, "a", &names_a_);
    PublishAll(*cache_b_, "b", &names_b_);
    for (uint32_t i = 0; i < kSequences; ++i) {
      nobodys_.push_back(Names(*cache_a_, Source{1000 + i, Kind::kNormal, Options("a")}, kBlocks));
    }
    ASSERT_EQ(Hits(*cache_a_, names_a_[0]), kBlocks);
    ASSERT_EQ(Hits(*cache_b_, names_b_[0]), kBlocks);
    ASSERT_EQ(Hits(*cache_b_, names_a_[0]), 0);
  }

  using Prefixes = std::vector<std::vector<BlockName>>;

  static void PublishAll(Cache& cache, const std::string& tenant, Prefixes* names) {
    for (uint32_t i = 0; i < kSequences; ++i) {
      const Source source{i + 1, Kind::kNormal, Options(tenant)};
      names->push_back(Names(cache, source, kBlocks));
      Publish(cache, source, names->back());
    }
  }
  Call Match(const Prefixes& existing) {
    return [this, &existing](bool exists, size_t i) {
      EXPECT_OK(cache_b_->Match({{(exists ? existing : nobodys_)[i % kSequences]}}));
    };
  }
  Call CreateSequences(const Prefixes& existing) {
    return [this, &existing](bool exists, size_t i) {
      EXPECT_OK(cache_b_->CreateSequence((exists ? existing : nobodys_)[i % kSequences]));
    };
  }
  int Differs(const char* what, const Call& call) {
    return Differences(what, [&] { return Measure(call, &random_); });
  }

  const uint64_t seed_ = std::random_device()();
  std::mt19937_64 random_{seed_};
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> a_, b_;
  std::unique_ptr<Cache> cache_a_, cache_b_;
  Prefixes names_a_, names_b_, nobodys_;
  AwakeCpus awake_;
};

TEST_F(TenantTimingTest, AMatchDoesNotTellAnothersNames) {
  EXPECT_LT(Differs("match, A's names", Match(names_a_)), kTries);
  EXPECT_EQ(Differs("match, B's own names", Match(names_b_)), kTries) << "this test sees nothing";
}

TEST_F(TenantTimingTest, APrefixDoesNotTellAnothersNames) {
  EXPECT_LT(Differs("createSequences, A's prefixes", CreateSequences(names_a_)), kTries);
  EXPECT_EQ(Differs("createSequences, B's own prefixes", CreateSequences(names_b_)), kTries)
      << "this test sees nothing";
}

TEST_F(TenantTimingTest, ADelayOfThreeMicrosecondsIsSeen) {
  const Call match = Match(names_a_);
  const Call delayed = [&](bool exists, size_t i) {
    match(exists, i);
    if (exists) Spin(kDelayNs);
  };
  EXPECT_EQ(Differs("match, A's names and 3 us", delayed), kTries);
}

// A opens a thousand models' caches, and holds each; B opens these models and others, for the first time each: what it
// has opened before is purged between.
TEST_F(TenantTimingTest, OpeningACacheDoesNotTellAnothersModels) {
  constexpr size_t kModels = 1000, kRounds = 2;
  const auto model = [](bool exists, size_t i) {
    CacheOptions options = Options("x");
    options.model = absl::StrCat(exists ? "exists-" : "nobody-", 100000 + i);
    return options;
  };
  std::vector<CreatedSequence> held;
  for (size_t i = 0; i < kModels; ++i) {
    ASSERT_OK_AND_ASSIGN(auto cache, a_->OpenCache(model(true, i)));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    held.push_back(std::move(made));
  }
  size_t nobodys = 0;
  // Adds the times of `each` models of either kind; one: the existing one is always the same.
  const auto add_round = [&](size_t each, bool one, Samples* samples) {
    size_t existing = 0;
    for (const bool exists : Shuffled(each, &random_)) {
      const CacheOptions options = model(exists, exists ? (one ? 0 : existing++) : nobodys++);
      const int64_t begin = NowNs();
      EXPECT_OK(b_->OpenCache(options));
      samples->push_back({NowNs() - begin, exists});
    }
    EXPECT_OK(a_->Purge(Client::kAllCaches));
  };
  const auto measure = [&](bool one) {
    return [&, one] {
      Samples samples;
      add_round(kWarmUp, one, &samples);
      samples.clear();
      for (size_t i = 0; i < kRounds; ++i) add_round(kModels, one, &samples);
      return samples;
    };
  };
  EXPECT_LT(Differences("openCache, A's models", measure(false)), kTries);
  EXPECT_EQ(Differences("openCache, what B has open", measure(true)), kTries) << "this test sees nothing";
}

}  // namespace
}  // namespace kvmanager::testing
