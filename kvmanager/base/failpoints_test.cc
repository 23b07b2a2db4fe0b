#include "kvmanager/base/failpoints.h"

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

std::vector<bool> Passes(Failpoint point, int count) {
  std::vector<bool> failed;
  for (int i = 0; i < count; ++i) failed.push_back(Fails(point));
  return failed;
}

class FailpointsTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(SetFailpoints("").ok()); }
};

TEST_F(FailpointsTest, AreOffUnlessSet) {
  for (int i = 0; i < kFailpoints; ++i) EXPECT_EQ(Passes(static_cast<Failpoint>(i), 100), std::vector<bool>(100));
  ASSERT_TRUE(SetFailpoints("peer.send=1/1").ok());
  EXPECT_EQ(Passes(Failpoint::kPeerSend, 10), std::vector<bool>(10, true));
  EXPECT_EQ(Passes(Failpoint::kPeerReceive, 100), std::vector<bool>(100));
  ASSERT_TRUE(SetFailpoints("").ok());
  EXPECT_EQ(Passes(Failpoint::kPeerSend, 100), std::vector<bool>(100));
}

TEST_F(FailpointsTest, FailAtTheirRateAndAsTheSeedSays) {
  const auto with = [](const char* text) {
    EXPECT_TRUE(SetFailpoints(text).ok()) << text;
    return Passes(Failpoint::kReadAllocate, 10000);
  };
  const std::vector<bool> seven = with("read.allocate=1/50,seed=7");
  const auto count = std::count(seven.begin(), seven.end(), true);
  EXPECT_GT(count, 120);
  EXPECT_LT(count, 300);
  EXPECT_EQ(with("seed=7,accept=1/3,read.allocate=1/50"), seven);
  EXPECT_NE(with("read.allocate=1/50,seed=8"), seven);
  EXPECT_EQ(with("read.allocate=0/50"), std::vector<bool>(10000));
}

TEST_F(FailpointsTest, RefuseWhatTheyDoNotKnow) {
  for (const char* text : {"nothing=1/2", "accept", "accept=1", "accept=2/1", "accept=1/0", "accept=-1/2", "seed=x",
                           "accept=1/2000000000", "=1/2"}) {
    EXPECT_EQ(SetFailpoints(text).code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_FALSE(Fails(Failpoint::kAccept)) << text;
  }
}

}  // namespace
}  // namespace kvmanager
