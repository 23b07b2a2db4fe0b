// Where the blocks of a prefix hit were: a value of the store and its metrics.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvmanager {

/// kDisk: a call of its taker, or of somebody before who did not take it, brought it from there to the host.
enum class HitTier : uint8_t { kHost = 0, kDevice, kDisk };
inline constexpr size_t kHitTiers = 3;

/// "host", "device", "disk".
const char* HitTierName(HitTier tier);

using HitTierCounts = std::array<uint32_t, kHitTiers>;  // blocks, by HitTier

}  // namespace kvmanager
