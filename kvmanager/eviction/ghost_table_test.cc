#include "kvmanager/eviction/ghost_table.h"

#include <random>
#include <unordered_map>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

TEST(GhostTableTest, TakesWhatWasPutOnce) {
  GhostTable table(64);
  EXPECT_EQ(table.Put({.id = 7, .entry = 3, .from_end = 9}).id, 0u);
  EXPECT_EQ(table.Put({.id = 7, .entry = 4, .from_end = 8}).entry, 3u);  // its own former place
  Ghost ghost;
  ASSERT_TRUE(table.Take(7, &ghost));
  EXPECT_EQ(ghost.entry, 4u);
  EXPECT_EQ(ghost.from_end, 8u);
  EXPECT_FALSE(table.Take(7, &ghost));
  EXPECT_FALSE(table.Take(0, &ghost));
  EXPECT_FALSE(table.Take(8, &ghost));
}

TEST(GhostTableTest, TheOldestOfASetGoes) {
  GhostTable table(GhostTable::kWays);  // one set
  for (uint64_t id = 1; id <= GhostTable::kWays; ++id) EXPECT_EQ(table.Put({.id = id}).id, 0u);
  EXPECT_EQ(table.Put({.id = 10}).id, 1u);
  Ghost ghost;
  ASSERT_TRUE(table.Take(3, &ghost));
  EXPECT_EQ(table.Put({.id = 11}).id, 0u);
  EXPECT_EQ(table.Put({.id = 12}).id, 2u);
}

// Against a map: what is found is what was put last, and nothing is lost silently.
TEST(GhostTableTest, RandomOperations) {
  constexpr size_t kSize = 256;
  std::mt19937_64 random(1);
  GhostTable table(kSize);
  std::unordered_map<uint64_t, uint32_t> model;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 400; ++i) ids.push_back(random() | 1);
  for (uint32_t step = 0; step < 20000; ++step) {
    const uint64_t id = ids[random() % ids.size()];
    if (random() % 3 > 0) {
      const Ghost lost = table.Put({.id = id, .entry = step});
      if (lost.id != 0) {
        const auto known = model.find(lost.id);
        ASSERT_NE(known, model.end());
        EXPECT_EQ(known->second, lost.entry);
        model.erase(known);
      }
      model[id] = step;
    } else {
      Ghost ghost;
      const auto known = model.find(id);
      ASSERT_EQ(table.Take(id, &ghost), known != model.end());
      if (known == model.end()) continue;
      EXPECT_EQ(ghost.entry, known->second);
      model.erase(known);
    }
    ASSERT_LE(model.size(), kSize);
  }
  EXPECT_GT(model.size(), kSize / 2);
}

}  // namespace
}  // namespace kvmanager
