// What a query reads depends neither on how its tokens were chunked nor on when encoding ended.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "kvmanager/store/store_testing.h"
#include "xxhash.h"

namespace kvmanager {
namespace {

using testing::MakeConfig;
using testing::TestStore;
using testing::Text;

// What each query of a prompt and of some decode steps reads, as attention decides it from a lease's pages.
struct Chunking {
  uint64_t seed;
  bool run_inline;
  int chunk_tokens_max;
};

std::vector<uint64_t> Views(const std::string& codec, int lag_pages, const Chunking& chunking) {
  std::mt19937_64 random(chunking.seed);
  TestStore test(8 << 20);
  test.executor.run_inline = chunking.run_inline;
  const CacheConfig config = MakeConfig(codec, lag_pages);
  const CacheId cache = test.Open(config);
  const SequenceId sequence = test.store->Create(cache, {})->sequence;
  const int page_tokens = config.layout.page_tokens;
  constexpr int kTokens = 123;
  Text text;
  for (int i = 0; i < kTokens; ++i) text.Add(static_cast<uint32_t>(i * i % 97));
  std::vector<uint64_t> views;
  for (int at = 0; at < kTokens;) {
    const int tokens = std::min<int>(kTokens - at, static_cast<int>(1 + random() % chunking.chunk_tokens_max));
    for (int layer = 0; layer < config.layers; ++layer) {
      EXPECT_TRUE(test.Append(cache, sequence, text, at, tokens, layer).ok());
      const AttendEntry entry{sequence, static_cast<uint64_t>(at), tokens};
      auto lease = test.store->Attend(cache, layer, {&entry, 1});
      EXPECT_TRUE(lease.ok());
      while (!(*lease)->ready()) test.executor.FinishOne(random() % test.executor.jobs());
      const auto pages = (*lease)->pages(0);
      for (int t = 0; t < tokens; ++t) {
        const int position = at + t, page = position / page_tokens;
        uint64_t view = layer;
        for (int i = 0; i <= page; ++i) {
          const bool in_lag = page - i <= lag_pages;
          const bool raw = (pages[i].lag_applies && in_lag) || pages[i].encoded == nullptr;
          const uint8_t* bytes = raw ? pages[i].raw : pages[i].encoded;
          EXPECT_NE(bytes, nullptr);
          const int seen = i < page ? page_tokens : position % page_tokens + 1;
          const size_t size = raw ? size_t(seen) * config.layout.head_dim * 2
                                  : test.store->caches().codec(cache)->info().page_bytes(layer);
          view = XXH3_64bits_withSeed(bytes, size, view * 2 + raw);
        }
        views.push_back(view ^ XXH3_64bits(&position, sizeof position));
      }
    }
    at += tokens;
  }
  test.store->report().CheckInvariants();
  std::sort(views.begin(), views.end());
  return views;
}

TEST(PageStoreViews, DependNeitherOnChunksNorOnEncodingTime) {
  for (const std::string codec : {"fake", "declining", "uneven", "raw"}) {
    for (int lag_pages : {0, 1, 3}) {
      SCOPED_TRACE(::testing::Message() << codec << " lag " << lag_pages);
      const auto expected = Views(codec, lag_pages, {1, true, 1});
      for (uint64_t seed = 2; seed < 6; ++seed) {
        const int chunk_tokens_max = std::array<int, 4>{1, 7, 40, 123}[seed % 4];
        EXPECT_EQ(Views(codec, lag_pages, {seed, seed % 3 == 0, chunk_tokens_max}), expected) << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager
