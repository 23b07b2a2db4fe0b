#include "codecs/layer_group.h"

#include <memory>
#include <vector>

#include "codecs/codec.h"
#include "codecs/raw/raw.h"
#include "codecs/registry.h"
#include "gtest/gtest.h"

namespace kvmanager {
namespace {

const PageLayout kWide{DType::kFloat16, 8, 64, 64};
const PageLayout kNarrow{DType::kBFloat16, 2, 128, 64};
const PageLayout kLong{DType::kFloat16, 8, 64, 128};

class LayerGroupTest : public ::testing::Test {
 protected:
  LayerGroupTest() {
    RegisterRaw(registry_);
    wide_ = Make(kWide);
    narrow_ = Make(kNarrow);
    long_ = Make(kLong);
  }
  std::unique_ptr<Codec> Make(const PageLayout& layout) {
    auto codec = registry_.Create("raw", layout);
    EXPECT_TRUE(codec.ok()) << codec.status();
    return codec.ok() ? *std::move(codec) : nullptr;
  }
  static LayerGroup Group(std::vector<int> layers, const Codec& codec) {
    return {std::move(layers), codec.layout(), &codec};
  }
  CodecRegistry registry_;
  std::unique_ptr<Codec> wide_, narrow_, long_;
};

TEST_F(LayerGroupTest, ACodecAloneIsOneGroup) {
  const LayerGroups groups = wide_->groups(3);
  ASSERT_EQ(groups.all().size(), 1u);
  EXPECT_EQ(groups.all()[0].layers, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(groups.all()[0].layout, kWide);
  EXPECT_EQ(groups.all()[0].codec, wide_.get());
  EXPECT_EQ(groups.layers(), 3);
  for (int layer = 0; layer < 3; ++layer) EXPECT_EQ(&groups.of(layer), &groups.all()[0]);
}

TEST_F(LayerGroupTest, EachLayerHasItsGroup) {
  const LayerGroups groups(6, {Group({1, 2, 5}, *wide_), Group({0}, *narrow_), Group({3, 4}, *wide_)});
  const std::vector<size_t> numbers = {1, 0, 0, 2, 2, 0};
  for (int layer = 0; layer < 6; ++layer) {
    EXPECT_EQ(groups.number_of(layer), numbers[layer]);
    EXPECT_EQ(&groups.of(layer), &groups.all()[numbers[layer]]);
    EXPECT_EQ(groups.of(layer).layout, layer == 0 ? kNarrow : kWide);
    EXPECT_EQ(groups.of(layer).codec, layer == 0 ? narrow_.get() : wide_.get());
  }
}

TEST_F(LayerGroupTest, ACopyIsTheSame) {
  LayerGroups copy;
  EXPECT_EQ(copy.layers(), 0);
  EXPECT_TRUE(copy.all().empty());
  {
    const LayerGroups groups(2, {Group({1}, *wide_), Group({0}, *narrow_)});
    copy = groups;
  }
  EXPECT_EQ(copy.of(0).codec, narrow_.get());
  EXPECT_EQ(copy.of(1).codec, wide_.get());
}

TEST_F(LayerGroupTest, RangesNameLayers) {
  EXPECT_EQ(LayerRanges({}), "");
  EXPECT_EQ(LayerRanges({4}), "4..4");
  EXPECT_EQ(LayerRanges({0, 1, 2}), "0..2");
  EXPECT_EQ(LayerRanges({0, 1, 5, 7, 8}), "0..1,5..5,7..8");
}

using LayerGroupDeathTest = LayerGroupTest;

TEST_F(LayerGroupDeathTest, BrokenInvariantsAbort) {
  const auto make = [](std::vector<LayerGroup> groups) { LayerGroups(3, std::move(groups)); };
  const LayerGroup first = Group({0, 1}, *wide_);
  make({first, Group({2}, *wide_)});
  constexpr char kBroken[] = "broken invariant";
  EXPECT_DEATH(make({}), kBroken);
  EXPECT_DEATH(make({first}), kBroken);
  EXPECT_DEATH(make({first, Group({1, 2}, *wide_)}), kBroken);
  EXPECT_DEATH(make({first, Group({3}, *wide_)}), kBroken);
  EXPECT_DEATH(make({first, Group({-1}, *wide_)}), kBroken);
  EXPECT_DEATH(make({Group({1, 0, 2}, *wide_)}), kBroken);
  EXPECT_DEATH(make({Group({0, 1, 2, 2}, *wide_)}), kBroken);
  EXPECT_DEATH(make({first, Group({2}, *wide_), Group({}, *wide_)}), kBroken);
  EXPECT_DEATH(make({first, Group({2}, *long_)}), kBroken);
  EXPECT_DEATH(make({first, {{2}, kNarrow, wide_.get()}}), kBroken);
  EXPECT_DEATH(make({first, {{2}, kWide, nullptr}}), kBroken);
}

}  // namespace
}  // namespace kvmanager
