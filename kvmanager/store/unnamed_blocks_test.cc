#include "kvmanager/store/unnamed_blocks.h"

#include <cstddef>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

TEST(UnnamedBlocksTest, RandomStepsKeepWhatASetKeeps) {
  std::mt19937 random(1);
  std::vector<std::unique_ptr<Block>> blocks;
  for (int i = 0; i < 300; ++i) blocks.push_back(std::make_unique<Block>());
  UnnamedBlocks unnamed;
  std::set<Block*> model;
  for (int step = 0; step < 20000; ++step) {
    Block* const block = blocks[random() % blocks.size()].get();
    if (model.insert(block).second) {
      unnamed.Insert(block);
    } else {
      model.erase(block);
      unnamed.Erase(block);
    }
    ASSERT_EQ(unnamed.all().size(), model.size());
    if (step % 100 == 0) ASSERT_EQ(std::set<Block*>(unnamed.all().begin(), unnamed.all().end()), model);
  }
}

TEST(UnnamedBlocksDeathTest, WhatIsNotThereCannotBeErased) {
  UnnamedBlocks unnamed;
  Block in, out;
  unnamed.Insert(&in);
  EXPECT_DEATH(unnamed.Erase(&out), "broken invariant");
}

}  // namespace
}  // namespace kvmanager
