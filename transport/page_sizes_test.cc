#include "transport/page_sizes.h"

#include <random>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

TEST(PageSizesTest, IsTheListThatWasAppended) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    PageSizes sizes, parts;
    std::vector<uint32_t> list;
    uint64_t total = 0;
    for (int i = static_cast<int>(random() % 8); i > 0; --i) {
      const auto pages = static_cast<uint32_t>(random() % 5), bytes = 1 + static_cast<uint32_t>(random() % 3);
      sizes.Append(pages, bytes);
      PageSizes part;
      for (uint32_t page = 0; page < pages; ++page) part.push_back(bytes);
      parts.Append(part);
      list.insert(list.end(), pages, bytes);
      total += uint64_t{pages} * bytes;
    }
    ASSERT_EQ(sizes.size(), list.size());
    ASSERT_EQ(sizes.empty(), list.empty());
    ASSERT_EQ(sizes.total(), total);
    ASSERT_TRUE(sizes == parts);
    std::vector<uint32_t> seen;
    for (const uint32_t bytes : sizes) seen.push_back(bytes);
    ASSERT_EQ(seen, list);
    for (uint32_t page = 0; page < list.size(); ++page) ASSERT_EQ(sizes[page], list[page]);
    for (size_t i = 1; i < sizes.runs().size(); ++i) ASSERT_NE(sizes.runs()[i].bytes, sizes.runs()[i - 1].bytes);
  }
}

TEST(PageSizesTest, TotalsDoNotWrap) {
  PageSizes sizes;
  sizes.Append(1 << 20, 64 << 20);
  EXPECT_EQ(sizes.total(), uint64_t{1} << 46);
}

}  // namespace
}  // namespace kvmanager
