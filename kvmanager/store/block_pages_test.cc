#include "kvmanager/store/block_pages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

bool Equal(const Page& a, const Page& b) {
  return a.state == b.state && a.busy == b.busy && a.declined == b.declined && a.rung == b.rung &&
         a.raw_holds == b.raw_holds && a.pins == b.pins && a.encoded_pins == b.encoded_pins && a.raw == b.raw &&
         a.encoded == b.encoded && a.checksum == b.checksum;
}

// A page that may rest.
Page Resident(std::mt19937& random, bool raw, uint8_t rung) {
  Page page;
  page.state = PageState::kResident;
  page.checksum = (uint64_t{random()} << 32) + random();
  const PageId slot{random() % (UINT32_MAX - 1), random()};
  page.declined = raw;
  (raw ? page.raw : page.encoded) = slot;
  if (!raw) page.rung = rung;
  return page;
}

TEST(BlockPagesTest, AreAtRestWhatTheyWere) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const uint32_t layers = 1 + random() % 40;
    const bool activations = random() % 2 == 0;
    const uint8_t rung = static_cast<uint8_t>(random() % 3);
    BlockPages pages(layers, activations);
    std::vector<Page> expected;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      expected.push_back(Resident(random, /*raw=*/random() % 3 == 0, rung));
      pages.WakeKeysValues(layer) = expected.back();
    }
    for (uint32_t layer = 0; activations && layer < layers; ++layer) {
      expected.push_back(random() % 2 == 0 ? Page() : Resident(random, /*raw=*/false, 0));
      pages.WakeActivations(layer) = expected.back();
    }
    ASSERT_FALSE(pages.at_rest());
    pages.Rest();
    ASSERT_TRUE(pages.at_rest());
    for (const bool moved : {false, true}) {
      if (moved) pages = BlockPages(std::move(pages));
      ASSERT_EQ(pages.keys_values().size(), layers);
      ASSERT_EQ(pages.activations().size(), activations ? layers : 0);
      size_t at = 0;
      for (const Page page : pages.all()) ASSERT_TRUE(Equal(page, expected[at++]));
      ASSERT_EQ(at, expected.size());
    }
    // A change of one wakes all, and leaves the others as they were.
    const uint32_t changed = random() % layers;
    pages.WakeKeysValues(changed).pins = 3;
    expected[changed].pins = 3;
    ASSERT_FALSE(pages.at_rest());
    pages.Rest();
    ASSERT_FALSE(pages.at_rest());
    size_t at = 0;
    for (const Page page : pages.all()) ASSERT_TRUE(Equal(page, expected[at++]));
  }
}

TEST(BlockPagesTest, WhatIsInUseDoesNotRest) {
  std::mt19937 random(8);
  const auto rests = [&](auto change, bool activations = false) {
    BlockPages pages(2, activations);
    for (const uint32_t layer : {0, 1}) pages.WakeKeysValues(layer) = Resident(random, false, 0);
    change(activations ? pages.WakeActivations(1) : pages.WakeKeysValues(1));
    pages.Rest();
    return pages.at_rest();
  };
  EXPECT_TRUE(rests([](Page&) {}));
  EXPECT_TRUE(rests([](Page&) {}, /*activations=*/true));  // all of them Free
  EXPECT_FALSE(rests([](Page& page) { page.pins = 1; }));
  EXPECT_FALSE(rests([](Page& page) { page.raw_holds = 1; }));
  EXPECT_FALSE(rests([](Page& page) { page.busy = true; }));
  EXPECT_FALSE(rests([](Page& page) { page.raw = {1, 1}; }));  // in both forms
  EXPECT_FALSE(rests([](Page& page) { page.encoded = PageId(); }));
  EXPECT_FALSE(rests([](Page& page) { page = Page(); }));
  for (const PageState state : {PageState::kFilling, PageState::kReceiving, PageState::kSealed, PageState::kEncoding,
                                PageState::kQuarantined}) {
    EXPECT_FALSE(rests([&](Page& page) { page.state = state; })) << PageStateName(state);
    EXPECT_FALSE(rests([&](Page& page) { page.state = state; }, /*activations=*/true)) << PageStateName(state);
  }
}

TEST(BlockPagesTest, NoneAreEmpty) {
  BlockPages pages;
  EXPECT_TRUE(pages.keys_values().empty());
  EXPECT_TRUE(pages.all().empty());
  pages.Rest();
  EXPECT_FALSE(pages.at_rest());
}

}  // namespace
}  // namespace kvmanager
