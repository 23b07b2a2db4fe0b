#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <set>

#include "kvmanager/base/half.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager {
namespace {

// Every half converts to the value its bits say, and back to itself.
TEST(HalfTest, EveryValueRoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float f = HalfToFloat(uint16_t(bits));
    const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(f), fraction != 0);
      EXPECT_EQ(std::isinf(f), fraction == 0);
      if (fraction != 0) continue;
    } else {
      const double want = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      EXPECT_EQ(std::fabs(f), want);
    }
    EXPECT_EQ(FloatToHalf(f), bits);
  }
}

// Between two neighbouring halves the nearer is chosen, and on a tie the even one.
TEST(HalfTest, RoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = HalfToFloat(uint16_t(bits)), high = HalfToFloat(uint16_t(bits + 1)), mid = (low + high) / 2;
    EXPECT_EQ(FloatToHalf(mid), (bits & 1) ? bits + 1 : bits);
    EXPECT_EQ(FloatToHalf(std::nextafter(mid, 0.0f)), bits);
    EXPECT_EQ(FloatToHalf(std::nextafter(mid, 1e9f)), bits + 1);
  }
  EXPECT_EQ(FloatToHalf(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);
}

TEST(BFloat16Test, RoundTripsAndRounds) {
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    EXPECT_EQ(FloatToBFloat16(BFloat16ToFloat(uint16_t(bits))), bits);
    const float mid = std::bit_cast<float>(bits << 16 | 0x8000);
    EXPECT_EQ(FloatToBFloat16(mid), (bits & 1) ? bits + 1 : bits);
  }
  EXPECT_TRUE(std::isnan(BFloat16ToFloat(FloatToBFloat16(std::numeric_limits<float>::quiet_NaN()))));
}

// FIPS 180-2's example, so that keys computed by other programs agree with ours.
TEST(IdsTest, Sha256OfAbc) {
  const uint8_t abc[] = {'a', 'b', 'c'};
  EXPECT_EQ(Sha256(abc).ToHex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

// Names are kept on disks: of tokens as little-endian words, whatever their number.
TEST(IdsTest, TokensAreHashedAsLittleEndianWords) {
  for (const size_t count : {1, 63, 64, 65, 128, 200, 256}) {
    std::vector<uint32_t> tokens(count);
    std::vector<uint8_t> bytes;
    for (size_t i = 0; i < count; ++i) {
      tokens[i] = static_cast<uint32_t>(i * 2654435761u);
      for (const int shift : {0, 8, 16, 24}) bytes.push_back(static_cast<uint8_t>(tokens[i] >> shift));
    }
    EXPECT_EQ(DigestTokens(tokens), Sha256(bytes)) << count;
    BlockKey parent;
    CacheDigest cache;
    parent.bytes[0] = 1;
    cache.bytes[0] = 2;
    bytes.insert(bytes.begin(), cache.bytes.begin(), cache.bytes.end());
    bytes.insert(bytes.begin(), parent.bytes.begin(), parent.bytes.end());
    EXPECT_EQ(ChainBlockKey(parent, cache, tokens), Sha256(bytes)) << count;
  }
}

TEST(IdsTest, KeysChainOverParentCacheAndTokens) {
  std::vector<uint32_t> tokens(200);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = uint32_t(i * 7);
  CacheDigest cache;
  cache.bytes[0] = 1;
  std::vector<BlockName> names, other;
  NameBlocks(cache, tokens, 64, &names);
  ASSERT_EQ(names.size(), 3u);  // 8 tokens are left over
  EXPECT_EQ(names[0].key, ChainBlockKey(BlockKey{}, cache, absl::MakeSpan(tokens).subspan(0, 64)));
  EXPECT_EQ(names[1].key, ChainBlockKey(names[0].key, cache, absl::MakeSpan(tokens).subspan(64, 64)));

  tokens[0] ^= 1;  // changes the first block's tokens, and every key after it
  NameBlocks(cache, tokens, 64, &other);
  EXPECT_NE(other[0].tokens, names[0].tokens);
  EXPECT_EQ(other[1].tokens, names[1].tokens);
  EXPECT_NE(other[1].key, names[1].key);

  tokens[0] ^= 1;
  cache.bytes[0] = 2;  // another cache: no key in common
  NameBlocks(cache, tokens, 64, &other);
  for (size_t i = 0; i < names.size(); ++i) EXPECT_NE(other[i].key, names[i].key);
}

TEST(StatusTest, FieldErrorNamesFieldValueAndBound) {
  const absl::Status status = InvalidField("head_dim", 12, "a multiple of 16");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "head_dim is 12, must be a multiple of 16");
  const ErrorDetail detail = DetailOf(status);
  EXPECT_EQ(detail.field, "head_dim");
  EXPECT_EQ(detail.value, "12");
  EXPECT_EQ(detail.bound, "a multiple of 16");
}

TEST(WorkerPoolTest, RunsEverythingPostedBeforeItEnds) {
  std::atomic<int> ran{0};
  {
    WorkerPool pool(3);
    for (int i = 0; i < 100; ++i) {
      pool.Post(i % 2 ? WorkerPool::Priority::kAttend : WorkerPool::Priority::kEncode, [&ran] { ++ran; });
    }
  }
  EXPECT_EQ(ran, 100);
}

TEST(WorkerPoolTest, AttentionGoesBeforeEncoding) {
  std::vector<char> order;
  {
    WorkerPool pool(1);
    std::mutex gate;
    gate.lock();  // the only worker waits here until both queues are filled
    pool.Post(WorkerPool::Priority::kAttend, [&gate] { std::lock_guard<std::mutex> wait(gate); });
    for (int i = 0; i < 3; ++i) pool.Post(WorkerPool::Priority::kEncode, [&order] { order.push_back('e'); });
    for (int i = 0; i < 3; ++i) pool.Post(WorkerPool::Priority::kAttend, [&order] { order.push_back('a'); });
    gate.unlock();
  }
  EXPECT_EQ(std::string(order.begin(), order.end()), "aaaeee");
}

TEST(WorkerPoolTest, EncodingIsNotStarved) {
  std::string order;
  {
    WorkerPool pool(1);
    std::mutex gate;
    gate.lock();
    pool.Post(WorkerPool::Priority::kAttend, [&gate] { std::lock_guard<std::mutex> wait(gate); });
    for (int i = 0; i < 2; ++i) pool.Post(WorkerPool::Priority::kEncode, [&order] { order += 'e'; });
    for (int i = 0; i < 3 * WorkerPool::kAttendRunMax; ++i) {
      pool.Post(WorkerPool::Priority::kAttend, [&order] { order += 'a'; });
    }
    gate.unlock();
  }
  const std::string run(WorkerPool::kAttendRunMax, 'a');
  // The task at the gate may count among the first run.
  EXPECT_EQ(order.substr(order.find('e')), "e" + run + "e" + order.substr(order.rfind('e') + 1));
  EXPECT_LE(order.find('e'), run.size());
}

}  // namespace
}  // namespace kvmanager
