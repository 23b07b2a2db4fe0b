#include "kvmanager/base/stream_copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvmanager {
namespace {

TEST(StreamCopyTest, CopiesEverySizeFromAndToEveryPlace) {
  constexpr uint8_t kAround = 0xee;
  std::vector<uint8_t> from(5000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 7 + i / 256);
  for (const size_t bytes : {0, 1, 63, 64, 65, 255, 256, 257, 1000, 4096, 4900}) {
    for (const size_t place : {0, 1, 16, 64, 99}) {
      std::vector<uint8_t> fetched(bytes + 200, kAround), stored(bytes + 200, kAround);
      FetchSideBySide(from.data() + place, fetched.data() + place, bytes);
      StoreStreaming(fetched.data() + place, stored.data() + place, bytes, /*next=*/from.data());
      EndStreaming();
      std::vector<uint8_t> expected(bytes + 200, kAround);
      std::memcpy(expected.data() + place, from.data() + place, bytes);
      EXPECT_EQ(fetched, expected) << bytes << " from " << place;
      EXPECT_EQ(stored, expected) << bytes << " to " << place;
    }
  }
}

}  // namespace
}  // namespace kvmanager
