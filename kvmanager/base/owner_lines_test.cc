#include "kvmanager/base/owner_lines.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace kvmanager {
namespace {

std::string TakeAll(OwnerLines<std::string, std::string>& lines) {
  std::string order;
  while (!lines.empty()) order += lines.Take() + " ";
  return order;
}

TEST(OwnerLinesTest, OwnersGoRound) {
  OwnerLines<std::string, std::string> lines;
  EXPECT_TRUE(lines.empty());
  for (const char* item : {"a1", "a2", "a3", "a4", "b1", "c1", "c2"}) lines.Push(std::string(item, 1), item);
  EXPECT_EQ(TakeAll(lines), "a1 b1 c1 a2 c2 a3 a4 ");
  EXPECT_TRUE(lines.empty());
}

// Who comes while another is served is next, however much that one has waiting, and whether it is done or asks again.
TEST(OwnerLinesTest, WhoWasServedLastGoesBehindWhoCame) {
  OwnerLines<std::string, std::string> lines;
  for (int i = 1; i <= 4; ++i) lines.Push("a", "a" + std::to_string(i));
  EXPECT_EQ(lines.Take(), "a1");
  lines.Push("b", "b1");
  lines.Push("c", "c1");
  EXPECT_EQ(TakeAll(lines), "b1 c1 a2 a3 a4 ");
  lines.Push("a", "a5");
  lines.Push("d", "d1");
  EXPECT_EQ(TakeAll(lines), "d1 a5 ");
}

TEST(OwnerLinesTest, WhatGoesTogetherIsOneTurn) {
  OwnerLines<std::string, std::string> lines;
  for (const char* item : {"x1", "y1", "x2", "x3", "x4", "y2"}) lines.Push("a", item);
  lines.Push("b", "x5");
  const auto take = [&] {
    std::string taken;
    const auto same = [](const std::string& first, const std::string& item) { return first[0] == item[0]; };
    for (const std::string& item : lines.TakeTogether(3, same)) taken += item + " ";
    return taken;
  };
  EXPECT_EQ(take(), "x1 x2 x3 ");
  EXPECT_EQ(take(), "x5 ");
  EXPECT_EQ(take(), "y1 y2 ");
  EXPECT_EQ(take(), "x4 ");
  EXPECT_TRUE(lines.empty());
}

// Nothing is lost, lines keep their order, and between two turns of an owner who waits each other one has one at most.
TEST(OwnerLinesTest, EveryoneWaitsForOneTurnOfEachOther) {
  OwnerLines<int, std::unique_ptr<std::pair<int, int>>> lines;
  std::mt19937 random(3);
  std::map<int, int> pushed, taken;
  std::map<int, std::map<int, int>> turns_since;  // of an owner who waits, since it was served or came: whose they were
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0) {
      const int owner = static_cast<int>(random() % (i % 3000 < 1500 ? 3 : 12));
      if (pushed[owner] == taken[owner]) turns_since[owner].clear();
      lines.Push(owner, std::make_unique<std::pair<int, int>>(owner, pushed[owner]++));
    } else if (!lines.empty()) {
      const auto [owner, number] = *lines.Take();
      ASSERT_EQ(number, taken[owner]++);
      turns_since[owner].clear();
      for (auto& [other, turns] : turns_since) {
        if (other == owner || taken[other] == pushed[other]) continue;
        ASSERT_LE(++turns[owner], 1);
      }
    }
    size_t waiting = 0, seen = 0;
    for (const auto& [owner, count] : pushed) waiting += count - taken[owner];
    lines.ForEach([&](const auto&) { ++seen; });
    ASSERT_EQ(seen, waiting);
    ASSERT_EQ(lines.empty(), waiting == 0);
  }
}

}  // namespace
}  // namespace kvmanager
