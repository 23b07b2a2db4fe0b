#include "kvmanager/store/slot_classes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace kvmanager {
namespace {

uint64_t SlotBytes(const SlotClasses& classes) {
  uint64_t bytes = 0;
  for (uint8_t c : classes.of_layer) bytes += classes.bytes[c];
  return bytes;
}

TEST(SlotClasses, EqualLayersShareOne) {
  const std::vector<uint64_t> layers(80, 4096);
  const SlotClasses classes = MakeSlotClasses(layers, 8);
  EXPECT_EQ(classes.bytes, std::vector<uint64_t>{4096});
  EXPECT_EQ(classes.of_layer, std::vector<uint8_t>(80, 0));
}

TEST(SlotClasses, FewSizesAreKeptAsTheyAre) {
  const SlotClasses classes = MakeSlotClasses({3072, 1024, 2048, 1024}, 8);
  EXPECT_EQ(classes.bytes, (std::vector<uint64_t>{1024, 2048, 3072}));
  EXPECT_EQ(classes.of_layer, (std::vector<uint8_t>{2, 0, 1, 0}));
  EXPECT_EQ(MakeSlotClasses({3072, 1024, 2048, 1024}, 1).bytes, (std::vector<uint64_t>{3072}));
}

// Against every way to choose the classes.
TEST(SlotClasses, WasteTheFewestBytes) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<uint64_t> layers(1 + random() % 9);
    for (uint64_t& bytes : layers) bytes = 1024 + 64 * (random() % 40);
    const size_t classes_max = 1 + random() % 4;
    const SlotClasses classes = MakeSlotClasses(layers, classes_max);
    ASSERT_LE(classes.bytes.size(), classes_max);
    ASSERT_TRUE(std::is_sorted(classes.bytes.begin(), classes.bytes.end()));
    for (size_t i = 0; i < layers.size(); ++i) {
      ASSERT_GE(classes.bytes[classes.of_layer[i]], layers[i]);
      if (classes.of_layer[i] > 0) {
        ASSERT_LT(classes.bytes[classes.of_layer[i] - 1], layers[i]);
      }
    }
    uint64_t best = ~uint64_t{0};
    for (uint32_t chosen = 1; chosen < (1u << layers.size()); ++chosen) {
      if (static_cast<size_t>(__builtin_popcount(chosen)) > classes_max) continue;
      uint64_t bytes = 0;
      bool fits = true;
      for (uint64_t layer : layers) {
        uint64_t smallest = ~uint64_t{0};
        for (size_t i = 0; i < layers.size(); ++i) {
          if ((chosen >> i & 1) && layers[i] >= layer) smallest = std::min(smallest, layers[i]);
        }
        fits &= smallest != ~uint64_t{0};
        if (fits) bytes += smallest;
      }
      if (fits) best = std::min(best, bytes);
    }
    ASSERT_EQ(SlotBytes(classes), best);
  }
}

TEST(SlotClasses, ManyDifferentLayers) {
  std::vector<uint64_t> layers;
  for (int i = 0; i < 1024; ++i) layers.push_back(1024 + 64 * ((i * 37) % 1024));
  const SlotClasses classes = MakeSlotClasses(layers, kSlotClassesMax);
  EXPECT_EQ(classes.bytes.size(), kSlotClassesMax);
  EXPECT_EQ(classes.bytes.back(), *std::max_element(layers.begin(), layers.end()));
}

TEST(SlotClasses, ASmallPoolHasFew) {
  EXPECT_EQ(SlotClassesOfPool(1), 1u);
  EXPECT_EQ(SlotClassesOfPool(16), 2u);
  EXPECT_EQ(SlotClassesOfPool(64), kSlotClassesMax);
  EXPECT_EQ(SlotClassesOfPool(100000), kSlotClassesMax);
}

}  // namespace
}  // namespace kvmanager
