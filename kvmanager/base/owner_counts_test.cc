#include "kvmanager/base/owner_counts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>

#include "absl/strings/string_view.h"

namespace kvmanager {
namespace {

TEST(OwnerCountsTest, CountsAsAMapDoes) {
  OwnerCounts<uint32_t> counts;
  std::map<uint32_t, uint64_t> model;
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    const uint32_t owner = random() % 20;
    uint64_t& has = model[owner];
    if (random() % 2 == 0) {
      const uint64_t more = random() % 5;
      counts.Add(owner, more);
      has += more;
    } else {
      const uint64_t less = random() % (has + 1);
      counts.Remove(owner, less);
      has -= less;
    }
    uint64_t all = 0, most = 0;
    for (const auto& [each, count] : model) {
      all += count;
      most = std::max(most, count);
    }
    ASSERT_EQ(counts.Of(owner), has);
    ASSERT_EQ(counts.all(), all);
    ASSERT_EQ(counts.most(), most);
  }
}

TEST(OwnerCountsTest, NamesAreFoundByViews) {
  OwnerCounts<std::string> counts;
  const absl::string_view a = "tenant a";
  counts.Add(a);
  counts.Add(std::string(a), 2);
  EXPECT_EQ(counts.Of(a), 3u);
  EXPECT_EQ(counts.Of("b"), 0u);
  counts.Remove(a, 3);
  EXPECT_EQ(counts.all(), 0u);
  EXPECT_EQ(counts.most(), 0u);
}

TEST(OwnerCountsDeathTest, NobodyGivesBackMoreThanTheyHave) {
  OwnerCounts<int> counts;
  counts.Add(1, 2);
  EXPECT_DEATH(counts.Remove(1, 3), "");
  EXPECT_DEATH(counts.Remove(2), "");
}

}  // namespace
}  // namespace kvmanager
