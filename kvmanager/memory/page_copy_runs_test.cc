#include "kvmanager/memory/page_copy_runs.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

const uint8_t* NoEnd(const uint8_t*) { return reinterpret_cast<const uint8_t*>(UINTPTR_MAX); }

TEST(PageCopyRunsTest, JoinsWhatFollowsOnBothSides) {
  std::vector<uint8_t> device(1000), host(1000);
  const auto copy = [&](size_t from, size_t to, uint32_t bytes) {
    return PageCopy{device.data() + from, host.data() + to, bytes};
  };
  const auto joined = JoinNeighbours({copy(0, 100, 10), copy(10, 110, 20), copy(30, 130, 5),  // a run
                                      copy(35, 200, 5),                                       // elsewhere in the host
                                      copy(50, 205, 5),                                       // elsewhere on the device
                                      copy(45, 200, 5)},                                      // before, not behind
                                     NoEnd);
  ASSERT_EQ(joined.size(), 4);
  EXPECT_EQ(joined[0].device, device.data());
  EXPECT_EQ(joined[0].host, host.data() + 100);
  EXPECT_EQ(joined[0].bytes, 35);
  EXPECT_EQ(joined[1].bytes, 5);
  EXPECT_TRUE(JoinNeighbours({}, NoEnd).empty());
}

TEST(PageCopyRunsTest, StaysWithinTheMost) {
  std::vector<uint8_t> memory(1);
  std::vector<PageCopy> copies;
  for (uint64_t i = 0; i < 5; ++i) {
    copies.push_back({memory.data() + i * (kPageCopyBytesMax / 2), memory.data() + i * (kPageCopyBytesMax / 2),
                      kPageCopyBytesMax / 2});
  }
  const auto joined = JoinNeighbours(copies, NoEnd);
  ASSERT_EQ(joined.size(), 3);
  EXPECT_EQ(joined[0].bytes, kPageCopyBytesMax);
  EXPECT_EQ(joined[2].bytes, kPageCopyBytesMax / 2);
}

// Slabs are pinned one by one, and may lie side by side.
TEST(PageCopyRunsTest, StaysWithinWhatWasPinnedTogether) {
  std::vector<uint8_t> device(400), host(400);
  std::vector<PageCopy> copies;
  for (size_t at = 0; at < 400; at += 50) copies.push_back({device.data() + at, host.data() + at, 50});
  const auto joined =
      JoinNeighbours(copies, [&](const uint8_t* of) { return host.data() + (of - host.data()) / 200 * 200 + 200; });
  ASSERT_EQ(joined.size(), 2);
  EXPECT_EQ(joined[0].bytes, 200);
  EXPECT_EQ(joined[1].host, host.data() + 200);
  EXPECT_EQ(joined[1].bytes, 200);
}

TEST(PageCopyRunsTest, CopiesTheSameBytes) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<uint8_t> device(4096), one(4096), other(4096);
    for (uint8_t& byte : device) byte = static_cast<uint8_t>(random());
    std::vector<PageCopy> copies;
    for (size_t at = 0, to = 0; at < 3000 && to < 3000;) {
      const uint32_t bytes = 16 * (1 + random() % 8);
      copies.push_back({device.data() + at, one.data() + to, bytes});
      at += bytes + (random() % 3 == 0 ? 16 : 0);
      to += bytes + (random() % 3 == 0 ? 16 : 0);
    }
    for (const PageCopy& copy : copies) std::memcpy(copy.host, copy.device, copy.bytes);
    for (const PageCopy& copy : JoinNeighbours(copies, NoEnd)) {
      std::memcpy(other.data() + (copy.host - one.data()), copy.device, copy.bytes);
    }
    ASSERT_EQ(one, other);
  }
}

}  // namespace
}  // namespace kvmanager
