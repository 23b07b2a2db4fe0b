// Whether a tenant can tell by the time that a call takes which names another tenant has.
//
// Tenant B asks for names, prefixes and caches of A's that exist and for others that do not, in random order, and the
// two samples of times are compared by a rank-sum test (Mann and Whitney, Annals of Mathematical Statistics 18, 1947;
// normal approximation). A difference counts if |z| > 4 in each of three tries: by chance that is once in 10^13 runs.
// That such a difference would be seen is tested beside it: B's own names, and a delay of 3 us.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/two_tenants.h"

namespace kvmanager::testing {
namespace {

using Nanoseconds = std::vector<int64_t>;

constexpr size_t kSamples = 2000;  // of each kind
constexpr size_t kWarmUp = 200;
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

/// How many standard deviations the ranks of `a` are above what they would be if both came from one distribution.
double RankSumZ(const Nanoseconds& a, const Nanoseconds& b) {
  std::vector<std::pair<int64_t, bool>> all;  // of a?
  for (const int64_t ns : a) all.emplace_back(ns, true);
  for (const int64_t ns : b) all.emplace_back(ns, false);
  std::sort(all.begin(), all.end());
  double ranks_of_a = 0, ties = 0;
  for (size_t begin = 0, end; begin < all.size(); begin = end) {
    end = begin;
    double of_a = 0;
    while (end < all.size() && all[end].first == all[begin].first) of_a += all[end++].second ? 1 : 0;
    const double equal = double(end - begin);
    ranks_of_a += of_a * (double(begin + 1) + double(end)) / 2;
    ties += equal * (equal * equal - 1);
  }
  const double n = double(a.size()), m = double(b.size()), sum = n + m;
  const double variance = n * m / 12 * (sum + 1 - ties / (sum * (sum - 1)));
  return (ranks_of_a - n * (sum + 1) / 2) / std::sqrt(variance);
}

int64_t Median(Nanoseconds ns) {
  std::nth_element(ns.begin(), ns.begin() + ptrdiff_t(ns.size() / 2), ns.end());
  return ns[ns.size() / 2];
}

/// The order in which `each` of both kinds are asked for.
std::vector<bool> Shuffled(size_t each, std::mt19937_64* random) {
  std::vector<bool> kinds(2 * each);
  std::fill(kinds.begin(), kinds.begin() + ptrdiff_t(each), true);
  std::shuffle(kinds.begin(), kinds.end(), *random);
  return kinds;
}

/// Times of `call`, which is given the kind and how many of it came before.
struct Times {
  Nanoseconds existing, missing;
  void Add(bool exists, int64_t ns) { (exists ? existing : missing).push_back(ns); }
};
using Call = std::function<void(bool exists, size_t i)>;

Times Measure(const Call& call, std::mt19937_64* random) {
  Times times;
  size_t asked[2] = {0, 0};
  for (const size_t each : {kWarmUp, kSamples}) {
    times = {};
    for (const bool exists : Shuffled(each, random)) {
      const size_t i = asked[exists]++;
      const int64_t begin = NowNs();
      call(exists, i);
      times.Add(exists, NowNs() - begin);
    }
  }
  return times;
}

double Show(const char* what, const Times& times) {
  const double z = RankSumZ(times.existing, times.missing);
  std::printf("%-34s z %+7.2f   median of existing %8.2f us, of missing %8.2f us, %zu and %zu calls\n", what, z,
              double(Median(times.existing)) / 1000, double(Median(times.missing)) / 1000, times.existing.size(),
              times.missing.size());
  return z;
}

/// In how many of three tries they differ; no more are made than decide it.
int Differences(const char* what, const std::function<Times()>& measure) {
  int differences = 0;
  for (int i = 0; i < kTries; ++i) {
    if (std::abs(Show(what, measure())) <= kDiffers) break;
    ++differences;
  }
  return differences;
}

TEST(RankSum, IsThatOfTheBook) {
  // By hand: ranks 1, 2, 4 of a, sum 7; expected 10.5, variance 3 * 3 * 7 / 12.
  EXPECT_NEAR(RankSumZ({1, 2, 4}, {3, 5, 6}), -3.5 / std::sqrt(5.25), 1e-9);
  EXPECT_NEAR(RankSumZ({5, 5, 5}, {5, 5, 6}), -1.5 / std::sqrt(0.75 * (7 - 120.0 / 30)), 1e-9) << "ties";
  std::mt19937_64 random(7);
  std::exponential_distribution<double> times(1e-4);
  Nanoseconds a, b, later;
  for (size_t i = 0; i < kSamples; ++i) {
    a.push_back(int64_t(times(random)));
    b.push_back(int64_t(times(random)));
    later.push_back(int64_t(times(random)) + kDelayNs);
  }
  EXPECT_LT(std::abs(RankSumZ(a, b)), kDiffers);
  EXPECT_GT(RankSumZ(later, a), kDiffers);
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
  constexpr size_t kModels = kSamples / 2;
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
  const auto add_round = [&](size_t each, bool one, Times* times) {
    size_t existing = 0;
    for (const bool exists : Shuffled(each, &random_)) {
      const CacheOptions options = model(exists, exists ? (one ? 0 : existing++) : nobodys++);
      const int64_t begin = NowNs();
      EXPECT_OK(b_->OpenCache(options));
      times->Add(exists, NowNs() - begin);
    }
    EXPECT_OK(a_->Purge(Client::kAllCaches));
  };
  const auto measure = [&](bool one) {
    return [&, one] {
      Times times;
      add_round(kWarmUp, one, &times);
      times = {};
      while (times.existing.size() < kSamples) add_round(kModels, one, &times);
      return times;
    };
  };
  EXPECT_LT(Differences("openCache, A's models", measure(false)), kTries);
  EXPECT_EQ(Differences("openCache, what B has open", measure(true)), kTries) << "this test sees nothing";
}

}  // namespace
}  // namespace kvmanager::testing
