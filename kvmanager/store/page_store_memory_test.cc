// What a published block takes beside its pages: the host's own memory, which no option bounds. docs/operating.md says
// these numbers.
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdint>
#include <cstdio>

#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeText;

constexpr int kBlocks = 64;  // of a text
constexpr int kTexts = 64;

class PageStoreMemoryTest : public testing::PageStoreTest {
 protected:
  static size_t Allocated() {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  }
  // Bytes of the heap for each block that nobody uses, of `layers` layers.
  double BytesOfABlock(int layers) {
    test_ = nullptr;
    pool_bytes_ = uint64_t{2} << 30;
    const CacheConfig config = MakeConfig("fake", 0, "a", layers);
    const CacheId cache = test().Open(config);
    const auto publish = [&](uint32_t salt) {
      const testing::Text text = MakeText(kBlocks * kPage, salt);
      const SequenceId sequence = Filled(cache, text, kBlocks * kPage);
      test().executor.FinishAll();
      EXPECT_TRUE(store().Publish(sequence, Names(cache, text, kBlocks)).ok());
      store().Drop(sequence);
      while (store().long_calls().ReleaseSome()) {
      }
    };
    publish(1);  // what is made once
    const size_t before = Allocated();
    for (uint32_t i = 2; i <= kTexts; ++i) publish(1000 * i);
    const size_t after = Allocated();
    EXPECT_EQ(store().caches().Describe(cache)->published_blocks, uint64_t{kTexts} * kBlocks);
    return double(after - before) / ((kTexts - 1) * kBlocks);
  }
};

TEST_F(PageStoreMemoryTest, OfABlockAndOfItsLayers) {
  const double few = BytesOfABlock(2), many = BytesOfABlock(34);
  if (few == 0) GTEST_SKIP() << "this allocator does not say what it has given";
  const double layer = (many - few) / 32, block = few - 2 * layer;
  std::printf("%.0f bytes a block, and %.1f for each of its layers\n", block, layer);
  EXPECT_LE(block, 270);
  EXPECT_LE(layer, 24);
}

}  // namespace
}  // namespace kvmanager
