// Pages that a sampler looks at keep both forms until it has done.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeEncodedPage;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::TestDevice;
using testing::Text;

class Sampler final : public PageSampler {
 public:
  bool Wants(CacheId, uint32_t layer) override {
    ++asked;
    return layer == 1;
  }
  void Compare(const PageSample& page, absl::AnyInvocable<void()> done) override {
    pages.push_back(page);
    if (at_once) {
      done();
    } else {
      waiting.push_back(std::move(done));
    }
  }
  void FinishAll() {
    for (auto& done : std::exchange(waiting, {})) done();
  }

  int asked = 0;
  bool at_once = false;
  std::vector<PageSample> pages;
  std::vector<absl::AnyInvocable<void()>> waiting;
};

class SampleTest : public PageStoreTest {
 protected:
  ~SampleTest() override { test_.reset(); }
  // The i-th sample is page i of `text`, in both forms.
  void ExpectPages(const Text& text, size_t pages) {
    ASSERT_EQ(sampler_.pages.size(), pages);
    for (uint32_t i = 0; i < pages; ++i) {
      const PageSample& sample = sampler_.pages[i];
      EXPECT_EQ(sample.layer, 1u);
      const auto raw = MakeRawPage(sample.codec->layout(), text, i, kPage, 1);
      const auto encoded = MakeEncodedPage(*sample.codec, raw, i, 1);
      EXPECT_TRUE(std::equal(raw.begin(), raw.end(), sample.raw));
      EXPECT_TRUE(std::equal(encoded.begin(), encoded.end(), sample.encoded));
    }
  }
  Sampler sampler_;  // outlives the store
};

TEST_F(SampleTest, BothFormsStayUntilItIsDone) {
  store().report().SetSampler(&sampler_);
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(3 * kPage + 1);
  const SequenceId sequence = Filled(cache, text, 3 * kPage);
  ASSERT_TRUE(test().AppendAll(cache, sequence, text, 3 * kPage, 1).ok());
  test().executor.FinishAll();
  EXPECT_EQ(sampler_.asked, 6);
  ExpectPages(text, 3);
  EXPECT_EQ(sampler_.pages[0].cache, cache);
  EXPECT_EQ(sampler_.pages[0].digest, store().caches().Describe(cache)->digest);
  store().report().CheckInvariants();
  // The other layer's raw forms are gone, and these go in the end.
  const uint64_t used = test().pool->used_bytes();
  sampler_.FinishAll();
  store().report().CheckInvariants();
  EXPECT_EQ(used - test().pool->used_bytes(), 3 * store().caches().codec(cache)->layout().raw_bytes());
}

TEST_F(SampleTest, TheSequenceAndItsCacheMayGo) {
  store().report().SetSampler(&sampler_);
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  const Text text = MakeText(2 * kPage);
  const SequenceId sequence = Filled(cache, text, 2 * kPage);
  test().executor.FinishAll();
  store().Drop(sequence);
  store().caches().PurgeAll();
  store().report().CheckInvariants();
  ExpectPages(text, 2);
  EXPECT_GT(test().pool->used_bytes(), 0u);
  sampler_.FinishAll();
  store().report().CheckInvariants();
  EXPECT_EQ(test().pool->used_bytes(), 0u);
  // What is published is not evicted meanwhile, and can be afterwards.
  const CacheId again = test().Open(MakeConfig("fake", 0));
  const SequenceId second = Filled(again, text, 2 * kPage);
  test().executor.FinishAll();
  ASSERT_TRUE(store().Publish(second, Names(again, text, 2)).ok());
  store().Drop(second);
  EXPECT_EQ(store().caches().PurgeAll(), 0u);
  sampler_.FinishAll();
  EXPECT_EQ(store().caches().PurgeAll(), 2u);
}

TEST_F(SampleTest, PagesOfAGpuStayThere) {
  device_bytes_ = 16 << 20;
  store().report().SetSampler(&sampler_);
  CacheConfig config = MakeConfig("fake", 0);
  config.device = TestDevice::kOrdinal;
  const CacheId cache = test().Open(config);
  const SequenceId sequence = Create(cache);
  const AppendEntry entry{sequence, 0, 2 * kPage};
  ASSERT_TRUE(store().Append(cache, {0, config.layers}, {&entry, 1}).ok());
  test().device.executor.FinishAll();
  ASSERT_EQ(sampler_.pages.size(), 2u);
  const auto in_pool = [&](const uint8_t* byte) {
    bool found = false;
    for (uint32_t i = 0; i < test().device.pool->slabs(); ++i) {
      const absl::Span<uint8_t> slab = test().device.pool->SlabData(i);
      found |= byte >= slab.data() && byte < slab.data() + slab.size();
    }
    return found;
  };
  for (const PageSample& sample : sampler_.pages) {
    EXPECT_EQ(sample.device, TestDevice::kOrdinal);
    EXPECT_TRUE(in_pool(sample.raw) && in_pool(sample.encoded));
  }
  store().Drop(sequence);
  store().report().CheckInvariants();
  const uint64_t used = test().device.pool->used_bytes();
  EXPECT_GT(used, 0u);
  sampler_.FinishAll();
  store().report().CheckInvariants();
  store().tables().CollectReleased();
  EXPECT_EQ(test().device.pool->used_bytes(), 0u) << "no plan is open";
}

TEST_F(SampleTest, ItMayBeDoneAtOnceOrNever) {
  store().report().SetSampler(&sampler_);
  sampler_.at_once = true;
  const Text text = MakeText(8 * kPage);
  for (const char* codec : {"fake", "declining", "raw"}) {
    const CacheId cache = test().Open(MakeConfig(codec, 0));
    const SequenceId sequence = Filled(cache, text, 8 * kPage);
    test().executor.FinishAll();
    store().report().CheckInvariants();
    for (const PageSample& sample : sampler_.pages) EXPECT_NE(sample.encoded, nullptr);
    store().Drop(sequence);
  }
  // None of "raw", nor what was declined.
  EXPECT_LT(sampler_.pages.size(), 16u);
  EXPECT_GT(sampler_.pages.size(), 8u);
  sampler_.at_once = false;
  const CacheId cache = test().Open(MakeConfig("fake", 0));
  Filled(cache, text, 8 * kPage);
  test().executor.FinishAll();
  test_.reset();  // the store goes first
  sampler_.FinishAll();
}

}  // namespace
}  // namespace kvmanager
