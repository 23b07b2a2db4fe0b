#include "kvmanager/store/gone_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>

namespace kvmanager {
namespace {

BlockKey Key(uint32_t n) { return Sha256({reinterpret_cast<const uint8_t*>(&n), sizeof n}); }

TEST(GoneBlocksTest, SaysHowABlockWent) {
  ManualClock clock;
  GoneBlocks gone(&clock, 4);
  EXPECT_FALSE(gone.Find(Key(1)).has_value());
  gone.Add(Key(1), {GoneReason::kEvicted, 3, 7, "0123456789", "none"});
  clock.AdvanceNs(2'500'000'000);
  gone.Add(Key(2), {.reason = GoneReason::kDiskRecord, .tier = kDiskTier});
  const auto first = gone.Find(Key(1)), second = gone.Find(Key(2));
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_EQ(first->reason, GoneReason::kEvicted);
  EXPECT_EQ(first->tier, 3);
  EXPECT_EQ(first->cache, 7u);
  EXPECT_EQ(first->owner, "01234567");
  EXPECT_EQ(first->taker, "none");
  EXPECT_DOUBLE_EQ(first->seconds_ago, 2.5);
  EXPECT_EQ(second->reason, GoneReason::kDiskRecord);
  EXPECT_EQ(second->tier, kDiskTier);
  EXPECT_EQ(second->owner, "");
  EXPECT_EQ(second->taker, "");
  EXPECT_DOUBLE_EQ(second->seconds_ago, 0);
}

TEST(GoneBlocksTest, GoesBackAsFarAsItHasRoom) {
  ManualClock clock;
  GoneBlocks gone(&clock, 4);
  clock.AdvanceNs(10'000'000'000);
  for (uint32_t n = 0; n < 4; ++n) {
    clock.AdvanceNs(1'000'000'000);
    gone.Add(Key(n), {});
  }
  EXPECT_DOUBLE_EQ(gone.seconds(), 14);
  EXPECT_EQ(gone.size(), 4u);
  gone.Add(Key(4), {});
  EXPECT_FALSE(gone.Find(Key(0)).has_value());
  EXPECT_TRUE(gone.Find(Key(1)).has_value());
  EXPECT_DOUBLE_EQ(gone.seconds(), 2);
  gone.CheckInvariants();
}

// A key that goes again and again takes places of the ring, but never a long chain.
TEST(GoneBlocksTest, OneKeyThatGoesOften) {
  ManualClock clock;
  GoneBlocks gone(&clock, 64);
  for (int i = 0; i < 1000; ++i) gone.Add(Key(1), {.cache = static_cast<CacheId>(i)});
  EXPECT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone.Find(Key(1))->cache, 999u);
  gone.CheckInvariants();
}

TEST(GoneBlocksTest, RandomAgainstAModel) {
  for (const size_t room : {1, 2, 16, 256}) {
    std::mt19937 random(static_cast<uint32_t>(room));
    ManualClock clock;
    GoneBlocks gone(&clock, room);
    struct Went {
      uint32_t key;
      CacheId number;
      int64_t at;
    };
    std::deque<Went> model;  // the newest last
    for (CacheId number = 1; number <= 5000; ++number) {
      clock.AdvanceNs(static_cast<int64_t>(random() % 1000) * 1'000'000);
      const uint32_t key = static_cast<uint32_t>(random() % (2 * room));
      gone.Add(Key(key), {.reason = static_cast<GoneReason>(number % 4), .cache = number});
      model.push_back({key, number, clock.NowNs()});
      if (model.size() > room) model.pop_front();
      if (number % 100 == 0) gone.CheckInvariants();
      const uint32_t asked = static_cast<uint32_t>(random() % (2 * room));
      const auto known =
          std::find_if(model.rbegin(), model.rend(), [&](const Went& each) { return each.key == asked; });
      const auto found = gone.Find(Key(asked));
      ASSERT_EQ(found.has_value(), known != model.rend());
      if (!found.has_value()) continue;
      EXPECT_EQ(found->cache, known->number);
      EXPECT_EQ(found->reason, static_cast<GoneReason>(known->number % 4));
      EXPECT_DOUBLE_EQ(found->seconds_ago, static_cast<double>(clock.NowNs() - known->at) * 1e-9);
    }
    std::set<uint32_t> keys;
    for (const Went& each : model) keys.insert(each.key);
    EXPECT_EQ(gone.size(), keys.size());
  }
}

}  // namespace
}  // namespace kvmanager
