#include "kvmanager/base/range_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <vector>

namespace kvmanager {
namespace {

constexpr uint64_t kAlign = RangeAllocator::kAlign;

TEST(RangeAllocator, TakesTheSmallestRangeThatIsLargeEnough) {
  RangeAllocator ranges(16 * kAlign);
  const auto wide = ranges.Take(4 * kAlign), between = ranges.Take(1), narrow = ranges.Take(2 * kAlign);
  ASSERT_TRUE(wide && between && narrow);
  const auto rest = ranges.Take(9 * kAlign);
  ASSERT_TRUE(rest);
  EXPECT_FALSE(ranges.Take(1));
  ranges.GiveBack(*wide, 4 * kAlign);
  ranges.GiveBack(*narrow, 2 * kAlign);
  EXPECT_EQ(ranges.Take(2 * kAlign - 1), narrow);
  ranges.GiveBack(*narrow, 2 * kAlign);
  ranges.GiveBack(*between, 1);
  EXPECT_EQ(ranges.Take(7 * kAlign), wide) << "what was given back on both sides is one range";
  ranges.GiveBack(*wide, 7 * kAlign);
  ranges.GiveBack(*rest, 9 * kAlign);
  EXPECT_TRUE(ranges.all_free());
}

TEST(RangeAllocator, IsGivenWhatIsFree) {
  RangeAllocator ranges(8 * kAlign, /*all_free=*/false);
  EXPECT_FALSE(ranges.Take(1));
  ranges.GiveBack(2 * kAlign, 3 * kAlign);
  EXPECT_FALSE(ranges.Take(4 * kAlign));
  EXPECT_EQ(ranges.Take(3 * kAlign), 2 * kAlign);
}

TEST(RangeAllocator, AgainstAModelOfUnits) {
  std::mt19937 random(3);
  constexpr size_t kUnits = 64;
  RangeAllocator ranges(kUnits * kAlign);
  std::vector<bool> taken(kUnits, false);
  std::map<uint64_t, uint64_t> held;  // begin to bytes
  const auto longest = [&] {
    size_t most = 0, now = 0;
    for (const bool unit : taken) most = std::max(most, now = unit ? 0 : now + 1);
    return most;
  };
  for (int step = 0; step < 20000; ++step) {
    if (!held.empty() && random() % 2 == 0) {
      const auto range = std::next(held.begin(), static_cast<long>(random() % held.size()));
      for (uint64_t at = range->first; at < range->first + range->second; at += kAlign) taken[at / kAlign] = false;
      ranges.GiveBack(range->first, range->second);
      held.erase(range);
      continue;
    }
    const uint64_t bytes = 1 + random() % (9 * kAlign), units = (bytes + kAlign - 1) / kAlign;
    const auto at = ranges.Take(bytes);
    ASSERT_EQ(at.has_value(), units <= longest());
    if (!at) continue;
    for (uint64_t unit = *at / kAlign; unit < *at / kAlign + units; ++unit) {
      ASSERT_FALSE(taken[unit]);
      taken[unit] = true;
    }
    held.emplace(*at, bytes);
    ASSERT_EQ(ranges.all_free(), held.empty());
  }
}

}  // namespace
}  // namespace kvmanager
