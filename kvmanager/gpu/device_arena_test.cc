#include "kvmanager/gpu/device_arena.h"

#include <gtest/gtest.h>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

TEST(DeviceArenaTest, ArenasAreWholePiecesOfGpuMemory) {
  constexpr uint64_t kUnit = DeviceRegion::kGranularityBytes;
  EXPECT_EQ(DeviceArena::RoundedBytes(1).value(), kUnit);
  EXPECT_EQ(DeviceArena::RoundedBytes(kUnit).value(), kUnit);
  EXPECT_EQ(DeviceArena::RoundedBytes(kUnit + 1).value(), 2 * kUnit);
  EXPECT_EQ(DeviceArena::RoundedBytes(DeviceArena::kBytesMax).value(), DeviceArena::kBytesMax);
  for (const uint64_t bad : {uint64_t{0}, DeviceArena::kBytesMax + 1, UINT64_MAX}) {
    const auto refused = DeviceArena::RoundedBytes(bad);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << bad;
    EXPECT_EQ(DetailOf(refused.status()).field, "bytes");
  }
}

}  // namespace
}  // namespace kvmanager
