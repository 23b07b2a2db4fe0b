// Random names put into a table and taken out, against a map; and what the table says of wrong names.
#include "kvmanager/store/page_table.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

namespace kvmanager {
namespace {

BlockName NameOf(uint64_t number) {
  BlockName name;
  std::memcpy(name.key.bytes.data(), &number, sizeof number);
  name.tokens = name.key;
  name.tokens.bytes[31] = 1;
  return name;
}

TEST(PageTable, IsAMap) {
  for (const uint64_t names : {1, 15, 16, 17, 400, 5000}) {
    SCOPED_TRACE(names);
    std::mt19937_64 random(names);
    PageTable table;
    std::map<uint64_t, std::unique_ptr<Block>> model;
    for (int step = 0; step < 20000; ++step) {
      const uint64_t number = random() % names;
      const auto found = model.find(number);
      EXPECT_EQ(table.FindKey(NameOf(number).key), found == model.end() ? nullptr : found->second.get());
      // More goes in than out at first, then less.
      if (found == model.end() && random() % 4 < (step < 10000 ? 3 : 1)) {
        auto block = std::make_unique<Block>();
        block->name = NameOf(number);
        table.Insert(block.get());
        EXPECT_TRUE(block->published);
        model.emplace(number, std::move(block));
      } else if (found != model.end() && random() % 4 < (step < 10000 ? 1 : 3)) {
        table.Erase(found->second.get());
        EXPECT_FALSE(found->second->published);
        model.erase(found);
      }
      ASSERT_EQ(table.size(), model.size());
    }
    std::set<const Block*> listed, expected;
    for (const Block& block : table) EXPECT_TRUE(listed.insert(&block).second);
    for (const auto& [number, block] : model) expected.insert(block.get());
    EXPECT_EQ(listed, expected);
  }
}

TEST(PageTable, SaysWhyItFoundNothing) {
  PageTable table;
  Block block;
  block.index = 3;
  block.name = NameOf(7);
  table.Insert(&block);
  MissReason reason;
  EXPECT_EQ(table.Find(NameOf(7), 3, &reason), &block);
  EXPECT_EQ(reason, MissReason::kNone);
  EXPECT_EQ(table.Find(NameOf(8), 3, &reason), nullptr);
  EXPECT_EQ(reason, MissReason::kNotFound);
  EXPECT_EQ(table.Find(NameOf(7), 4, &reason), nullptr);
  EXPECT_EQ(reason, MissReason::kNotFound);
  BlockName other = NameOf(7);
  other.tokens.bytes[0] ^= 1;
  EXPECT_EQ(table.Find(other, 3, &reason), nullptr);
  EXPECT_EQ(reason, MissReason::kTokenMismatch);
  table.Erase(&block);
}

}  // namespace
}  // namespace kvmanager
