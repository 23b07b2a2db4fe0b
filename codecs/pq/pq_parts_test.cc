// Parameters and budgets, the cost model, and the block cache against a model.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "codecs/pq/block_cache.h"
#include "codecs/pq/cost_model.h"
#include "codecs/pq/pq_parameters.h"
#include "codecs/pq/pq_selects.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager::pq {
namespace {

absl::StatusOr<Parameters> Parse(const std::string& text) {
  const absl::StatusOr<CodecSpec> spec = ParseCodecSpec(text);
  PageLayout layout;
  layout.head_dim = 128;
  return ParseParameters(layout, spec->parameters);
}

TEST(Parameters, AreWrittenInAFixedOrderAndReadBack) {
  const char* const kCanonical =
      "pq:m=2,bits=6,ratio=0.2,sinks=16,scores=exact,iterations=12,rebuild=256,cache_blocks=9,cache_policy=lru";
  EXPECT_EQ(Parse(kCanonical)->Spec(), kCanonical);
  EXPECT_EQ(Parse("pq:ratio=0.10")->Spec(),
            "pq:m=4,bits=8,ratio=0.1,sinks=32,scores=codes,iterations=auto,rebuild=0,cache_blocks=0,cache_policy=lfu");
  EXPECT_EQ(Parse("pq:ratio=1")->ratio_millionths, 1000000u);
}

TEST(Parameters, RefuseWhatIsOutOfRange) {
  for (const char* const text : {"pq:m=3",
                                 "pq:m= 4",
                                 "pq:m=0",
                                 "pq:m=64",
                                 "pq:bits=3",
                                 "pq:bits=9",
                                 "pq:ratio=0",
                                 "pq:ratio=1.1",
                                 "pq:ratio=0.0000001",
                                 "pq:ratio=x",
                                 "pq:ratio=-0.1",
                                 "pq:sinks=65537",
                                 "pq:scores=best",
                                 "pq:iterations=0",
                                 "pq:iterations=301",
                                 "pq:rebuild=63",
                                 "pq:cache_blocks=65537",
                                 "pq:cache_policy=fifo",
                                 "pq:k=1",
                                 "pq:bits=8x"}) {
    const absl::StatusOr<Parameters> parsed = Parse(text);
    EXPECT_TRUE(absl::IsInvalidArgument(parsed.status())) << text;
    EXPECT_FALSE(DetailOf(parsed.status()).bound.empty()) << text;
  }
}

/// reference.py, pqcache: masks over positions.
void ExpectReads(const Parameters& p, uint64_t position) {
  const double ratio = p.ratio_millionths / 1e6;
  const double beyond = std::max(double(position + 1) - p.sinks, 0.0);
  const uint64_t budget = uint64_t(std::max(std::floor(beyond * ratio / 2 + 1e-9), 1.0));
  uint64_t sinks = 0, middle = 0, local = 0;
  for (uint64_t j = 0; j <= position; ++j) {
    const bool is_local = position - j < budget, is_sink = j < p.sinks;
    sinks += is_sink;
    local += is_local && !is_sink;
    middle += !is_local && !is_sink;
  }
  const Parameters::Reads reads = p.ReadsOf(position);
  EXPECT_EQ(p.Budget(position), budget);
  EXPECT_EQ(reads.sinks, sinks);
  EXPECT_EQ(position + 1 - reads.local_begin, local);
  EXPECT_EQ(reads.local_begin - reads.sinks, middle);
  EXPECT_EQ(reads.chosen, std::min(budget, middle));
  EXPECT_LE(reads.total(position), position + 1);
}

TEST(Parameters, ReadSinksChosenAndLocalAsTheReferenceDoes) {
  for (const char* const text :
       {"pq:ratio=0.1,sinks=32", "pq:ratio=0.2,sinks=0", "pq:ratio=1,sinks=5", "pq:ratio=0.000001"}) {
    const Parameters p = *Parse(text);
    for (uint64_t position = 0; position < 700; ++position) ExpectReads(p, position);
    ExpectReads(p, 32767);
  }
}

TEST(CostModel, FitsWhatItWasTold) {
  CostModel model;
  EXPECT_EQ(model.Iterations(1000), CostModel::kIterationsUnmeasured);
  for (const double s : {1000.0, 2000.0, 8000.0, 32000.0}) {
    model.AddPrefill(uint64_t(s), 0.001 + 2e-6 * s + 1e-9 * s * s);
    for (const double t : {3.0, 20.0}) model.AddClustering(uint64_t(s), t, 0.002 + 1e-7 * s * t);
  }
  for (const double s : {1500.0, 16000.0, 25000.0}) {
    const double wanted = (1e-9 * s * s + 2e-6 * s + 0.001 - 0.002) / (1e-7 * s);
    EXPECT_NEAR(model.Iterations(uint64_t(s)), wanted, 1.5) << s;
  }
  EXPECT_EQ(model.Iterations(100), 3u);        // clipped below
  EXPECT_EQ(model.Iterations(1000000), 300u);  // and above
}

TEST(CostModel, OneMeasurementOfEachIsEnough) {
  CostModel model;
  model.AddPrefill(4096, 0.4);
  EXPECT_EQ(model.Iterations(4096), CostModel::kIterationsUnmeasured);
  model.AddClustering(4096, 10, 0.1);
  EXPECT_NEAR(model.Iterations(4096), 40, 1);
  // Times that fall with size, as noise makes them, give no negative costs.
  model.AddPrefill(8192, 0.1);
  model.AddClustering(8192, 10, 0.01);
  const uint32_t iterations = model.Iterations(100000);
  EXPECT_GE(iterations, 3u);
  EXPECT_LE(iterations, 300u);
}

/// The cache's rules, readably.
struct ModelCache {
  struct Entry {
    uint64_t uses = 0, last_call = 0;
  };
  size_t blocks;
  bool lfu;
  uint64_t call = 0;
  std::map<uint64_t, Entry> in;

  void Update(const std::vector<BlockCache::Use>& uses, BlockCache::Counts* counts) {
    ++call;
    std::vector<BlockCache::Use> ranked;
    for (const BlockCache::Use& use : uses) {
      if (in.count(use.block) != 0) {
        counts->hits += use.tokens;
        ++in[use.block].uses;
        in[use.block].last_call = call;
      } else {
        counts->misses += use.tokens;
      }
      if (use.may_enter) ranked.push_back(use);
    }
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
      return a.tokens != b.tokens ? a.tokens > b.tokens : a.block < b.block;
    });
    ranked.resize(std::min(ranked.size(), blocks));
    const auto wanted = [&](uint64_t block) {
      return std::any_of(ranked.begin(), ranked.end(), [&](const auto& use) { return use.block == block; });
    };
    for (const BlockCache::Use& use : ranked) {
      if (in.count(use.block) != 0) continue;
      if (in.size() == blocks) {
        auto victim = in.end();
        for (auto it = in.begin(); it != in.end(); ++it) {
          if (wanted(it->first)) continue;
          const auto rank = [&](const Entry& e) {
            return lfu ? std::pair(e.uses, e.last_call) : std::pair(e.last_call, uint64_t{0});
          };
          if (victim == in.end() || rank(it->second) < rank(victim->second)) victim = it;
        }
        ASSERT_NE(victim, in.end());
        in.erase(victim);
        ++counts->evictions;
      }
      in[use.block] = {1, call};
    }
  }
};

TEST(BlockCache, KeepsWhatItsPolicySays) {
  for (const auto policy : {Parameters::CachePolicy::kLfu, Parameters::CachePolicy::kLru}) {
    for (const uint32_t blocks : {1, 2, 7, 32}) {
      std::mt19937 random(blocks);
      BlockCache cache(blocks, 16, policy);
      ModelCache model{blocks, policy == Parameters::CachePolicy::kLfu, 0, {}};
      BlockCache::Counts counts, wanted;
      for (int call = 0; call < 2000; ++call) {
        std::vector<BlockCache::Use> uses;
        for (uint64_t block = 0; block < 50; ++block) {
          // Low blocks are hot.
          if (random() % 50 < block) continue;
          uses.push_back({block, 1 + uint32_t(random() % 5), random() % 10 != 0});
        }
        ASSERT_TRUE(cache.TryLock());
        EXPECT_FALSE(cache.TryLock());
        cache.Update(
            uses, [](uint64_t block, uint8_t* to) { std::fill_n(to, 16, uint8_t(block)); }, &counts);
        cache.Unlock();
        model.Update(uses, &wanted);
        ASSERT_EQ(counts.hits, wanted.hits);
        ASSERT_EQ(counts.misses, wanted.misses);
        ASSERT_EQ(counts.evictions, wanted.evictions);
        for (uint64_t block = 0; block < 50; ++block) {
          const uint8_t* copy = cache.Find(block);
          ASSERT_EQ(copy != nullptr, model.in.count(block) == 1) << block << " after call " << call;
          if (copy != nullptr) {
            EXPECT_EQ(copy[15], block);
          }
        }
      }
      EXPECT_GT(counts.hits, 0u);
    }
  }
}

TEST(Selects, ReadsAreTheParameters) {
  Parameters parameters;
  for (const uint32_t sinks : {0u, 32u, 500u}) {
    parameters.sinks = sinks;
    for (const uint64_t position : {0, 1, 31, 32, 33, 100, 4095, 100000}) {
      DeviceSelect s;
      SetReads(parameters, position, &s);
      EXPECT_EQ(s.sinks + s.middle + s.local, position + 1);
      EXPECT_EQ(s.rows(), parameters.ReadsOf(position).total(position));
      EXPECT_LE(s.chosen, s.middle);
      EXPECT_GE(s.rows(), 1u);
    }
  }
}

TEST(Selects, ListsBeyond32BitsAreRefused) {
  DeviceShape shape;
  shape.kv_heads = 3, shape.page_tokens = 64;
  DeviceSelect huge;
  huge.local = 1u << 31;
  std::vector<DeviceSelect> queries(3, huge);
  EXPECT_EQ(PlaceSelects(shape, absl::MakeSpan(queries)).status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace kvmanager::pq
