// Layers whose encoded pages differ in size, and pages that a policy keeps raw.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "kvmanager/store/store_fixture.h"

namespace kvmanager {
namespace {

using testing::kPage;
using testing::MakeConfig;
using testing::MakeRawPage;
using testing::MakeText;
using testing::PageStoreTest;
using testing::RawPrefixEquals;
using testing::Text;

constexpr int kLayers = 6;

class LayersTest : public PageStoreTest {
 protected:
  LayersTest() { pool_bytes_ = 128 << 20; }
  uint64_t SlotBytes(CacheId cache, int layer) {
    return SlabAllocator::RoundedSlotBytes(store().caches().codec(cache)->info().page_bytes(layer));
  }
};

TEST_F(LayersTest, EachHasSlotsOfItsOwnSize) {
  const CacheId cache = test().Open(MakeConfig("uneven", 0, "a", kLayers));
  const Text text = MakeText(4 * kPage);
  const SequenceId a = Filled(cache, text, 3 * kPage);
  ASSERT_TRUE(test().AppendAll(cache, a, text, 3 * kPage, kPage).ok());
  test().executor.FinishAll();
  // The page before the last append has aged in every layer; the newest one has not.
  uint64_t encoded = 0;
  for (int layer = 0; layer < kLayers; ++layer) encoded += 4 * SlotBytes(cache, layer);
  EXPECT_EQ(store().caches().Describe(cache)->encoded_bytes, encoded);
  EXPECT_EQ(test().pool->used_bytes(), encoded + store().caches().Describe(cache)->raw_bytes);
  EXPECT_EQ(Gauge("kvmanager_page_bytes{codec=\"uneven\",form=\"encoded\",state=\"resident\",tier=\"host\"}"),
            double(encoded));
  ASSERT_TRUE(store().Publish(a, Names(cache, text, 4)).ok());
  EXPECT_EQ(store().caches().Match(cache, Names(cache, text, 4))->hit_blocks, 4);
}

// With few slabs every layer's slots are of the largest layer's size, so that a cache needs no slab per layer.
TEST_F(LayersTest, AFewSlabsServeManyLayers) {
  pool_bytes_ = 6 << 20;
  constexpr int kManyLayers = 40;
  const CacheId cache = test().Open(MakeConfig("uneven", 0, "a", kManyLayers));
  const Text text = MakeText(3 * kPage);
  Filled(cache, text, 3 * kPage);
  test().executor.FinishAll();
  EXPECT_EQ(store().caches().Describe(cache)->encoded_bytes, 3u * kManyLayers * SlotBytes(cache, kManyLayers - 1));
}

TEST_F(LayersTest, AFullPoolNamesTheSlotsWanted) {
  pool_bytes_ = 4 << 20;
  const CacheId cache = test().Open(MakeConfig("uneven", 0, "a", kLayers));
  const Text text = MakeText(400 * kPage);
  const SequenceId a = Create(cache);
  absl::Status status;
  for (int at = 0; status.ok() && at < 400; ++at) {
    status = test().AppendAll(cache, a, text, at * kPage, kPage);
    test().executor.FinishAll();
  }
  ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("1 slots of "), absl::string_view::npos) << status;
  store().report().CheckInvariants();
}

TEST_F(LayersTest, SinksStayRawAndAreNoAnomaly) {
  const CacheId cache = test().Open(MakeConfig("sinks", 0));
  const Text text = MakeText(5 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage);
  ASSERT_TRUE(test().AppendAll(cache, a, text, 4 * kPage, kPage).ok());
  test().executor.FinishAll();
  const auto lease = Attend(cache, a, 5 * kPage - 1, 1);
  ASSERT_TRUE(lease->ready());
  for (int page = 0; page < 4; ++page) EXPECT_EQ(lease->pages(0)[page].encoded == nullptr, page < 2) << page;
  EXPECT_EQ(test().store_metrics.sink_pages.Value(), 4);
  EXPECT_EQ(test().store_metrics.declined_pages.Value(), 0);
}

TEST_F(LayersTest, SinksOfAPrefixHitAreReadRaw) {
  const CacheConfig config = MakeConfig("sinks", 2);
  const CacheId cache = test().Open(config);
  const Text text = MakeText(8 * kPage);
  const SequenceId a = Filled(cache, text, 4 * kPage);
  const auto names = Names(cache, text, 4);
  ASSERT_TRUE(store().Publish(a, names).ok());
  // Found before the codec has said that they are sinks; the hit of block 0 alone, and of all.
  const auto first = store().Create(cache, {names[0]}), all = store().Create(cache, names);
  ASSERT_EQ(first->match.hit_blocks, 1);
  ASSERT_EQ(all->match.hit_blocks, 4);
  auto lease = Attend(cache, all->sequence, 4 * kPage - 1, 1);
  EXPECT_FALSE(lease->ready());
  test().executor.FinishAll();
  ASSERT_TRUE(lease->ready());
  const auto expect_form = [&](const AttentionPage& page, int index) {
    EXPECT_EQ(page.encoded == nullptr, index < 2) << index;
    EXPECT_EQ(page.raw == nullptr, index >= 2) << index;
    if (page.raw == nullptr) return;
    EXPECT_TRUE(RawPrefixEquals(config.layout, page.raw, MakeRawPage(config.layout, text, index, kPage, 0), kPage));
  };
  for (int page = 0; page < 4; ++page) expect_form(lease->pages(0)[page], page);
  lease = nullptr;
  // Nobody but blocks keeps them now, and found later they are the same.
  for (const SequenceId id : {a, first->sequence, all->sequence}) store().Drop(id);
  const auto later = store().Create(cache, {names[0]});
  ASSERT_EQ(later->match.hit_blocks, 1);
  ASSERT_TRUE(test().AppendAll(cache, later->sequence, text, kPage, kPage).ok());
  test().executor.FinishAll();
  lease = Attend(cache, later->sequence, 2 * kPage - 1, 1);
  ASSERT_TRUE(lease->ready());
  expect_form(lease->pages(0)[0], 0);
  // Of two layers: two pages, and the later sequence's own second one. Pages that were found are not asked again.
  EXPECT_EQ(test().store_metrics.sink_pages.Value(), 6);
}

// Pages of the last layer have another shape: `last`'s.
class TwoShapes final : public Codec {
 public:
  TwoShapes(std::unique_ptr<Codec> first, std::unique_ptr<Codec> last)
      : first_(std::move(first)), last_(std::move(last)) {}
  const CodecInfo& info() const override { return first_->info(); }
  const PageLayout& layout() const override { return first_->layout(); }
  LayerGroups groups(int layers) const override {
    LayerGroup most{.layers = {}, .layout = first_->layout(), .codec = first_.get()};
    for (int layer = 0; layer + 1 < layers; ++layer) most.layers.push_back(layer);
    return LayerGroups(layers, {std::move(most), {{layers - 1}, last_->layout(), last_.get()}});
  }
  size_t encode_workspace_bytes() const override { return 0; }
  void Encode(absl::Span<EncodeItem>, absl::Span<uint8_t>) const override {}
  void Decode(absl::Span<const DecodeItem>) const override {}
  absl::Status Validate(int, absl::Span<const uint8_t>) const override { return absl::OkStatus(); }
  const PageAttention& attention() const override { return first_->attention(); }

 private:
  const std::unique_ptr<Codec> first_, last_;
};

TEST_F(LayersTest, ACacheOfSeveralPageShapesIsRefused) {
  const CacheConfig config = MakeConfig("fake", 0, "a", kLayers);
  PageLayout wider = config.layout;
  wider.head_dim *= 2;
  const auto make = [&](const PageLayout& layout) { return *test().registry.Create("fake", layout); };
  const auto open = [&](const PageLayout& last) {
    return store().caches().Open(config, std::make_shared<TwoShapes>(make(config.layout), make(last)));
  };
  const absl::Status refused = open(wider).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  const ErrorDetail detail = DetailOf(refused);
  EXPECT_EQ(detail.field, "page shape of layers 5..5");
  EXPECT_NE(detail.value.find(absl::StrCat("head_dim ", wider.head_dim, ",")), std::string::npos) << refused;
  EXPECT_NE(detail.bound.find(absl::StrCat("head_dim ", config.layout.head_dim, ",")), std::string::npos) << refused;
  EXPECT_TRUE(store().caches().List().empty());
  EXPECT_TRUE(open(config.layout).ok());
}

}  // namespace
}  // namespace kvmanager
