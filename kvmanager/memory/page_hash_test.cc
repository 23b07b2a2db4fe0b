// The pieces of XXH3 that a GPU's threads compute, put together as the kernel does, against the library.
#include "kvmanager/memory/page_hash.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <random>
#include <vector>

#include "kvmanager/memory/page_hash_device.h"
#include "kvmanager/memory/page_hash_secret.h"

namespace kvmanager::page_hash {
namespace {

uint64_t HashInPieces(const uint8_t* data, uint32_t bytes) {
  const uint8_t* const secret = DefaultSecret();
  const uint32_t blocks = (bytes - 1) / kBlockBytes;
  const auto added = [&](const uint8_t* stripe, uint32_t i, uint32_t secret_at) {
    return Added(Load(stripe + 8 * i), Load(stripe + 8 * (i ^ 1)), Load(secret + secret_at + 8 * i));
  };
  uint64_t accumulators[8];
  for (uint32_t i = 0; i < 8; ++i) {
    uint64_t accumulator = Initial(i);
    for (uint32_t block = 0; block < blocks; ++block) {
      uint64_t sum = 0;  // of itself alone
      for (uint32_t stripe = 0; stripe < kBlockStripes; ++stripe) {
        sum += added(data + block * kBlockBytes + stripe * kStripeBytes, i, 8 * stripe);
      }
      accumulator = Scrambled(accumulator + sum, Load(secret + kScrambleAt + 8 * i));
    }
    const uint32_t stripes = (bytes - 1 - blocks * kBlockBytes) / kStripeBytes;
    for (uint32_t stripe = 0; stripe < stripes; ++stripe) {
      accumulator += added(data + blocks * kBlockBytes + stripe * kStripeBytes, i, 8 * stripe);
    }
    accumulators[i] = accumulator + added(data + bytes - kStripeBytes, i, kLastStripeAt);
  }
  return Merged(accumulators, secret, bytes);
}

TEST(PageHash, IsTheLibrarysOfEveryLength) {
  std::mt19937_64 random(1);
  std::vector<uint8_t> data(300000);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  for (uint32_t bytes = kPageHashBytesMin; bytes < 3500; ++bytes) {
    ASSERT_EQ(HashInPieces(data.data(), bytes), XXH3_64bits(data.data(), bytes)) << bytes;
  }
  for (const uint32_t bytes : {48640u, 65536u, 65537u, 131072u, 262144u, 299999u}) {
    EXPECT_EQ(HashInPieces(data.data(), bytes), XXH3_64bits(data.data(), bytes)) << bytes;
  }
}

}  // namespace
}  // namespace kvmanager::page_hash
